"""Running a model without leaving a trace in it: what a forward may change is remembered and put back."""

from __future__ import annotations

import contextlib
import gc
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from shardwright.contents import attributes_of, containers_in, restore_cells, restore_dict, restore_slots, slots_of
from shardwright.partition.plain import plain_tensors
from shardwright.partition.shared_state import SharedState
from shardwright.partition.tree import ModelTree


class Preserved:
    """What a forward may change in a model: remembered once, and put back after each forward.

    Buffers are replaced by copies meanwhile, so that the originals keep their identity, values and version. Parameters
    are too large to copy beforehand: whoever runs the model reports each operation that writes to a tensor to the
    `Writes` that :meth:`during` yields, before it runs.

    Attributes:
        shared: The objects that modules share.
        plain: Tensors that modules hold as neither parameters nor buffers.
    """

    def __init__(self, tree: ModelTree) -> None:
        """Remember buffers, gradients and attributes of the modules of `tree`, as they are now."""
        self.shared = SharedState(tree)
        self.plain = plain_tensors(tree, self.shared)
        self._tree = tree
        self._modules = [ModuleState(entry.module) for entry in tree.modules]
        self._gradients = [(entry.tensor, entry.tensor.grad) for entry in tree.parameters]
        self._data = [(entry.tensor, entry.tensor.data) for entry in tree.parameters]

    @contextlib.contextmanager
    def during(self) -> Iterator[Writes]:
        """Put everything back on the way out, random numbers and settings of torch included.

        Yields:
            Where writes to parameters and gradients are to be reported.
        """
        tree = self._tree
        writes = Writes(tree)
        for tensor in self.shared.tensors():
            writes.watch(tensor)
        default_dtype = torch.get_default_dtype()
        cache_enabled = torch.is_autocast_cache_enabled()
        fast_path = torch.backends.mha.get_fastpath_enabled()
        with contextlib.ExitStack() as stack:
            stack.callback(torch.set_default_dtype, default_dtype)
            stack.enter_context(preserved_random_numbers(entry.tensor for entry in (*tree.parameters, *tree.buffers)))
            # A weight cast under no_grad would stay in autocast's cache and cut the gradient of the real forward.
            torch.set_autocast_cache_enabled(False)
            stack.callback(torch.set_autocast_cache_enabled, cache_enabled)
            # The fused encoder layer reads its children's weights, which only an evaluation on one rank would do.
            torch.backends.mha.set_fastpath_enabled(False)
            stack.callback(torch.backends.mha.set_fastpath_enabled, fast_path)
            stack.callback(self._put_back, writes)
            _copy_buffers(tree)
            yield writes

    def _put_back(self, writes: Writes) -> None:
        for module in self._modules:
            module.restore()
        self.shared.restore()
        for parameter, original in self._data:
            parameter.data = original  # `Module.to` in a forward exchanges it, which no operation shows
        for parameter, gradient in self._gradients:
            if parameter.grad is not gradient:
                parameter.grad = gradient
        for plain in self.plain:
            plain.restore()
        writes.restore()


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Collect no garbage in cycles meanwhile.

    A forward that is watched makes many objects that live until its end, and would bring forward a collection of all
    that the imports made: longer than the forward of a small model, and part of the times that are measured.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _copy_buffers(tree: ModelTree) -> None:
    copies = [entry.tensor.clone() for entry in tree.buffers]
    for entry in tree.modules:
        for name, index in entry.buffers.items():
            entry.module._buffers[name] = copies[index]


