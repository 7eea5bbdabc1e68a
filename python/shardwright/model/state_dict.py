"""State dicts of a divided model: returns a rank's part or the whole, and loads either."""

from __future__ import annotations

import contextlib
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from shardwright import quantized
from shardwright.errors import PartitionError
from shardwright.job.ranks import PP_GROUP
from shardwright.job.runtime import find_runtime
from shardwright.model.gather import gather_over, on_cpu
from shardwright.model.ownership import Ownership
from shardwright.model.sentinel import Sentinel, is_sentinel
from shardwright.sharded_data_parallel.parameters import ShardedParameters, shard_of

PARTIAL_KEY = "_smp_is_partial"
"""The key that marks a state dict as one rank's part. The value False marks a whole one that needs no conversion."""

EXTRA_STATE = "_extra_state"
"""Ends the keys of what modules keep besides tensors."""


class IncompatibleKeys(NamedTuple):
    """Missing and unexpected keys of a load, counted over the whole model."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def local_state_dict(module: nn.Module, ownership: Ownership | None = None) -> OrderedDict[str, Any]:
    """Return the part of ``module.state_dict()`` whose values this rank holds, marked by ``_smp_is_partial``.

    Parameters that are sharded over data-parallel ranks are gathered, whole, in host memory; these ranks must all call
    this.
    """
    part: OrderedDict[str, Any] = OrderedDict(
        (key, _whole(value))
        for key, value in module.state_dict().items()
        if not is_sentinel(value) and not _is_remote_extra(key, ownership)
    )
    part[PARTIAL_KEY] = True
    return part


def _is_remote_extra(key: str, ownership: Ownership | None) -> bool:
    path, _, name = key.rpartition(".")
    return ownership is not None and name == EXTRA_STATE and not ownership.is_local(path)


def merged(parts: Iterable[Mapping[str, Any]], order: Iterable[str] = ()) -> OrderedDict[str, Any]:
    """Merge the parts of all ranks of a pipeline into one whole state dict, with the keys of `order` first.

    A buffer that several ranks hold is taken from the first of them. A key of `order` must be in a part.
    """
    found: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            found.setdefault(key, value)
    found.pop(PARTIAL_KEY, None)
    order = list(order)
    later = _behind(order, found)
    result: OrderedDict[str, Any] = OrderedDict()
    for key in order:
        if key in result:
            continue
        if key not in found:
            raise PartitionError(f"no rank of the pipeline gave the values of {key!r}")
        result[key] = found.pop(key)
        result.update((other, found.pop(other)) for other in later.get(key, ()) if other in found)
    result.update(found)
    return result


def _behind(order: Sequence[str], found: Iterable[str]) -> dict[str, list[str]]:
    """Return the keys that only the rank with a module's values has, by the key that they come after there.

    A quantized layer has the scales of its weight in the state dict, and knows them on that rank only.
    """
    known, last, later = set(order), dict[str, str](), dict[str, list[str]]()
    for key in found:
        path = key.rpartition(".")[0]
        if key in known:
            last[path] = key
            continue
        while path and path not in last:
            path = path.rpartition(".")[0]
        if path in last:
            later.setdefault(last[path], []).append(key)
    return later


def state_dict(
    module: nn.Module, ownership: Ownership | None = None, *, to_first: bool = False
) -> OrderedDict[str, Any]:
    """Return the whole model's state dict on the CPU, in the order of the undivided model's.

    Every rank of the pipeline must call this function. With `to_first`, all but the first get an empty dict.
    """
    parts = _gathered(module, local_state_dict(module, ownership), "state_dict", to_first=to_first)
    return merged(parts, module.state_dict()) if parts else OrderedDict()


def _gathered(
    module: nn.Module, part: Mapping[str, Any], operation: str, *, to_first: bool = False
) -> list[Mapping[str, Any]]:
    """Return the parts of all ranks of the pipeline; tensors that are made of others are taken apart on the way."""
    made = quantized.templates(module)
    apart = {key: made[key].apart(value) if key in made else value for key, value in on_cpu(part).items()}
    parts = gather_over(PP_GROUP, apart, operation, to_first=to_first)
    return [{key: made[key].together(one) if key in made else one for key, one in each.items()} for each in parts]


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
        given = merged(_gathered(module, given, "load_state_dict"))
    made, (own, scales) = quantized.templates(module), quantized.split_scales(module, given)
    with _placeholders(module), warnings.catch_warnings():
        # PyTorch warns that copying to a placeholder has no effect, which is intended here.
        warnings.filterwarnings("ignore", message=".*copying from a non-meta parameter.*")
        quantized.unpack(module)
        own |= {key: module.get_parameter(key) for key in made if key in scales}  # stay as they are for now
        loaded = module.load_state_dict(_sharded(module, own), strict=strict)
        quantized.load_scales(module, scales)
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
    for key, value in module.state_dict().items():
        if is_sentinel(value):
            yield key, torch.empty(value.shape, dtype=value.dtype, device="meta")
        elif _is_remote_extra(key, ownership):
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
