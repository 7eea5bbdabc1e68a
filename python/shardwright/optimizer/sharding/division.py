"""Divides the parameters of an optimizer over the ranks that hold them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from shardwright import _core
from shardwright.data_parallel.shards import ParameterShards, Slice
from shardwright.data_parallel.sparse import sparse_parameters
from shardwright.errors import ConfigError
from shardwright.half_precision import half_dtype
from shardwright.half_precision.cast import HALF
from shardwright.job.runtime import Runtime
from shardwright.model.models import Models
from shardwright.optimizer.sharding.elementwise import state_tensors

if TYPE_CHECKING:
    from shardwright.model.distributed import DistributedModel

#: Above this, the largest share of a division is told: it is so much larger than an even one.
_UNEVEN = 1.05


class Held(NamedTuple):
    """How the ranks hold a parameter.

    Attributes:
        over_rdp: Whether only those of RDP_GROUP hold the same one.
        is_sparse: Whether its gradient may be sparse.
        accumulates: Whether the ranks are in the middle of accumulating gradients, which are not reduced yet.
        is_alone: Whether no other tensor-parallel rank has any of it.
    """

    over_rdp: bool
    is_sparse: bool
    accumulates: bool
    is_alone: bool


class Kind(NamedTuple):
    """What is divided evenly by itself: parameters with the same state for each byte.

    Attributes:
        over_rdp: Whether they are divided over RDP_GROUP.
        state_tensors: How many tensors of a parameter's size the state has; None if that is unknown.
        trained: Whether they are trained, or frozen when the division is made.
        has_masters: Whether master weights are updated in their place, which are part of the state.
        is_alone: Whether no other tensor-parallel rank has any of them: the others are divided alike on all of these.
    """

    over_rdp: bool
    state_tensors: int | None
    trained: bool
    has_masters: bool
    is_alone: bool


@dataclass(frozen=True)
class Member:
    """A parameter of an optimizer, with what its group says."""

    parameter: nn.Parameter
    group: dict[str, Any]


def held_parameters(runtime: Runtime, dividing: DistributedModel | None) -> dict[int, Held]:
    """Find the parameters of this rank's partitioned models, by ``id``; ``dividing`` counts as one."""
    found: dict[int, Held] = {}
    for model in runtime[Models].alive:
        placement = model.placement
        if not placement.partitioned and model is not dividing:
            continue
        parameters = placement.owned_parameters()
        over_rdp = {id(one) for one in placement.replicas.over_rdp(parameters)}
        sparse = sparse_parameters(placement.module)
        alone = {key for key, sharding in placement.sharded.by_id().items() if sharding.owner is not None}
        for one in parameters:
            found[id(one)] = Held(
                id(one) in over_rdp, id(one) in sparse, placement.replicas.is_accumulating, id(one) in alone
            )
    return found


