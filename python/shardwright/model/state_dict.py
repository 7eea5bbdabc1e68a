"""State dicts of a divided model: returns a rank's part or the whole, and loads either."""

from __future__ import annotations

import contextlib
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from shardwright.errors import NotOwnedError, PartitionError
from shardwright.job.ranks import PP_GROUP
from shardwright.job.runtime import find_runtime
from shardwright.model.gather import gather_over, on_cpu
from shardwright.model.ownership import Ownership
from shardwright.model.remote_attribute import RemoteAttribute
from shardwright.model.sentinel import Sentinel, is_sentinel
from shardwright.sharded_data_parallel.parameters import ShardedParameters, shard_of
from shardwright.values import encode

PARTIAL_KEY = "_smp_is_partial"
"""The key that marks a state dict as one rank's part. The value False marks a whole one that needs no conversion."""

EXTRA_STATE = "_extra_state"
"""Ends the keys of what modules keep besides tensors."""

#: Stands for what another rank has besides tensors.
_ELSEWHERE = object()


class IncompatibleKeys(NamedTuple):
    """Missing and unexpected keys of a load, counted over the whole model."""

    missing_keys: list[str]
    unexpected_keys: list[str]


class Asked(NamedTuple):
    """What modules on this rank say of their state.

    Attributes:
        part: The entries whose values this rank holds; parameters that are sharded are shards.
        names: The names of all entries that are known here, in the model's order.
    """

    part: OrderedDict[str, Any]
    names: list[str]

    def check_sendable(self) -> None:
        """Check that other ranks can be told, before they wait for it.

        Raises:
            UnsupportedValueError: Something that is no tensor is of a type that cannot be sent.
        """
        encode({key: on_cpu(value) for key, value in self.part.items() if not isinstance(value, torch.Tensor)})


def asked(module: nn.Module, ownership: Ownership | None = None) -> Asked:
    """Ask all modules for their state. What is no parameter or buffer, the rank says that runs the module."""
    with asking_owners(module, ownership) as elsewhere:
        found = module.state_dict()
    part = OrderedDict((key, one) for key, one in found.items() if not is_sentinel(one) and key not in elsewhere)
    return Asked(part, list(found))


def local_state_dict(
    module: nn.Module, ownership: Ownership | None = None, *, part: Mapping[str, Any] | None = None
) -> OrderedDict[str, Any]:
    """Return the part of ``module.state_dict()`` whose values this rank holds, marked by ``_smp_is_partial``.

    Parameters that are sharded over data-parallel ranks are gathered, whole, in host memory; these ranks must all call
    this. If it is known already what modules say of their state, it is given as `part`.
    """
    held = asked(module, ownership).part if part is None else part
    found: OrderedDict[str, Any] = OrderedDict((key, _whole(value)) for key, value in held.items())
    found[PARTIAL_KEY] = True
    return found


@contextlib.contextmanager
def asking_owners(module: nn.Module, ownership: Ownership | None) -> Iterator[set[str]]:
    """Let modules that other ranks run say nothing of their state here but their tensors, within the block.

    Their attributes are those of before the first step, or placeholders. A state that they are given sets attributes,
    as it does before the model is divided, but neither placeholders nor what only their rank has. Yields the names of
    what they have beside tensors, found in the state dicts that are made within the block.
    """
    elsewhere: set[str] = set()
    replaced: list[tuple[nn.Module, str]] = []
    try:
        for path, part in module.named_modules() if ownership is not None else ():
            if ownership is None or ownership.decision.modules.get(path, ownership.pp_rank) == ownership.pp_rank:
                continue
            own = _of_others(part, elsewhere)
            for name in own.keys() - vars(part).keys():
                part.__dict__[name] = own[name]
                replaced.append((part, name))
        yield elsewhere
    finally:
        for part, name in replaced:
            del part.__dict__[name]


