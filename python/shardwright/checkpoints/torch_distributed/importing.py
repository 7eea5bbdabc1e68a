"""``smp.import_torch_checkpoint``."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from shardwright._core import CheckpointWriter, __version__
from shardwright.checkpoints.encoding import Encoder
from shardwright.checkpoints.places import check_on_disk
from shardwright.checkpoints.saving import USER
from shardwright.checkpoints.streamed import Given
from shardwright.checkpoints.tensors import MASTERS, MODEL, OPTIMIZER
from shardwright.checkpoints.torch_distributed.reading import Path, TorchCheckpoint
from shardwright.errors import CheckpointError, ShardwrightError

#: Tensors of so many bytes are in memory at once, and in a file; a larger one by itself.
_PART_BYTES = 1 << 30
_EXTRA_STATE = "_extra_state"
#: What exports keep besides model and optimizer.
MASTER_WEIGHTS, LOSS_SCALER, USER_CONTENT = "master_weights", "loss_scaler", "user_content"
OPTIMIZER_KEYS = ("optim", "optimizer")
ALONE = {"pipeline": 1, "tensor": 1, "reduced_data": 1, "optimizer_sharding": 1, "sharded_data": 1}


def import_checkpoint(
    folder: str | os.PathLike[str],
    path: str | os.PathLike[str],
    tag: str,
    *,
    model_key: str,
    optimizer_key: str | None,
    replace: bool,
) -> None:
    """Import a checkpoint; see :func:`shardwright.import_torch_checkpoint`."""
    check_on_disk("smp.import_torch_checkpoint", folder)
    check_on_disk("smp.import_torch_checkpoint", path)
    if not replace and os.path.lexists(os.path.join(path, f"{tag}_partial")):
        raise CheckpointError(f"{os.fspath(path)!r} has a checkpoint {tag!r} already: replace=True would replace it")
    source = TorchCheckpoint(os.fspath(folder))
    contents = _Contents(source, model_key, optimizer_key)
    writer = CheckpointWriter(os.path.abspath(path), tag)
    try:
        writer.abandon()  # what an ended run left
        reports = [
            writer.write_part(f"part-{number:05}.safetensors", part) for number, part in enumerate(contents.parts())
        ]
        description: dict[str, Any] = {
            "library_version": __version__,
            "step": None,
            "degrees": ALONE,
            "partition": [],
            "aliases": [],
            "user_content": contents.rest(),
        }
        writer.commit(json.dumps(description), reports)
    except BaseException as error:
        with contextlib.suppress(ShardwrightError):  # the error is told that came first
            writer.abandon()
        if isinstance(error, ShardwrightError) and not isinstance(error, CheckpointError):
            raise CheckpointError(str(error)) from error
        raise


class _Contents:
    """What is in a checkpoint, by what it is in ours."""

    def __init__(self, source: TorchCheckpoint, model_key: str, optimizer_key: str | None) -> None:
        """Find out by names."""
        self._source = source
        tops = {_split(path, name)[0] for name, path in source.paths.items()}
        optimizer_keys = OPTIMIZER_KEYS if optimizer_key is None else (optimizer_key,)
        #: The names in the source of tensors, by their names in the checkpoint.
        self._tensors: dict[str, str] = {}
        self._extra: dict[str, str] = {}
        self._user: dict[str, Path] = {}
        self._scaler: dict[str, Path] = {}
        groups: dict[str, Path] = {}
        values: dict[tuple[str, str], str] = {}
        for name, path in source.paths.items():
            top, inner = _split(path, name) if model_key in tops else (model_key, path)
            is_tensor = name in source.tensors
            joined = ".".join(map(str, inner))
            if _split(path, name)[0] in optimizer_keys:
                inner = _split(path, name)[1]
                parts = _optimizer_path(inner, name)
                if parts[0] != "state":
                    groups[name] = parts
                elif is_tensor:
                    self._tensors[f"{OPTIMIZER}{parts[1]}/{parts[2]}"] = name
                else:
                    values[str(parts[1]), str(parts[2])] = name
            elif top == model_key and is_tensor:
                self._tensors[MODEL + joined] = name
            elif top == model_key and joined.rpartition(".")[2] == _EXTRA_STATE:
                self._extra[joined.rpartition(".")[0]] = name
            elif top == MASTER_WEIGHTS and is_tensor:
                self._tensors[MASTERS + joined] = name
            elif top == LOSS_SCALER:
                self._scaler[name] = (0, *inner)
            elif model_key in tops:
                self._user[name] = path
            else:
                raise CheckpointError(
                    f"{source.folder!r} has no {model_key!r}, and {name!r} is no tensor: say by model_key what the "
                    "model is called in the state dict"
                )
        self._groups, self._values = groups, values
        self._equal: list[list[str]] = []
        self._encoded: dict[str, Any] = {}
        self._check(groups, values)

    def _check(self, groups: Mapping[str, Path], values: Mapping[tuple[str, str], str]) -> None:
        names = {name.removeprefix(MODEL) for name in self._tensors if name.startswith(MODEL)}
        if not names:
            raise CheckpointError(f"{self._source.folder!r} has no tensors of a model")
        trained = {
            name.removeprefix(OPTIMIZER).rpartition("/")[0] for name in self._tensors if name.startswith(OPTIMIZER)
        }
        unknown = sorted((trained | {name for name, _ in values}) - names)
        if unknown:
            raise CheckpointError(
                f"the optimizer has state of {unknown[0]!r}, which is no tensor of the model. State has to be by names "
                "of parameters: save what get_state_dict(model, optimizer) of torch.distributed.checkpoint returns"
            )
        if trained and not groups:
            raise CheckpointError(f"{self._source.folder!r} has state of an optimizer, but no param_groups")

    def parts(self) -> Iterator[list[Given]]:
        """Yield the tensors in parts, as writers take them; then what belongs to user content."""
        kinds = Counter(self._source.tensors[name] for name in self._tensors.values())
        hashes: dict[tuple[Any, ...], list[str]] = {}
        batch: dict[str, str] = {}
        size = 0
        for ours, name in sorted(self._tensors.items()):
            dtype, shape = self._source.tensors[name]
            nbytes = math.prod(shape) * dtype.itemsize
            if batch and size + nbytes > _PART_BYTES:
                yield self._given(batch, kinds, hashes)
                batch, size = {}, 0
            batch[ours] = name
            size += nbytes
        yield self._given(batch, kinds, hashes)
        self._equal = [names for names in hashes.values() if len(names) > 1]
        encoder = Encoder(USER)
        self._encoded = self._encode(encoder)
        if encoder.tensors:
            yield [_whole(name, tensor) for name, tensor in encoder.tensors.items()]

    def _given(
        self, batch: Mapping[str, str], kinds: Mapping[Any, int], hashes: dict[tuple[Any, ...], list[str]]
    ) -> list[Given]:
        values = self._source.read(batch.values())
        given: list[Given] = []
        for ours, name in batch.items():
            value = values[name]
            given.append(_whole(ours, value))
            if ours.startswith(MODEL) and kinds[self._source.tensors[name]] > 1 and value.numel():
                data = value.reshape(-1).view(torch.uint8).numpy()
                key = (*self._source.tensors[name], hashlib.blake2b(data).digest())
                hashes.setdefault(key, []).append(ours)
        return given

    def rest(self) -> dict[str, Any]:
        """What is besides tensors, once all parts have been made."""
        return self._encoded

    def _encode(self, encoder: Encoder) -> dict[str, Any]:
        wanted = {*self._groups, *self._values.values(), *self._extra.values(), *self._user, *self._scaler}
        read = self._source.read(sorted(wanted))
        user = _nested({name: (0, *path) for name, path in self._user.items()}, read) if self._user else None
        if isinstance(user, dict) and user.keys() == {USER_CONTENT}:
            user = user[USER_CONTENT]
        return {
            "content": encoder.encode(user, "user_content"),
            "extra_states": {
                module: encoder.encode(read[name], f"extra_states[{module!r}]") for module, name in self._extra.items()
            },
            "optimizer": self._optimizer(encoder, read) if self._groups else None,
            "equal": self._equal,
        }

    def _optimizer(self, encoder: Encoder, read: Mapping[str, Any]) -> dict[str, Any]:
        listed = {name: path for name, path in self._groups.items() if len(path) > 1 and isinstance(path[1], int)}
        if listed:
            found = _nested({name: (0, *path[1:]) for name, path in listed.items()}, read)
            groups = [dict(group) for group in found]
        else:
            groups = _regrouped({(str(path[1]), str(path[2])): read[name] for name, path in self._groups.items()})
        names = [list(group.pop("params", ())) for group in groups]
        known = {name.removeprefix(MODEL) for name in self._tensors if name.startswith(MODEL)}
        for name in (name for group in names for name in group):
            if name not in known:
                raise CheckpointError(f"a parameter group has {name!r}, which is no name of a tensor of the model")
        values: dict[str, dict[str, Any]] = {}
        for (name, key), theirs in self._values.items():
            values.setdefault(name, {})[key] = encoder.encode(read[theirs], f"optimizer[{name!r}][{key!r}]")
        scaler = _nested(self._scaler, read) if self._scaler else None
        return {
            "kind": None,
            "options": encoder.encode(groups, "param_groups"),
            "loss_scaler": encoder.encode(scaler, "loss_scaler"),
            "groups": names,
            "values": values,
        }


def _whole(name: str, tensor: torch.Tensor) -> Given:
    return name, tensor, list(tensor.shape), ([0] * tensor.dim(), list(tensor.shape), None)


def _split(path: Path, name: str) -> tuple[str, Path]:
    """The outermost name, and the path in it; names of which only the whole is known are split at the first dot."""
    if len(path) > 1:
        return str(path[0]), path[1:]
    top, _, inner = name.partition(".")
    return top, (inner,)


def _optimizer_path(path: Path, name: str) -> Path:
    """The parts of a name in an optimizer's state dict: what of, the parameter or the group, and the key."""
    if len(path) == 1:  # the state dict was flat
        kind, _, inner = str(path[0]).partition(".")
        of, _, key = inner.rpartition(".")
        path = (kind, of, key)
    if len(path) == 3 and path[0] == "state":
        return path
    if len(path) >= 3 and path[0] == "param_groups":
        return path
    raise CheckpointError(f"{name!r} is no state of a parameter and no option of a parameter group")


def _regrouped(options: Mapping[tuple[str, str], Any]) -> list[dict[str, Any]]:
    """Parameter groups out of the options of each parameter: those with the same options are one."""
    by_name: dict[str, dict[str, Any]] = {}
    for (name, key), value in options.items():
        by_name.setdefault(name, {})[key] = value
    groups: dict[str, dict[str, Any]] = {}
    for name, own in by_name.items():
        group = groups.setdefault(repr(sorted(own.items())), {**own, "params": []})
        group["params"].append(name)
    return list(groups.values())


def _nested(paths: Mapping[str, Path], values: Mapping[str, Any]) -> Any:
    """Put values into dicts and lists; a path's first part, the same in all, is what is returned."""
    root: dict[Any, Any] = {}
    for name, path in paths.items():
        place = root
        for part in path[:-1]:
            place = place.setdefault(part, {})
        place[path[-1]] = values[name]
    return _lists(root[0])


def _lists(value: Any) -> Any:
    """Turn dicts whose keys are numbers into lists."""
    if not isinstance(value, dict):
        return value
    items = {key: _lists(item) for key, item in value.items()}
    if items and all(type(key) is int for key in items):
        return [items[key] for key in sorted(items)]
    return items
