"""Optimizers whose state is offloaded: a step brings it back in chunks, the next one while one is updated."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch.optim import Optimizer

from shardwright.errors import ConfigError
from shardwright.groups import has_step_hooks, standing_in
from shardwright.half_precision.masters import model_parameter
from shardwright.job.runtime import find_runtime
from shardwright.optimizer.offloading.alike import alike_in_chunks, only
from shardwright.optimizer.offloading.chunks import Part, chunks_of, elements
from shardwright.optimizer.offloading.loaded import Held, held
from shardwright.optimizer.offloading.on_device import DeviceChunks
from shardwright.optimizer.offloading.pieces import Pieces, may_be_cut
from shardwright.optimizer.offloading.refusals import refuse_differentiable
from shardwright.optimizer.offloading.storage import Pages, StateStorage
from shardwright.optimizer.sharding.elementwise import (
    calls_hooks_inside,
    changes_without_gradient,
    is_elementwise,
    original_class,
    state_tensors,
)

#: How many tensors of a parameter's size are expected as its state, where the optimizer's class does not say it.
_EXPECTED_TENSORS = 2


class StreamedState(Optimizer):
    """What ``smp.DistributedOptimizer`` adds to an optimizer whose state is offloaded (``offload_optimizer``).

    It stands before the class of the wrapped optimizer, whose step it runs for some of the parameters at a time.
    """

    _storage: StateStorage | None = None

    def start_streaming(self, storage: StateStorage) -> None:
        """Keep the state in a storage from now on; not for scripts.

        Args:
            storage: The storage.
        """
        self._storage = storage
        masters = getattr(self, "_masters", None)
        if masters is not None:
            masters.keeper = storage
        self._keep_state(self.state)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters, as the wrapped optimizer does.

        Args:
            closure: Computes gradients; it is called once.

        Returns:
            The result of the closure.

        Raises:
            ConfigError: A group has ``differentiable=True``, or a CUDA graph is captured.
            OffloadError: The disk is full, or cannot be read.
        """
        refuse_differentiable(self)
        _refuse_capture(type(self).__name__)
        # The hooks of the script see one step, with all groups.
        hooked: Callable[..., Any] = Optimizer.profile_hook_step(_in_chunks)
        return hooked(self) if closure is None else hooked(self, closure)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict, and move its tensors into the storage, past the device."""
        storage = self._files()
        if storage is None or not any(storage.is_of_device(one) for one in self._all_parameters()):
            super().load_state_dict(state_dict)  # type: ignore[arg-type]
            self._keep_state(self.state)
            return
        super().load_state_dict(held(state_dict, storage))  # PyTorch moves all tensors to the parameters' devices
        for parameter, entry in self.state.items():
            for key, value in entry.items() if isinstance(entry, dict) else ():
                if isinstance(value, Held):
                    entry[key] = value.kept_for(parameter, storage)

    def new_state(self, like: torch.Tensor) -> torch.Tensor | None:
        """Return a tensor for state in the storage, with any values; None where it is to be on the parameter's device.

        Args:
            like: A tensor, which may be on no device, of its shape and dtype.

        Raises:
            OffloadError: The disk is full.
        """
        storage = self._files()
        return None if storage is None or not storage.takes_new(like) else storage.empty_like(like)

    def release_state(self) -> None:
        """Take state out of memory that was looked at, if it is in a file."""
        storage, masters = self._files(), getattr(self, "_masters", None)
        if storage is not None:
            for tensor in [*self._state_tensors(), *([] if masters is None else masters.tensors())]:
                storage.release(tensor)

    def _all_parameters(self) -> Iterable[torch.Tensor]:
        return (parameter for group in self.param_groups for parameter in group["params"])

    def _state_tensors(self) -> list[torch.Tensor]:
        entries = (entry for entry in self.state.values() if isinstance(entry, dict))
        return [value for entry in entries for value in entry.values() if isinstance(value, torch.Tensor)]

    def streamed_bytes(self) -> int:
        """Return the bytes of the state, and of master weights, that are in the storage."""
        storage, masters = self._storage, getattr(self, "_masters", None)
        if storage is None:
            return 0
        return storage.bytes_of([*self._state_tensors(), *([] if masters is None else masters.tensors())])

    def _keep_state(self, parameters: Iterable[torch.Tensor]) -> None:
        storage = self._files()
        if storage is None:
            return
        for parameter in parameters:
            entry: Any = self.state.get(parameter)
            if isinstance(entry, dict):
                tensors = {key: value for key, value in entry.items() if isinstance(value, torch.Tensor)}
                entry.update((key, storage.keep(value)) for key, value in tensors.items())

    def _files(self) -> StateStorage | None:
        """Return the storage; a copy of the optimizer has none of its own, and finds that of the rank."""
        if self._storage is None and (runtime := find_runtime()) is not None:
            self._storage = runtime.find(StateStorage)
        return self._storage


def _in_chunks(optimizer: Any, closure: Callable[[], Any] | None = None) -> Any:
    """Run the wrapped optimizer's step, without hooks, for each chunk."""
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    update, storage = _wrapped_step(optimizer), optimizer._files()
    with torch.no_grad():
        if storage is None:
            update(optimizer)
        else:
            _Step(optimizer, storage, update).run()
    return loss