class Division:
    """The division of one optimizer's parameters over this rank's replicas.

    Parameters are divided when they come to the optimizer; what was divided stays where it is. A parameter that another
    optimizer has divided already stays as it is too.
    """

    def __init__(self, runtime: Runtime, optimizer: type[Optimizer]) -> None:
        """Start without parameters.

        Args:
            runtime: The rank.
            optimizer: The class of the optimizer.
        """
        self._runtime = runtime
        self._optimizer = optimizer
        self._loads: dict[Kind, list[int]] = {}

    def ranks(self, kind: Kind) -> list[int]:
        """Return the ranks over which parameters of a kind are divided."""
        place = self._runtime.place
        return place.rdp_ranks if kind.over_rdp else place.dp_ranks

    def divide(self, members: Iterable[Member], held: dict[int, Held]) -> list[nn.Parameter]:
        """Divide parameters that are new, and return those that are held by several ranks.

        Raises:
            ConfigError: Another optimizer has divided a parameter into parts, which this one cannot update.
        """
        kinds: dict[Kind, list[Member]] = {}
        for member in members:
            how = held.get(id(member.parameter))
            if how is None:
                continue
            number = state_tensors(self._optimizer, member.group)
            has_masters = half_dtype(self._runtime.place.cfg) is not None and member.parameter.dtype in HALF
            kind = Kind(how.over_rdp, number, member.parameter.requires_grad, has_masters, how.is_alone)
            if len(self.ranks(kind)) > 1:
                kinds.setdefault(kind, []).append(member)
        divided = []
        for kind in sorted(kinds, key=repr):
            parameters = [member.parameter for member in kinds[kind]]
            self._divide(kind, parameters, held)
            divided += parameters
            self._tell_imbalance(kind)
        return divided

    def _divide(self, kind: Kind, parameters: Sequence[nn.Parameter], held: dict[int, Held]) -> None:
        shards, ranks = self._runtime[ParameterShards], self.ranks(kind)
        loads = self._loads.setdefault(kind, [0] * len(ranks))
        slices: dict[int, tuple[Slice, ...]] = {}
        for parameter in parameters:
            known = shards.assigned(parameter)
            if known is not None:
                self._check_known(known, kind)
                slices[id(parameter)] = known
                for one in known:
                    loads[ranks.index(one.owner)] += (one.stop - one.start) * parameter.element_size()
        new = [parameter for parameter in parameters if id(parameter) not in slices]
        for parameter in new:
            slices[id(parameter)] = ()
        splits = [_can_split(one, held[id(one)], kind) for one in new]
        items = [(one.numel(), one.element_size(), can) for one, can in zip(new, splits, strict=True)]
        for item, start, stop, owner in _core.shard_parameters(items, loads):
            slices[id(new[item])] += (Slice(start, stop, ranks[owner]),)
            loads[owner] += (stop - start) * new[item].element_size()
        shards.assign(parameters, [slices[id(one)] for one in parameters], ranks, over_rdp=kind.over_rdp)
        for parameter in new:
            if not held[id(parameter)].accumulates:
                self._keep_own_gradient(parameter)

    def _keep_own_gradient(self, parameter: nn.Parameter) -> None:
        """Leave of a gradient that is reduced to all ranks what a reduction to the owners would have left."""
        gradient = parameter.grad
        own = self._runtime[ParameterShards].own(parameter, self._runtime.place.rank)
        if gradient is None or own is None:
            parameter.grad = None
        elif own.stop - own.start < parameter.numel():
            parameter.grad = torch.zeros_like(gradient, memory_format=torch.contiguous_format)
            own.of(parameter.grad).copy_(own.of(gradient))

    def _check_known(self, slices: Sequence[Slice], kind: Kind) -> None:
        if len(slices) > 1 and kind.state_tensors is None:
            raise ConfigError(
                f"smp.DistributedOptimizer was given {self._optimizer.__name__}, which needs whole parameters, and a "
                "parameter of which ranks have parts since another optimizer trains it (shard_optimizer_state): create "
                f"{self._optimizer.__name__} first, or give each parameter to one optimizer only"
            )

    def _tell_imbalance(self, kind: Kind) -> None:
        loads, ranks = self._loads[kind], self.ranks(kind)
        even = sum(loads) / len(loads)
        if kind.state_tensors is not None or not kind.trained or self._runtime.place.rank != ranks[0]:
            return
        if max(loads) > _UNEVEN * even:
            shares = ", ".join(f"rank {rank} {_size(load)}" for rank, load in zip(ranks, loads, strict=True))
            self._runtime.logger.warning(
                "shard_optimizer_state: %s updates whole parameters only, so its state is not divided evenly: of %s of "
                "parameters, %s; even would be %s each",
                self._optimizer.__name__,
                _size(sum(loads)),
                shares,
                _size(even),
            )


def _can_split(parameter: nn.Parameter, held: Held, kind: Kind) -> bool:
    return (
        kind.state_tensors is not None
        and not held.is_sparse
        and parameter.layout is torch.strided
        and parameter.is_contiguous()
    )


def _size(number: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if number < 1024 or unit == "GiB":
            break
        number /= 1024
    return f"{number:.4g} {unit}"