def _of_others(part: nn.Module, elsewhere: set[str]) -> dict[str, Callable[..., Any]]:
    """Return what methods do, within :func:`asking_owners`, in a module that another rank runs."""
    kind, save, take = type(part), part._save_to_state_dict, part.set_extra_state

    def saved(destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        found: OrderedDict[str, Any] = OrderedDict()
        with contextlib.suppress(NotOwnedError):
            save(found, prefix, keep_vars)
        elsewhere.update(found.keys() - {prefix + name for name in (*part._parameters, *part._buffers)})
        destination.update(found)

    def taken(state: Any) -> None:
        placeholders = {name: value for name, value in vars(part).items() if isinstance(value, RemoteAttribute)}
        if state is not _ELSEWHERE:
            with contextlib.suppress(NotOwnedError):
                take(state)
            vars(part).update(placeholders)

    methods: dict[str, Callable[..., Any]] = {}
    if kind.get_extra_state is not nn.Module.get_extra_state:
        methods["get_extra_state"] = lambda: _ELSEWHERE
    if kind.set_extra_state is not nn.Module.set_extra_state:
        methods["set_extra_state"] = taken
    if kind._save_to_state_dict is not nn.Module._save_to_state_dict or "get_extra_state" in methods:
        methods["_save_to_state_dict"] = saved
    return methods


def merged(parts: Iterable[Mapping[str, Any]], order: Iterable[str] = ()) -> OrderedDict[str, Any]:
    """Merge the parts of all ranks of a pipeline into one whole state dict, with the keys of `order` first.

    A buffer that several ranks hold is taken from the first of them. A key of `order` must be in a part.
    """
    found: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            found.setdefault(key, value)
    found.pop(PARTIAL_KEY, None)
    result: OrderedDict[str, Any] = OrderedDict()
    for key in order:
        if key not in found:
            raise PartitionError(f"no rank of the pipeline gave the values of {key!r}")
        result[key] = found.pop(key)
    result.update(found)
    return result


def state_dict(
    module: nn.Module, ownership: Ownership | None = None, *, to_first: bool = False, told: Asked | None = None
) -> OrderedDict[str, Any]:
    """Return the whole model's state dict on the CPU, in the order of the undivided model's.

    Every rank of the pipeline must call this function. With `to_first`, all but the first get an empty dict. `told` is
    what modules say of their state, if they were asked already.
    """
    told = asked(module, ownership) if told is None else told
    part = on_cpu(local_state_dict(module, ownership, part=told.part))
    parts = gather_over(PP_GROUP, part, "state_dict", to_first=to_first)
    return merged(parts, told.names) if parts else OrderedDict()


def load_state_dict(
    module: nn.Module,
    state: Mapping[str, Any],
    strict: bool = True,
    same_partition_load: bool = False,
    *,
    ownership: Ownership | None = None,
) -> IncompatibleKeys:
    """Load a state dict into this rank's share of a model, which may be divided or not yet.

    Keys are checked over the whole model, as PyTorch does: every rank finds the same missing and unexpected keys. If
    `state` is what `local_state_dict` returned, every rank of the pipeline must call this function, and the parts are
    merged; with `same_partition_load`, it is this rank's own part under this same partition, and nothing is merged.
    """
    given = OrderedDict(state)
    partial = bool(given.pop(PARTIAL_KEY, False))
    if same_partition_load:
        for name, value in _absent_elsewhere(module, ownership):
            given.setdefault(name, value)
    elif partial:
        given = merged(gather_over(PP_GROUP, on_cpu(given), "load_state_dict"))
    with _placeholders(module), asking_owners(module, ownership), warnings.catch_warnings():
        # PyTorch warns that copying to a placeholder has no effect, which is intended here.
        warnings.filterwarnings("ignore", message=".*copying from a non-meta parameter.*")
        loaded = module.load_state_dict(_sharded(module, given), strict=strict)
    return IncompatibleKeys(list(loaded.missing_keys), list(loaded.unexpected_keys))


def _whole(value: Any) -> Any:
    runtime = find_runtime()
    if runtime is None or shard_of(value) is value:
        return value
    return runtime[ShardedParameters].whole(value, shard_of(value)).cpu()


def _sharded(module: nn.Module, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return values for sharded parameters in their form; values of other shapes are left to torch, which refuses."""
    runtime = find_runtime()
    if runtime is None or not (registry := runtime[ShardedParameters]):
        return given
    sharded = {
        name: parameter
        for name, parameter in module.named_parameters(remove_duplicate=False)
        if registry.is_sharded(parameter)
    }
    return OrderedDict(
        (name, registry.distributed(value) if name in sharded and value.shape == sharded[name].shape else value)
        for name, value in given.items()
    )


def _absent_elsewhere(module: nn.Module, ownership: Ownership | None) -> Iterator[tuple[str, Any]]:
    """Yield entries that this rank's part does not contain, with values that change nothing when loaded."""
    with asking_owners(module, ownership) as elsewhere:
        found = module.state_dict()
    for key, value in found.items():
        if is_sentinel(value):
            yield key, torch.empty(value.shape, dtype=value.dtype, device="meta")
        elif key in elsewhere:
            yield key, value


@contextlib.contextmanager
def _placeholders(module: nn.Module) -> Iterator[None]:
    """Replace sentinels by tensors that accept any value of their shape and keep none, within the block."""
    made: dict[int, torch.Tensor] = {}
    slots: list[tuple[dict[str, Any], str, Sentinel]] = []
    try:
        for part in module.modules():
            holders: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)
            for holder in holders:
                for name, value in holder.items():
                    if isinstance(value, Sentinel):
                        slots.append((holder, name, value))
        for holder, name, sentinel in slots:
            if id(sentinel) not in made:
                empty = torch.empty(sentinel.shape, dtype=sentinel.dtype, device="meta")
                is_parameter = sentinel.sentinel_kind == "parameter"
                made[id(sentinel)] = nn.Parameter(empty, requires_grad=False) if is_parameter else empty
            holder[name] = made[id(sentinel)]
        yield
    finally:
        for holder, name, sentinel in slots:
            holder[name] = sentinel


def make_whole_on_cpu(module: nn.Module) -> None:
    """Give this rank the values of all parameters and buffers, in host memory, in place of sentinels.

    Every rank of the pipeline must call this function.
    """
    mine: dict[str, dict[str, torch.Tensor]] = {
        "parameters": dict(module.named_parameters()),
        "buffers": dict(module.named_buffers()),
    }
    held = {
        kind: {name: tensor for name, tensor in tensors.items() if not is_sentinel(tensor)}
        for kind, tensors in mine.items()
    }
    parts = gather_over(PP_GROUP, on_cpu(held), "DistributedModel.cpu")
    values = {
        name: value
        for part in reversed(parts)
        for kind in ("parameters", "buffers")
        for name, value in part[kind].items()
    }
    made: dict[int, torch.Tensor] = {}
    for path, part in module.named_modules():
        slots: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)
        for holder in slots:
            for name, value in holder.items():
                if value is None:
                    continue
                if id(value) not in made:
                    made[id(value)] = _on_cpu_again(value, f"{path}.{name}" if path else name, values)
                holder[name] = made[id(value)]


def _on_cpu_again(value: torch.Tensor, name: str, values: Mapping[str, torch.Tensor]) -> torch.Tensor:
    if isinstance(value, Sentinel):
        found = values[name].clone()
        return nn.Parameter(found, value.requires_grad) if value.sentinel_kind == "parameter" else found
    if isinstance(value, nn.Parameter):
        value.data = value.data.cpu()
        if value.grad is not None:
            value.grad = value.grad.cpu()
        return value
    return value.cpu()
