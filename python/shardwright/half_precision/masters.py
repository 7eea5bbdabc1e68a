"""Master weights: float32 copies of half-precision parameters, which an optimizer updates in their place."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from shardwright.groups import standing_one_for_one
from shardwright.half_precision.cast import HALF
from shardwright.tensor_parallel.attributes import carry_attributes, user_attributes

_PARAMETER = "_shardwright_model_parameter"
#: A master whose values were loaded, while those of its parameter may still be loaded.
_LOADED = -1
#: A master whose parameter has been written to since.
_OLDER = -2


class _Master(NamedTuple):
    parameter: torch.Tensor
    tensor: nn.Parameter

    @property
    def is_copy(self) -> bool:
        return self.parameter.dtype in HALF


class Keeper(Protocol):
    """Where the values of masters are, if not in memory."""

    def keep_data(self, parameter: torch.Tensor) -> None:
        """Move the values of a parameter there."""
        ...

    def values_of(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the values of a parameter, wherever they are; writing to them changes them."""
        ...

    def release(self, tensor: torch.Tensor) -> None:
        """Take a tensor that is there out of memory, if it was looked at."""
        ...


class Masters:
    """The master weights of one optimizer's parameters on this rank, made when they are first needed.

    The master of a parameter that is not in half precision shares its memory, so that only the gradients differ.
    """

    def __init__(self) -> None:
        """Start without masters."""
        self._masters: dict[int, _Master] = {}
        #: The version of each parameter when its values were last those of its master.
        self._versions: dict[int, int] = {}
        #: Has the values of masters; None leaves them in memory.
        self.keeper: Keeper | None = None
        #: In an update, the gradient that each master was given, and its version, by the ``id`` of the parameter.
        self._given: dict[int, tuple[torch.Tensor | None, int]] | None = None
        self._scale = 1.0
        #: In an update, the version of each master when it was rounded.
        self._rounded: dict[int, int] = {}

    @property
    def nbytes(self) -> int:
        """The bytes of the masters that have memory of their own."""
        return sum(one.nbytes for one in self.tensors())

    def of(self, parameter: torch.Tensor) -> nn.Parameter:
        """Return the master of a parameter; a new one has its values."""
        found = self._masters.get(id(parameter))
        if found is not None and found.parameter is parameter:
            carry_attributes(user_attributes(parameter), found.tensor)
            return found.tensor
        values = parameter.detach()
        master = nn.Parameter(values.float() if parameter.dtype in HALF else values)
        if self.keeper is not None and parameter.dtype in HALF:
            self.keeper.keep_data(master)
        setattr(master, _PARAMETER, parameter)
        carry_attributes(user_attributes(parameter), master)
        self._masters[id(parameter)] = _Master(parameter, master)
        self._versions[id(parameter)] = parameter._version
        return master

    @torch.no_grad()
    def move(
        self, parameter: torch.Tensor, to: torch.Tensor | None, values: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        """Make the master of a parameter, if there is one, that of what this rank updates of it from now on.

        Args:
            parameter: The parameter.
            to: What this rank updates of it: itself, a part of it, or None for nothing.
            values: Returns the part of the master's values that ``to`` has.
        """
        found = self._masters.get(id(parameter))
        if found is None or found.parameter is not parameter or to is parameter:
            return
        del self._masters[id(parameter)]
        version = self._versions.pop(id(parameter))
        if to is not None and found.is_copy:
            before = values(self._values(found.tensor))
            self._values(self.of(to)).copy_(before)
            self._versions[id(to)] = {parameter._version: to._version, _LOADED: _LOADED}.get(version, _OLDER)

    def copies(self, parameters: Iterable[torch.Tensor]) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the place of each parameter that has a master of its own memory, and the master's values."""
        for place, parameter in enumerate(parameters):
            found = self._masters.get(id(parameter))
            if found is not None and found.is_copy:
                yield place, self._values(found.tensor)

    def tensors(self) -> list[torch.Tensor]:
        """Return the masters that have memory of their own."""
        return [one.tensor for one in self._masters.values() if one.is_copy]

    @torch.no_grad()
    def load(self, parameter: torch.Tensor, values: torch.Tensor) -> None:
        """Set a master's values; where they do not round to the parameter's, :meth:`follow_model` takes these."""
        if (own := self.to_load(parameter)) is not None:
            own.copy_(values)
            self.has_loaded(parameter)

    def to_load(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return what takes a master's values, for :meth:`has_loaded`; None if it has no memory of its own."""
        master = self.of(parameter)
        return self._values(master) if parameter.dtype in HALF else None

    def has_loaded(self, parameter: torch.Tensor) -> None:
        """Record that a master's values were loaded."""
        self._release(self.of(parameter))
        self._versions[id(parameter)] = _LOADED

    def _values(self, master: torch.Tensor) -> torch.Tensor:
        return master.detach() if self.keeper is None else self.keeper.values_of(master)

    def _release(self, master: torch.Tensor) -> None:
        if self.keeper is not None:
            self.keeper.release(master)

    @torch.no_grad()
    def follow_model(self, *, also_loaded: bool) -> None:
        """Take over what was written to parameters since the last update; equal elements keep the master's precision.

        Args:
            also_loaded: Whether parameters have their values, if their masters were loaded.
        """
        for key, (parameter, master) in self._masters.items():
            before = self._versions[key]
            if before == parameter._version or parameter.dtype not in HALF or (before == _LOADED and not also_loaded):
                continue
            kept = self._values(master)
            values = kept.to(parameter.device)
            is_same = values.to(parameter.dtype) == parameter
            kept.copy_(torch.where(is_same, values, parameter.to(values.dtype)))
            self._release(master)
            self._versions[key] = parameter._version

    @torch.no_grad()
    def take_from_model(self) -> None:
        """Set all masters to the values of their parameters."""
        for key, (parameter, master) in self._masters.items():
            if parameter.dtype in HALF:
                self._values(master).copy_(parameter)
                self._release(master)
            self._versions[key] = parameter._version

    @torch.no_grad()
    def take_gradients(self, parameters: Sequence[torch.Tensor], scale: float, *, check: bool) -> bool:
        """Give each master the gradient of its parameter, in float32 and divided by a scale.

        Args:
            parameters: The parameters.
            scale: What the loss was multiplied by.
            check: Whether to look for infinities and NaN, and to divide.

        Returns:
            Whether a gradient is not finite.
        """
        self.follow_model(also_loaded=True)
        values: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is None:
                if (found := self._masters.get(id(parameter))) is not None:
                    found.tensor.grad = None
                continue
            wide = torch.float32 if gradient.dtype in HALF else gradient.dtype
            taken = gradient.detach().to(wide, copy=True)
            self.of(parameter).grad = taken = taken.coalesce() if taken.is_sparse else taken
            value = taken.values() if taken.is_sparse else taken
            value = torch.view_as_real(value) if value.is_complex() else value
            if value.numel():
                values.setdefault((value.device, value.dtype), []).append(value)
        if not check:
            return False
        found_inf: list[torch.Tensor] = []
        for (device, _), together in values.items():
            found_inf.append(torch.zeros((), dtype=torch.float32, device=device))
            inverse = torch.full((), 1.0 / scale, dtype=torch.float32, device=device)
            torch._amp_foreach_non_finite_check_and_unscale_(together, found_inf[-1], inverse)
        return any(bool(one) for one in found_inf)

    def gradients(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Return the gradients of the masters of these parameters, of those that have one."""
        found = (self._masters.get(id(parameter)) for parameter in parameters)
        return [one.tensor.grad for one in found if one is not None and one.tensor.grad is not None]

    def drop_gradients(self) -> None:
        """Free the gradients of all masters."""
        for master in self._masters.values():
            master.tensor.grad = None

    @contextlib.contextmanager
    def updating(self, optimizer: Optimizer, scale: float) -> Iterator[None]:
        """Let an optimizer update masters in the block; round them, and put back what it did to their gradients.

        Args:
            optimizer: The optimizer, whose groups hold the masters inside the block.
            scale: What the gradients of the model's parameters are multiplied by.
        """
        to_round = set[int]()
        self._given, self._scale = {}, scale
        for key, one in self._masters.items():
            gradient = one.tensor.grad
            self._given[key] = (gradient, 0 if gradient is None else gradient._version)
            if gradient is not None or (self.keeper is None and self._versions[key] == one.parameter._version):
                to_round.add(key)
        try:
            with self.in_place_of_parameters(optimizer):
                yield
            for key in list(self._given):
                self._put_back_gradient(key)
            self._copy_to_model(to_round)
        finally:
            self._given, self._rounded = None, {}

    @torch.no_grad()
    def _put_back_gradient(self, key: int) -> None:
        parameter, master = self._masters[key]
        given, version = (self._given or {}).pop(key, (None, 0))
        left = master.grad
        if left is None and given is not None:
            parameter.grad = None
        elif left is not None and (left is not given or left._version != version):
            if parameter.grad is None or parameter.grad.is_sparse or left.is_sparse:
                parameter.grad = (left * self._scale).to(parameter.dtype)
            else:
                parameter.grad.copy_(left * self._scale)

    def zero_gradients(self, tensors: Iterable[torch.Tensor], *, set_to_none: bool) -> bool:
        """In an update, clear the gradients of the parameters whose masters these are; return whether there is one.

        Args:
            tensors: What the groups hold.
            set_to_none: Whether they become None, and not zeros.
        """
        if self._given is None:
            return False
        for one in tensors:
            parameter = model_parameter(one)
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()
        return True

    @torch.no_grad()
    def _copy_to_model(self, keys: Iterable[int]) -> None:
        """Round masters to their parameters, but those that are rounded already and were not written to since."""
        every = {key: self._masters[key] for key in keys}
        copies = {
            key: one for key, one in every.items() if one.is_copy and self._rounded.get(key) != one.tensor._version
        }
        if copies:
            torch._foreach_copy_([one.parameter for one in copies.values()], [one.tensor for one in copies.values()])
        for key, one in copies.items():
            self._versions[key] = one.parameter._version

    def has_rounded(self, master: torch.Tensor, *, keeps_gradient: bool) -> None:
        """Record that a master has been rounded to its parameter in an update.

        Args:
            master: The master.
            keeps_gradient: Whether its gradient stays until the end of the update, as hooks look at it.
        """
        parameter = model_parameter(master)
        self._versions[id(parameter)] = parameter._version
        self._rounded[id(parameter)] = master._version
        if not keeps_gradient:
            self._put_back_gradient(id(parameter))
            master.grad = None

    @contextlib.contextmanager
    def in_place_of_parameters(self, optimizer: Optimizer) -> Iterator[None]:
        """Put masters into the groups and the state of an optimizer within the block, where they exist."""
        to_master = {key: one.tensor for key, one in self._masters.items()}
        to_parameter = {id(one.tensor): one.parameter for one in self._masters.values()}
        with standing_one_for_one(optimizer, to_master, to_parameter):
            yield


def model_parameter(tensor: torch.Tensor) -> torch.Tensor:
    """Return the parameter of the model that a tensor is the master of, or the tensor itself."""
    found: torch.Tensor = getattr(tensor, _PARAMETER, tensor)
    return found
