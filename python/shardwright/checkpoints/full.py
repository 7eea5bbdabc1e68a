"""Full checkpoints: the whole model in one file."""

from __future__ import annotations

import os
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from shardwright import quantized
from shardwright._core import newest_checkpoint, set_newest_checkpoint
from shardwright.checkpoints.file import Leaves, read_value, write_value
from shardwright.checkpoints.places import check_tag
from shardwright.checkpoints.tensors import MODEL, ModelTensors, extra_states
from shardwright.checkpoints.together import model_of, on_all_ranks
from shardwright.errors import ShardwrightError
from shardwright.job.objects import gathered
from shardwright.job.ranks import WORLD
from shardwright.job.runtime import Runtime
from shardwright.model import DistributedModel
from shardwright.model.gather import on_cpu
from shardwright.model.state_dict import EXTRA_STATE, PARTIAL_KEY, merged
from shardwright.model.translation import replaced
from shardwright.model.updates import Updates

#: In the directory, the folder with the file that says which full checkpoint is the newest. That of partial ones stays
#: as it is: a job that is started again goes on from the newest of these.
_NEWEST_OF_FULL = ".full"
#: The names of other files in the directory.
_TAKEN = re.compile(r"newest|user_content_.*|.*_partial", re.DOTALL)


def save_full(
    runtime: Runtime, operation: str, path: Any, tag: Any, given: Any, user_content: Any, *, translate: bool
) -> None:
    """Save the whole model's state dict in the file ``path/tag``, on rank 0. All ranks call this."""

    found: list[DistributedModel] = []

    def find() -> None:
        _check_name(path, tag)
        found.append(model_of(runtime, given))
        runtime[Updates].check_whole(operation)
        found[0].placement.deferred_loads.run(found[0].module)

    on_all_ranks(operation, find)
    (model,) = found
    state = whole_in_one_process(runtime, operation, model) if translate else model.state_dict()

    def write() -> None:
        if runtime.place.rank == 0:
            os.makedirs(path, exist_ok=True)
            if user_content is not None:
                content = os.path.join(path, f"user_content_{tag}")
                write_value(operation, content, user_content, "user_content", leaves_out=Leaves.ALL)
            write_value(operation, os.path.join(path, tag), state)
            os.makedirs(os.path.join(path, _NEWEST_OF_FULL), exist_ok=True)
            set_newest_checkpoint(os.path.join(path, _NEWEST_OF_FULL), tag)

    on_all_ranks(operation, write)


def whole_in_one_process(runtime: Runtime, operation: str, model: DistributedModel) -> OrderedDict[str, Any]:
    """Return the state dict that the model has in one process, on rank 0; {} elsewhere. All ranks call this."""
    tensors = ModelTensors(runtime, model)
    held = [piece for named in tensors.every if named.is_here for piece in named.pieces()]
    first = runtime.place.rdp_ranks[0] == runtime.place.rank or runtime.place.shards_parameters
    told = [(piece.name, piece.shape, piece.offset, piece.view.detach().cpu().contiguous()) for piece in held if first]
    scales = {name: one.detach().cpu() for name, one in quantized.saved_scales(model.module).items() if first}
    told += [(MODEL + name, tuple(one.shape), (0,) * one.dim(), one) for name, one in scales.items()]
    every = gathered(operation, told, WORLD, to_first=True)
    names = [name for name in tensors.names if name not in tensors.scales]
    order = gathered(operation, (names, tensors.aliases), WORLD, to_first=True)
    further = [name for of_rank in gathered(operation, list(scales), WORLD, to_first=True) for name in of_rank]
    own = {f"{path}.{EXTRA_STATE}".lstrip("."): on_cpu(part.get_extra_state()) for path, part in extra_states(model)}
    states = gathered(operation, own, WORLD, to_first=True)
    whole: dict[str, torch.Tensor] = {}
    for one in every:
        for name, shape, offset, values in one:
            known = whole.get(name)
            if known is None:
                known = whole[name] = torch.empty(shape, dtype=values.dtype)
            box = known
            for dim, (begin, size) in enumerate(zip(offset, values.shape, strict=True)):
                box = box.narrow(dim, begin, size)
            box.copy_(values)
    aliases = {name: of for names, of_rank in order for name, of in of_rank.items()}
    listed = dict.fromkeys(name for names, _ in order for name in names)
    made = quantized.templates(model.module)
    flat = {name.removeprefix(MODEL): one for name, one in whole.items()}
    found = OrderedDict((name, flat[aliases.get(name, name)]) for name in listed)
    if order:
        found |= {name: how.of_flat(flat, f"{name}.") for name, how in made.items()}
        found = merged([{**found, **{name: flat[name] for name in further}}], dict.fromkeys([*listed, *made]))
    for of_rank in states:
        for name, state in of_rank.items():
            found.setdefault(name, state)
    return found


