"""The tensors of a model by the names that they have in one process, and what this rank holds of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardwright import quantized
from shardwright.checkpoints.boxes import Fragment, Piece, divided, pieces, rows, whole
from shardwright.errors import CheckpointError
from shardwright.job.runtime import Runtime
from shardwright.model import DistributedModel
from shardwright.model.sentinel import ReleasedParameter, is_sentinel
from shardwright.model.translation import replaced
from shardwright.sharded_data_parallel.parameters import ShardedParameters, shard_of
from shardwright.tensor_parallel.module import named_shardings
from shardwright.tensor_parallel.sharding import Origin, Sharding

MODEL, OPTIMIZER, MASTERS = "model/", "optimizer/", "half_precision/"


@dataclass(frozen=True)
class Named:
    """A parameter or persistent buffer of a model.

    Attributes:
        tensor: It, or the sentinel in its place.
        fragments: What this rank has, or would have, of which tensors of the whole model.
        is_buffer: Whether it is a buffer.
    """

    tensor: torch.Tensor
    fragments: tuple[Fragment, ...]
    is_buffer: bool

    @property
    def is_here(self) -> bool:
        """Whether this rank has its values."""
        return not is_sentinel(self.tensor)

    @property
    def names(self) -> list[str]:
        """The names of the tensors that it is a part of."""
        return list(dict.fromkeys(each.name for each in self.fragments))

    def pieces(self, prefix: str = MODEL) -> Iterator[Piece]:
        """Yield the pieces that this rank has, with names that begin with ``prefix``."""
        for piece in pieces(shard_of(self.tensor).detach(), self.fragments):
            yield Piece(prefix + piece.name, piece.shape, piece.offset, piece.view)


class ModelTensors:
    """The parameters and persistent buffers of a model, each once.

    The name of a tensor is its first in the state dict of the model in one process: where a module was replaced for
    tensor parallelism, that of the weights that it had.

    Attributes:
        every: Them, in the model's order.
        names: All names of tensors of which this rank has, or would have, a part, in that order.
        aliases: Further names of tensors, as tied weights have, and the names of these.
        scales: The names of those that belong to weights of few bits.
    """

    def __init__(self, runtime: Runtime, model: DistributedModel) -> None:
        """Look at a model, divided or not."""
        model.placement.reset_shards()
        quantized.unpack(model.module)
        self._registry = runtime[ShardedParameters]
        self._place = runtime.place.tp_ranks.index(runtime.place.rank), len(runtime.place.tp_ranks)
        self._replaced = list(replaced(model.module))
        self._shardings = named_shardings(model.module)
        self.names: dict[str, None] = {}
        self.aliases: dict[str, str] = {}
        self.scales = {
            f"{name}.{_name_of_scale(own, parameter)}"
            for name, parameter in model.module.named_parameters(remove_duplicate=False)
            for own in quantized.beside(parameter)
        }
        found: dict[int, Named] = {}
        for name, tensor, is_buffer in persistent(model.module):
            fragments = tuple(self._fragments(name, tensor))
            self.names.update((one.name, None) for one in fragments)
            known = found.get(id(tensor))
            if known is None:
                found[id(tensor)] = Named(tensor, fragments, is_buffer)
            else:
                pairs = zip(fragments, known.fragments, strict=True)
                self.aliases.update((one.name, first.name) for one, first in pairs if one.name != first.name)
        self._by_id = found
        self.every = list(found.values())

    def of(self, parameter: torch.Tensor) -> Named | None:
        """Return what a parameter is, which may be that of before the model was divided; None if it is of no model."""
        placed = parameter.released_to if isinstance(parameter, ReleasedParameter) else parameter
        return self._by_id.get(id(self._registry.now(placed)))

    def wanted(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return the dtype and the shape of each tensor that is, or has a part, in this rank's model, by name."""
        return {
            MODEL + fragment.name: (str(named.tensor.dtype).removeprefix("torch."), fragment.shape)
            for named in self.every
            for fragment in named.fragments
        }

    def refuse_few_bits(self, operation: str) -> None:
        """Raise :class:`CheckpointError` if weights are quantized, which folders of ``transformers`` have otherwise."""
        if self.scales:
            raise CheckpointError(
                f"{operation}: the weight {min(self.scales).rpartition('.')[0]!r} is quantized, of which transformers "
                "writes and reads folders itself: save the adapter, or model.state_dict(), and load quantized folders "
                "by from_pretrained in smp.delay_param_initialization()"
            )

    def check_made(self, operation: str) -> None:
        """Raise :class:`CheckpointError` if weights of few bits are not made yet, so that nothing can be put there."""
        if any(named.is_here and named.tensor.is_meta for named in self.every):
            raise CheckpointError(
                f"{operation}: weights that are quantized by the ranks that own them are made, and loaded, in the "
                "first step: run one before the values of the model are read or saved"
            )

    def _fragments(self, name: str, tensor: torch.Tensor) -> list[Fragment]:
        before, origins = self._made_of(name)
        if self._registry.is_sharded(tensor):
            count, first = shard_of(tensor).shape[0], self._registry.first_row(tensor)
            return rows(before if origins else name, tensor.shape, first, count, origins)
        sharding = self._shardings.get(name)
        if origins:
            return divided(before, tensor.shape, sharding or Sharding(), *self._place, origins)
        return [whole(name, tensor.shape)] if sharding is None else divided(name, tensor.shape, sharding, *self._place)

    def _made_of(self, name: str) -> tuple[str, tuple[Origin, ...]]:
        """Return of what a replaced module's tensor was made, and what stands before its name; nothing of others."""
        for before, module in self._replaced:
            if name.startswith(before) and (origins := tuple(module.origins.get(name.removeprefix(before), ()))):
                return before, origins
        return "", ()


def persistent(module: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Yield all names of parameters and persistent buffers, in the order of state dicts, and whether it is a buffer.

    What belongs to a weight of few bits counts as buffers. Of a weight on another rank this one does not know it.
    """
    for path, part in module.named_modules(remove_duplicate=False):
        before = f"{path}." if path else ""
        for name, parameter in part._parameters.items():
            if parameter is None:
                continue
            if quantized.has_memory(parameter):
                yield before + name, parameter, False
            for own, tensor in quantized.beside(parameter).items():
                yield f"{before}{name}.{_name_of_scale(own, parameter)}", tensor, True
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                yield before + name, buffer, True


def _name_of_scale(own: str, parameter: torch.Tensor) -> str:
    """Return the name of a tensor beside a weight, which tells weights apart that are quantized in other ways."""
    return f"{parameter.quant_type}_map" if own == "quant_map" else own  # type: ignore[attr-defined]


def extra_states(model: DistributedModel) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules on this rank that keep what is no tensor in state dicts, each once, with their names."""
    ownership: Any = model.placement.ownership
    for path, part in model.module.named_modules():
        if type(part).get_extra_state is not nn.Module.get_extra_state and (
            ownership is None or ownership.is_local(path)
        ):
            yield path, part
