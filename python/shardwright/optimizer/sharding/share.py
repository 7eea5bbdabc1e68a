"""A rank's share of an optimizer: what it updates, while every rank keeps all parameters in the groups."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from shardwright.data_parallel.shards import ParameterShards, Slice
from shardwright.errors import ConfigError
from shardwright.groups import put_back_gradient, standing_in
from shardwright.job.runtime import Runtime
from shardwright.model.sentinel import is_sentinel
from shardwright.optimizer.half_precision import HalfPrecision
from shardwright.optimizer.layout import GroupLayout
from shardwright.optimizer.sharding.division import Division, Member, held_parameters

if TYPE_CHECKING:
    from shardwright.model.distributed import DistributedModel


class Share:
    """This rank's share of an optimizer's parameters.

    The optimizer's groups hold all parameters of this rank, so that zeroing gradients, clipping and schedulers find
    them. Inside :meth:`in_groups` they hold those that this rank updates: whole parameters as they are, and in place of
    a parameter of which it owns a part a 1-D parameter in the same memory. The optimizer's state is kept by these.
    """

    def __init__(self, runtime: Runtime, kind: type[Optimizer]) -> None:
        """Create the share of an optimizer of a class; :meth:`divide` gives it parameters."""
        self._runtime = runtime
        self._division = Division(runtime, kind)
        #: The slices of the parameters that are divided.
        self._slices: Any = WeakIdKeyDictionary()
        self._over_rdp: Any = WeakIdKeyDictionary()
        self._pieces: Any = WeakIdKeyDictionary()

    def divide(self, optimizer: Optimizer, dividing: DistributedModel | None = None) -> None:
        """Divide the parameters that are new in the optimizer's groups and belong to partitioned models.

        Args:
            optimizer: The optimizer.
            dividing: A model that is being partitioned, and counts as such.

        Raises:
            ConfigError: Another optimizer has divided a parameter into parts, which this one cannot update.
        """
        new = [
            Member(parameter, group)
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter not in self._slices and not is_sentinel(parameter)
        ]
        if not new:
            return
        shards = self._runtime[ParameterShards]
        held = held_parameters(self._runtime, dividing)
        for parameter in self._division.divide(new, held):
            self._slices[parameter] = shards.assigned(parameter)
            self._over_rdp[parameter] = held[id(parameter)].over_rdp
            if (state := optimizer.state.pop(parameter, None)) is not None:  # from before the division
                self._take_state(optimizer, parameter, state)
            if isinstance(optimizer, HalfPrecision):
                own = self.own(parameter)
                optimizer.move_master(parameter, self.tensor(parameter), torch.clone if own is None else own.of)

    def _take_state(self, optimizer: Optimizer, parameter: nn.Parameter, state: dict[str, Any]) -> None:
        tensor = self.tensor(parameter)
        if tensor is not None:
            optimizer.state[tensor] = state if tensor is parameter else self.cut(parameter, state)

    def slices(self, parameter: torch.Tensor) -> tuple[Slice, ...] | None:
        """Return the slices of a parameter; None if every rank updates it."""
        found: tuple[Slice, ...] | None = self._slices.get(parameter)
        return found

    def is_over_rdp(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter is divided over RDP_GROUP."""
        return bool(self._over_rdp.get(parameter, False))

    def is_over_dp(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter is divided over DP_GROUP."""
        return self.slices(parameter) is not None and not self.is_over_rdp(parameter)

    def divided(self, optimizer: Optimizer) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Return the parameters in the groups that are divided over DP_GROUP, and those over RDP_GROUP."""
        every = [one for group in optimizer.param_groups for one in group["params"] if self.slices(one) is not None]
        return [one for one in every if self.is_over_dp(one)], [one for one in every if self.is_over_rdp(one)]

    def own(self, parameter: torch.Tensor) -> Slice | None:
        """Return the part of a divided parameter that this rank owns; None if it owns none, or the whole."""
        own = next((one for one in self.slices(parameter) or () if one.owner == self._runtime.place.rank), None)
        return None if own is None or own.stop - own.start == parameter.numel() else own

    def tensor(self, parameter: nn.Parameter) -> nn.Parameter | None:
        """Return what this rank updates of a parameter: all of it, a 1-D part in the same memory, or None."""
        slices = self.slices(parameter)
        if slices is None:
            return parameter
        if all(one.owner != self._runtime.place.rank for one in slices):
            return None
        own = self.own(parameter)
        if own is None:
            return parameter
        if parameter not in self._pieces:
            self._pieces[parameter] = nn.Parameter(own.of(parameter.detach()), parameter.requires_grad)
        piece: nn.Parameter = self._pieces[parameter]
        piece.data = own.of(parameter.detach())  # values may have been moved to other memory
        if (dtype := getattr(parameter, "grad_dtype", piece.dtype)) is not piece.dtype:
            piece.grad_dtype = dtype
        return piece

    def updated(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return what this rank updates of a parameter of which it updates something."""
        tensor = self.tensor(parameter)
        assert tensor is not None, "this rank updates some of it"
        return tensor

    def is_here(self, parameter: nn.Parameter) -> bool:
        """Whether this rank updates any of a parameter."""
        slices = self.slices(parameter)
        return slices is None or any(one.owner == self._runtime.place.rank for one in slices)

    def places(self, layout: Sequence[GroupLayout]) -> list[list[int]]:
        """Return the places in each whole group of the parameters that this rank updates."""
        return [
            [place for place in whole.local() if self.is_here(whole.parameters[place])]  # type: ignore[arg-type]
            for whole in layout
        ]

    def cut(self, parameter: torch.Tensor, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return this rank's part of a parameter's state: its elements of tensors of the parameter's shape."""
        own = self.own(parameter)
        if own is None:
            return dict(state)
        return {
            key: own.of(value).clone() if isinstance(value, torch.Tensor) and value.shape == parameter.shape else value
            for key, value in state.items()
        }

    def check(self, optimizer: Optimizer) -> None:
        """Check that the groups' parameters can be updated.

        Raises:
            ConfigError: A parameter is not contiguous any more, and ranks have parts of it.
        """
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if self.own(parameter) is not None and not parameter.is_contiguous():
                    raise ConfigError(
                        f"a parameter of shape {tuple(parameter.shape)} was contiguous when its elements were divided "
                        "over ranks (shard_optimizer_state), and is no longer: change the memory format before "
                        "smp.DistributedOptimizer is created"
                    )

    @contextmanager
    def updating(self, optimizer: Optimizer) -> Iterator[None]:
        """Let the optimizer's groups hold what this rank updates, with its gradients, inside the block.

        What gradients these have at its end, the parameters have.

        Raises:
            ConfigError: See :meth:`check`.
        """
        self.check(optimizer)
        given = self._take_gradients(optimizer)
        try:
            with self.in_groups(optimizer):
                yield
            for parameter, gradient in given:
                write = functools.partial(self._write_gradient, parameter)
                put_back_gradient(parameter, gradient, self.updated(parameter).grad, write)
        finally:
            for piece in self._pieces.values():
                piece.grad = None  # it keeps that of the parameter alive

    def _take_gradients(self, optimizer: Optimizer) -> list[tuple[nn.Parameter, torch.Tensor | None]]:
        """Give parts of parameters their elements of the gradients; return what they were given."""
        given = []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                own = self.own(parameter)
                if own is not None:
                    gradient = None if parameter.grad is None else own.of(parameter.grad.detach())
                    self.updated(parameter).grad = gradient
                    given.append((parameter, gradient))
        return given

    def _write_gradient(self, parameter: nn.Parameter, part: torch.Tensor) -> None:
        """Let a parameter have a gradient that is this in the part that the rank owns."""
        own = self.own(parameter)
        assert own is not None, "it owns a part"
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
        own.of(parameter.grad.detach()).copy_(part)

    @contextmanager
    def in_groups(self, optimizer: Optimizer) -> Iterator[None]:
        """Let the optimizer's groups hold what this rank updates, inside the block."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                is_key = self.is_here(parameter) and self.own(parameter) is None
                if not is_key and not optimizer.state.get(parameter, True):
                    del optimizer.state[parameter]  # left by a script that looked for it
        with standing_in(optimizer, self._held):
            yield

    def _held(self, parameter: Any) -> tuple[nn.Parameter, ...]:
        return () if (tensor := self.tensor(parameter)) is None else (tensor,)