def load_full(
    runtime: Runtime,
    operation: str,
    path: Any,
    tag: Any,
    given: Any,
    strict: bool,
    translate: Callable[[dict[str, Any]], Mapping[str, Any]] | None,
) -> Any:
    """Load the file ``path/tag`` into the model, and return the user content. All ranks call this."""
    found: list[tuple[DistributedModel, dict[str, Any], Any]] = []

    def read() -> None:
        model = model_of(runtime, given)
        _check_name(path, tag)
        state = read_value(operation, os.path.join(path, tag))
        beside = os.path.join(path, f"user_content_{tag}")
        content = read_value(operation, beside) if os.path.exists(beside) else None
        if not isinstance(state, Mapping):
            raise ShardwrightError(f"{os.path.join(path, tag)!r} has a {type(state).__name__}, and no state dict")
        state = {name: value for name, value in state.items() if name != PARTIAL_KEY or value is False}
        if translate is not None:
            state.pop(PARTIAL_KEY, None)
            state = {**translate(state), PARTIAL_KEY: False}
        _check_shapes(runtime, model, state)
        found.append((model, state, content))

    on_all_ranks(operation, read)
    model, state, content = found[0]

    def load() -> None:
        model.load_state_dict(state, strict=strict)

    with runtime[Updates].loading("weights"):
        on_all_ranks(operation, load)
    return content


def _check_shapes(runtime: Runtime, model: DistributedModel, state: Mapping[str, Any]) -> None:
    """Refuse values that cannot be those of the model's tensors, which PyTorch tells after it has taken the others.

    Raises:
        ShardwrightError: A value is no tensor, or has another shape; names it, and what is allowed.
    """
    tensors = ModelTensors(runtime, model)
    shapes = {name.removeprefix(MODEL): shape for name, (_, shape) in tensors.wanted().items()}
    shapes |= {alias: shapes[name] for alias, name in tensors.aliases.items()}
    # Those of the library's modules may have other layouts than the weights that they were made of.
    untranslated = [path for path, _ in replaced(model.module)] if state.get(PARTIAL_KEY) is False else []
    for path in [*_reading_anything(model.module), *untranslated]:
        shapes = {name: shape for name, shape in shapes.items() if not name.startswith(path)}
    for name, value in state.items():
        if (shape := shapes.get(name)) is None:
            continue
        is_tensor = isinstance(value, torch.Tensor)
        # PyTorch reads a single number from a 1-D tensor, too.
        if not is_tensor or (tuple(value.shape) != shape and (shape != () or value.dim() != 1 or not len(value))):
            is_like = f"a tensor of shape {list(value.shape)}" if is_tensor else f"a {type(value).__name__}"
            raise ShardwrightError(f"{name!r} is {is_like}; allowed: a tensor of shape {list(shape)}, as in the model")


def _reading_anything(module: nn.Module) -> Iterator[str]:
    """Yield what begins the names of tensors of modules that read state dicts their own way."""
    for path, part in module.named_modules():
        module_of_method = getattr(part._load_from_state_dict, "__module__", "")
        if part._load_state_dict_pre_hooks or not module_of_method.startswith("torch."):
            yield f"{path}." if path else ""


def newest_full(path: str | os.PathLike[str]) -> str:
    """Return the tag of the newest full checkpoint in a directory.

    Raises:
        ShardwrightError: There is none.
    """
    tag = newest_checkpoint(os.path.join(path, _NEWEST_OF_FULL))
    if tag is None:
        tag = newest_checkpoint(path)  # earlier versions had one for both kinds
    if tag is None:
        raise ShardwrightError(f"{os.fspath(path)!r} has no checkpoint that is the newest")
    return tag


def _check_name(path: str | os.PathLike[str], tag: object) -> None:
    if _TAKEN.fullmatch(check_tag(path, tag)):
        raise ShardwrightError(
            f"tag is {tag!r}; allowed: not the name of another file of checkpoints: 'newest', 'user_content_...', "
            "'..._partial'"
        )