def _refuse_capture(name: str) -> None:
    """Raise if a graph is captured: it would hold the addresses of this step's memory, and none of the waits."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise ConfigError(
            f'{name}.step() with "offload_optimizer" while a CUDA graph is captured: its state comes from host memory '
            'in every step, which a graph cannot repeat; call it outside, or use "offload_optimizer": False'
        )


def _wrapped_step(optimizer: Optimizer) -> Callable[[Optimizer], Any]:
    step: Any = original_class(optimizer).step
    unhooked: Callable[[Optimizer], Any] = step.__wrapped__ if getattr(step, "hooked", False) else step
    return unhooked


class _Step:
    """One step of an optimizer."""

    def __init__(self, optimizer: Any, storage: StateStorage, update: Callable[[Optimizer], Any]) -> None:
        self._optimizer = optimizer
        self._storage = storage
        self._update = alike_in_chunks(optimizer, update)
        self._is_elementwise = is_elementwise(original_class(optimizer))
        self._takes_all = changes_without_gradient(optimizer)
        self._in_one = calls_hooks_inside(optimizer)
        #: Of parameters that are cut, while they are updated.
        self._pieces: dict[int, Pieces] = {}

    def run(self) -> None:
        """Update all parameters, those of each device by themselves."""
        groups = self._optimizer.param_groups
        every = dict.fromkeys(one.device for group in groups for one in group["params"] if self._is_updated(one))
        if not every:
            self._update(self._optimizer)  # which may count its steps
        for device in every:
            own = [
                {**group, "params": [one for one in group["params"] if one.device == device and self._is_updated(one)]}
                for group in groups
            ]
            if self._storage.streams.serves(device):
                self._run_on_device(device, own)
            else:
                self._run_here(own)

    def _is_updated(self, parameter: torch.Tensor) -> bool:
        return self._takes_all or parameter.grad is not None

    def _run_on_device(self, device: torch.device, groups: Sequence[dict[str, Any]]) -> None:
        """Bring the next chunk while one is updated, and the one before goes back."""
        device_chunks = DeviceChunks(self._optimizer, self._storage, self._update, device)
        try:
            chunks = map(device_chunks.load, chunks_of(groups, self._state_bytes, self._may_be_cut))
            chunk = next(chunks, None)
            while chunk is not None:
                device_chunks.bring(chunk)
                following = next(chunks, None)
                if following is not None:
                    device_chunks.bring(following, only_if_ready=True)
                device_chunks.update(chunk)
                chunk = following
        except BaseException:
            with contextlib.suppress(Exception):  # the error is told that came first
                device_chunks.close()
            raise
        device_chunks.close()

    def _run_here(self, groups: Sequence[dict[str, Any]]) -> None:
        """Load the next chunk while one is updated, and release it then."""
        chunks = chunks_of(groups, self._state_bytes, self._may_be_cut)
        chunk = next(chunks, None)
        with ThreadPoolExecutor(1, "shardwright-optimizer-state") as ahead:
            loading: Future[None] | None = None
            while chunk is not None:
                _load(self._pages(chunk)) if loading is None else loading.result()
                following = next(chunks, None)
                loading = None if following is None else ahead.submit(_load, self._pages(following))
                self._update_chunk(chunk)
                for pages in self._pages(chunk):
                    pages.release()
                self._forget_pieces(chunk)
                chunk = following

    def _state_of(self, parameter: torch.Tensor) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self._optimizer.state.get(parameter, {})
        return found

    def _state_bytes(self, group: Mapping[str, Any], parameter: torch.Tensor) -> int:
        if self._in_one:
            return 0
        own = parameter.numel() * parameter.element_size()
        found = [value for value in self._state_of(parameter).values() if isinstance(value, torch.Tensor)]
        if found:
            kept = sum(value.numel() * value.element_size() for value in found)
        else:
            number = state_tensors(original_class(self._optimizer), group)
            kept = own * (_EXPECTED_TENSORS if number is None else number)
        return kept + own * (parameter in self._storage)

    def _may_be_cut(self, parameter: torch.Tensor) -> bool:
        return (
            self._is_elementwise
            and may_be_cut(parameter, self._storage.values_of(parameter), self._state_of(parameter))
            and model_parameter(parameter).is_contiguous()
        )

    def _pages(self, chunk: list[Part]) -> list[Pages]:
        """Return what a chunk has in the file; for the first part of a parameter that is cut, keep its state."""
        found = []
        for part in chunk:
            if part.parameter in self._storage:  # a master weight
                found.append(self._storage.pages_of(part.parameter, part.begin, part.end))
            if part.end is None:
                values = [value for value in self._state_of(part.parameter).values() if value in self._storage]
                found += [self._storage.pages_of(value) for value in values]
                continue
            if part.begin == 0 and id(part.parameter) not in self._pieces:
                state = self._state_of(part.parameter)
                self._pieces[id(part.parameter)] = Pieces(part.parameter, state, self._storage)
            found += self._pieces[id(part.parameter)].pages(part)
        return found

    def _update_chunk(self, chunk: list[Part]) -> None:
        optimizer = self._optimizer
        stand_ins, updated = dict[int, torch.Tensor](), []
        for part in chunk:
            tensor = part.parameter
            if part.end is not None:
                tensor, state = self._pieces[id(part.parameter)].make(part)
                if state:
                    optimizer.state[tensor] = state
            stand_ins[id(part.parameter)] = tensor
            updated.append((part, tensor))
        try:
            with standing_in(optimizer, only(stand_ins)):
                self._update(optimizer)
        finally:
            states = [{} if part.end is None else optimizer.state.pop(tensor, {}) for part, tensor in updated]
        for (part, tensor), state in zip(updated, states, strict=True):
            if part.end is not None:
                self._pieces[id(part.parameter)].take(part, tensor, state)
            _round(optimizer, part, tensor)
        optimizer._keep_state(part.parameter for part, _ in updated if part.end is None)

    def _forget_pieces(self, chunk: list[Part]) -> None:
        for part in chunk:
            if part.end is not None and part.is_last:
                state = self._pieces.pop(id(part.parameter)).state
                if state:
                    self._optimizer.state[part.parameter].update(state)


def _load(pages: list[Pages]) -> None:
    for one in pages:
        one.load()


def _round(optimizer: Any, part: Part, updated: torch.Tensor) -> None:
    """Round a master weight, which is in memory now, to the parameter of the model."""
    model = model_parameter(part.parameter)
    if model.dtype is updated.dtype:
        return
    rounded = model.detach()
    (rounded if part.end is None else elements(rounded, part)).copy_(updated)
    if part.is_last:
        optimizer._masters.has_rounded(part.parameter, keeps_gradient=has_step_hooks(optimizer))
