"""A step on a device: the state of one chunk after another comes from host memory, is updated there, and goes back."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shardwright.groups import has_step_hooks, put_back_gradient, standing_in
from shardwright.half_precision.masters import model_parameter
from shardwright.offloading.tensors import is_dense, may_be_offloaded
from shardwright.optimizer.offloading.alike import only
from shardwright.optimizer.offloading.chunks import Part, elements
from shardwright.optimizer.offloading.slots import Cargo, Item, Slots, bytes_of
from shardwright.optimizer.offloading.storage import Pages, StateStorage


@dataclass
class _State:
    """What is known of a parameter's state while its parts are updated.

    Attributes:
        before: What the optimizer had of it before the step; None for nothing.
        after: What it gets.
    """

    before: dict[str, Any] | None
    after: dict[str, Any]


@dataclass
class _Loaded:
    """A part on its way through the device."""

    part: Part
    #: In the order of the cargo: keys of the state, and None for the values of a master weight.
    keys: Sequence[str | None]


@dataclass
class LoadedChunk:
    """A chunk on its way through the device."""

    parts: Sequence[_Loaded]
    cargo: Cargo


class DeviceChunks:
    """Updates chunks whose parameters and gradients are on a device, and whose state is in host memory or a file.

    All of it that elements have passes through the device, and is updated by the kernels that update it without
    offloading. So the numbers are the same.
    """

    def __init__(
        self, optimizer: Any, storage: StateStorage, update: Callable[[Optimizer], Any], device: torch.device
    ) -> None:
        """Begin a step.

        Args:
            optimizer: The optimizer.
            storage: Where its state is.
            update: The wrapped optimizer's step, without hooks.
            device: The device.
        """
        self._optimizer, self._storage, self._update = optimizer, storage, update
        self._slots = Slots(storage.streams, device, is_locked=storage.is_locked)
        storage.slots = self._slots
        self._states: dict[int, _State] = {}

    def load(self, chunk: list[Part]) -> LoadedChunk:
        """Begin to bring the state of a chunk.

        Args:
            chunk: The parts.
        """
        parts, items = list[_Loaded](), list[Item]()
        for part in chunk:
            found: list[tuple[str | None, torch.Tensor]] = []
            state = self._begin(part)
            for key, value in (state.before or {}).items():
                if value in self._storage:
                    found.append((key, value))
            if self._storage.has_values_of(part.parameter):
                found.append((None, part.parameter))
            items += [self._item(part, tensor) for _, tensor in found]
            parts.append(_Loaded(part, [key for key, _ in found]))
        return LoadedChunk(parts, self._slots.load(items))

    def bring(self, chunk: LoadedChunk, *, only_if_ready: bool = False) -> None:
        """Begin the copies to the device.

        Args:
            chunk: The chunk.
            only_if_ready: Do nothing where that would wait for the disk.
        """
        if not only_if_ready or self._storage.is_locked:
            self._slots.bring(chunk.cargo)

    def update(self, chunk: LoadedChunk) -> None:
        """Update a chunk, and begin to bring its state back.

        Args:
            chunk: The chunk, whose copies to the device have begun.
        """
        optimizer = self._optimizer
        tensors = iter(self._slots.use(chunk.cargo))
        stand_ins = dict[int, torch.Tensor]()
        given: list[tuple[_Loaded, torch.Tensor, torch.Tensor | None, _State]] = []
        try:
            for loaded in chunk.parts:
                brought = {key: next(tensors) for key in loaded.keys}
                tensor, own = self._given(loaded.part, brought)
                given.append((loaded, tensor, tensor.grad, self._states[id(loaded.part.parameter)]))
                if own:
                    optimizer.state[tensor] = own
                stand_ins[id(loaded.part.parameter)] = tensor
            with standing_in(optimizer, only(stand_ins)):
                self._update(optimizer)
        finally:
            left = [self._left(loaded.part.parameter, tensor, state) for loaded, tensor, _, state in given]
        results: list[tuple[torch.Tensor, torch.Tensor, Pages | None]] = []
        for (loaded, tensor, gradient, state), found in zip(given, left, strict=True):
            parameter = loaded.part.parameter
            if tensor is not parameter and loaded.part.end is None:  # what is cut is of known classes
                write = functools.partial(setattr, parameter, "grad")
                put_back_gradient(parameter, gradient, tensor.grad, write)
            results += self._taken(loaded.part, tensor, state, found)
        self._slots.store(chunk.cargo, results)

    def close(self) -> None:
        """Wait until all state is back.

        Raises:
            OffloadError: It cannot be written to the disk.
        """
        self._slots.close()

    def _begin(self, part: Part) -> _State:
        state = self._states.get(id(part.parameter))
        if state is None:
            before = self._optimizer.state.get(part.parameter)
            if before is not None:
                for key, value in before.items():
                    if isinstance(value, torch.Tensor) and value.dim() > 0:  # new, or of a copy of the optimizer
                        before[key] = self._storage.keep(value)
            state = self._states[id(part.parameter)] = _State(before, {})
        return state

    def _item(self, part: Part, tensor: torch.Tensor) -> Item:
        host = self._storage.values_of(tensor) if tensor is part.parameter else tensor
        cut = host if part.end is None else elements(host, part)
        pages = None if self._storage.is_locked else self._storage.pages_of(tensor, part.begin, part.end)
        return Item(bytes_of(cut), pages, cut)

    def _given(self, part: Part, brought: Mapping[str | None, torch.Tensor]) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return what the optimizer updates in place of a part, and its state on the device."""
        parameter, before = part.parameter, self._states[id(part.parameter)].before or {}
        tensor: torch.Tensor = parameter
        if part.end is not None or None in brought:
            values = brought[None] if None in brought else elements(parameter, part)
            tensor = nn.Parameter(values, parameter.requires_grad)
            gradient = parameter.grad
            tensor.grad = gradient if gradient is None or part.end is None else elements(gradient, part)
        state: dict[str, Any] = {}
        for key, value in before.items():
            if key in brought:
                state[key] = brought[key]
            elif part.end is None:
                state[key] = value
            elif isinstance(value, torch.Tensor):
                is_whole = value.shape == parameter.shape and value.dim() > 0
                state[key] = elements(value, part) if is_whole else value.clone()
            else:
                state[key] = value
        return tensor, state

    def _left(self, parameter: torch.Tensor, tensor: torch.Tensor, state: _State) -> Mapping[str, Any]:
        """Return the state that a step has left of a part, in whose place is what the parameter had before."""
        states = self._optimizer.state
        left: Mapping[str, Any] = states.get(tensor, {})
        if tensor is parameter and state.before is not None:
            states[parameter] = state.before  # at its place in the order
        else:
            states.pop(tensor, None)
        return left

    def _taken(
        self, part: Part, tensor: torch.Tensor, state: _State, left: Mapping[str, Any]
    ) -> list[tuple[torch.Tensor, torch.Tensor, Pages | None]]:
        """Take over the state that a step has left of a part; return what has to be copied to host memory."""
        storage, parameter = self._storage, part.parameter
        results = []

        def result(source: torch.Tensor, kept: torch.Tensor, host: torch.Tensor) -> None:
            cut = host if part.end is None else elements(host, part)
            pages = None if storage.is_locked else storage.pages_of(kept, part.begin, part.end)
            results.append((bytes_of(source), bytes_of(cut), pages))

        for key, value in left.items():
            is_whole = isinstance(value, torch.Tensor) and value.shape == tensor.shape
            if not isinstance(value, torch.Tensor) or not (is_whole or part.end is None):
                state.after.setdefault(key, value)  # all pieces leave the same
                continue
            if part.end is None and not (storage.is_of_device(value) and may_be_offloaded(value)):
                state.after[key] = value
                continue
            dense = value if is_dense(value) else value.contiguous()
            like = dense if part.end is None else torch.empty_like(parameter, dtype=value.dtype, device="meta")
            if key not in state.after:
                state.after[key] = self._target(like, (state.before or {}).get(key))
            kept = state.after[key]
            if kept in storage:
                result(dense, kept, kept)
            elif (into := elements(kept, part)).data_ptr() != dense.data_ptr():  # too small to leave
                into.copy_(dense)
        if storage.has_values_of(parameter):
            result(tensor, parameter, storage.values_of(parameter))
            self._round(part, tensor)
        if part.is_last:
            self._end(parameter, state)
        return results

    def _target(self, like: torch.Tensor, before: Any) -> torch.Tensor:
        """Return where state goes that is like this: where it was, or a new place."""
        if isinstance(before, torch.Tensor) and (before.shape, before.dtype) == (like.shape, like.dtype):
            if before in self._storage and before.stride() == like.stride():
                return before
            if before not in self._storage and like.is_meta:
                return before
        return self._storage.empty_like(like)

    def _round(self, part: Part, updated: torch.Tensor) -> None:
        """Round a master weight, which is on the device now, to the parameter of the model."""
        rounded = model_parameter(part.parameter).detach()
        (rounded if part.end is None else elements(rounded, part)).copy_(updated.detach())
        if part.is_last:
            self._optimizer._masters.has_rounded(part.parameter, keeps_gradient=has_step_hooks(self._optimizer))

    def _end(self, parameter: torch.Tensor, state: _State) -> None:
        del self._states[id(parameter)]
        if not state.after:
            self._optimizer.state.pop(parameter, None)
            return
        entry = {} if state.before is None else state.before  # which scripts may hold
        entry.clear()
        entry.update(state.after)
        self._optimizer.state[parameter] = entry