@contextlib.contextmanager
def preserved_random_numbers(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Put back the random numbers of torch, on the CPU and the devices of these tensors, of Python and of NumPy."""
    devices = {tensor.device.index for tensor in tensors if tensor.device.type == "cuda"}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        devices.add(torch.cuda.current_device())
    python_state = random.getstate()
    numpy = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy is not None else None
    with torch.random.fork_rng(devices=sorted(index for index in devices if index is not None)):
        try:
            yield
        finally:
            random.setstate(python_state)
            if numpy is not None:
                numpy.random.set_state(numpy_state)


class Writes:
    """Keeps the values of parameters and gradients that a forward is about to overwrite."""

    def __init__(self, tree: ModelTree) -> None:
        """Watch the storages of the parameters, their gradients, and the original buffers."""
        self._watched: dict[int, list[torch.Tensor]] = {}
        self._saved: dict[int, tuple[torch.Tensor, torch.Tensor, Any]] = {}
        for entry in (*tree.parameters, *tree.buffers):
            for tensor in (entry.tensor, entry.tensor.grad if entry.tensor.is_leaf else None):
                if tensor is not None:
                    self.watch(tensor)

    def watch(self, tensor: torch.Tensor) -> None:
        """Keep a tensor's values too, should they be overwritten."""
        if tensor.layout is torch.strided:
            self._watched.setdefault(_storage_key(tensor), []).append(tensor)

    def before_write(self, tensor: torch.Tensor) -> None:
        """Keep what `tensor` shares memory with, if it belongs to the model."""
        if tensor.layout is not torch.strided:
            return
        for watched in self._watched.get(_storage_key(tensor), ()):
            self.keep(watched)

    def keep(self, tensor: torch.Tensor) -> None:
        """Keep the values of `tensor`, unless they are kept already."""
        if id(tensor) not in self._saved:
            keep_version = torch.autograd._unsafe_preserve_version_counter(tensor)  # type: ignore[attr-defined]
            self._saved[id(tensor)] = (tensor, tensor.detach().clone(), keep_version)

    def written(self) -> list[torch.Tensor]:
        """Return what was written to so far."""
        return [tensor for tensor, _, _ in self._saved.values()]

    def restore(self) -> None:
        """Put the kept values back, without a change of version."""
        with torch.no_grad():
            for tensor, values, keep_version in self._saved.values():
                with keep_version:
                    tensor.copy_(values)


def _storage_key(tensor: torch.Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key


class ModuleState:
    """The attributes of one module, with what is in those, one level deep."""

    def __init__(self, module: nn.Module, left_out: frozenset[str] = frozenset()) -> None:
        """Remember them, but for those whose names are left out."""
        self._module, self._held = module, vars(module)
        self._left_out = left_out
        self._attributes = {name: value for name, value in self._held.items() if name not in left_out}
        self._in_slots = attributes_of(module) if slots_of(type(module)) else {}
        self._cells = containers_in([*self._attributes.values(), *self._in_slots.values()])

    def restore(self) -> None:
        """Put them back."""
        others = {name: value for name, value in self._held.items() if name in self._left_out}
        restore_dict(self._held, others | self._attributes)
        restore_slots(self._module, self._in_slots)
        restore_cells(self._cells, [self._held])


@contextlib.contextmanager
def moved_to(tree: ModelTree, device: torch.device) -> Iterator[None]:
    """Run with the parameters and buffers on `device`, and put the very same storages back afterwards.

    Meant to be used inside `Preserved.during`, whose copies of the buffers it moves.
    """
    parameters = [entry.tensor for entry in tree.parameters if entry.tensor.device != device]
    originals = [parameter.data for parameter in parameters]
    for entry in tree.modules:
        for name, buffer in entry.module._buffers.items():
            if buffer is not None and buffer.device != device:
                entry.module._buffers[name] = buffer.to(device)
    try:
        for parameter in parameters:
            parameter.data = parameter.data.to(device)
        yield
    finally:
        for parameter, original in zip(parameters, originals, strict=True):
            parameter.data = original


def copied_arguments(
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    device: torch.device | None = None,
    keep: Callable[[torch.Tensor], bool] = lambda tensor: isinstance(tensor, nn.Parameter),
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return copies of the tensors in arguments, so that a forward that writes to its inputs leaves the caller's alone.

    Args:
        args: Positional arguments; tensors in lists, tuples, dicts and registered types are found.
        kwargs: Keyword arguments.
        device: Where the copies go; None leaves each where it is.
        keep: Tensors to hand on as they are (the model's own parameters).

    Returns:
        The same arguments with one copy for each distinct tensor.
    """
    copies: dict[int, torch.Tensor] = {}

    def copied(item: object) -> object:
        if not isinstance(item, torch.Tensor) or keep(item):
            return item
        if id(item) not in copies:
            copy = item.detach().clone() if device is None else item.detach().to(device, copy=True)
            copy.requires_grad_(item.requires_grad)
            if item.requires_grad and not item.is_leaf:  # which may be written to in place
                with torch.enable_grad():
                    copy = copy.clone()
            copies[id(item)] = copy
        return copies[id(item)]

    copied_args, copied_kwargs = tree_map(copied, (tuple(args), dict(kwargs)))
    return copied_args, copied_kwargs
