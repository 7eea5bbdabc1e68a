"""Runs a model without side effects: saves what a forward may change, and restores it."""

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
    """The state of a model that a forward may change. It is saved once and restored after each forward.

    Buffers are replaced by copies during the forward, so that the originals keep their identity, values and version.
    Parameters are too large to copy in advance: the code that runs the model must report each operation that writes to
    a tensor to the `Writes` that :meth:`during` yields, before the operation runs.

    Attributes:
        shared: The objects that modules share.
        plain: Tensors that modules hold as neither parameters nor buffers.
    """

    def __init__(self, tree: ModelTree) -> None:
        """Save the current buffers, gradients and attributes of the modules of `tree`."""
        self.shared = SharedState(tree)
        self.plain = plain_tensors(tree, self.shared)
        self._tree = tree
        self._modules = [ModuleState(entry.module) for entry in tree.modules]
        self._gradients = [(entry.tensor, entry.tensor.grad) for entry in tree.parameters]
        self._data = [(entry.tensor, entry.tensor.data) for entry in tree.parameters]

    @contextlib.contextmanager
    def during(self) -> Iterator[Writes]:
        """Restore everything on exit, including random number generators and settings of PyTorch.

        Writes to parameters and gradients must be reported to the object that the context yields.
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
            # A weight cast under no_grad would stay in the autocast cache, and have no gradient in the real forward.
            torch.set_autocast_cache_enabled(False)
            stack.callback(torch.set_autocast_cache_enabled, cache_enabled)
            # The fused encoder layer reads its children's weights, which happens only in an evaluation on one rank.
            torch.backends.mha.set_fastpath_enabled(False)
            stack.callback(torch.backends.mha.set_fastpath_enabled, fast_path)
            stack.callback(self._put_back, writes)
            copies = [entry.tensor.clone() for entry in tree.buffers]
            for entry in tree.modules:
                for name, index in entry.buffers.items():
                    entry.module._buffers[name] = copies[index]
            yield writes

    def _put_back(self, writes: Writes) -> None:
        for module in self._modules:
            module.restore()
        self.shared.restore()
        for parameter, original in self._data:
            parameter.data = original  # `Module.to` in a forward replaces the data, which no operation reports
        for parameter, gradient in self._gradients:
            if parameter.grad is not gradient:
                parameter.grad = gradient
        for plain in self.plain:
            plain.restore()
        writes.restore()


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Disable the collection of cyclic garbage within the block.

    An observed forward creates many objects that live until its end. They would trigger a collection of everything that
    the imports created, which takes longer than the forward of a small model and would be part of the measured times.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextlib.contextmanager
def preserved_random_numbers(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Restore the random number generators of PyTorch (CPU and these tensors' devices), Python and NumPy on exit."""
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
    """Saves the values of parameters and gradients that a forward is about to overwrite."""

    def __init__(self, tree: ModelTree) -> None:
        """Watch the storages of the parameters, their gradients, and the original buffers."""
        self._watched: dict[int, list[torch.Tensor]] = {}
        self._saved: dict[int, tuple[torch.Tensor, torch.Tensor, Any]] = {}
        for entry in (*tree.parameters, *tree.buffers):
            for tensor in (entry.tensor, entry.tensor.grad if entry.tensor.is_leaf else None):
                if tensor is not None:
                    self.watch(tensor)

    def watch(self, tensor: torch.Tensor) -> None:
        """Also save the values of this tensor if they are about to be overwritten."""
        if tensor.layout is torch.strided:
            self._watched.setdefault(_storage_key(tensor), []).append(tensor)

    def before_write(self, tensor: torch.Tensor) -> None:
        """Save the watched tensors that share memory with `tensor`."""
        if tensor.layout is not torch.strided:
            return
        for watched in self._watched.get(_storage_key(tensor), ()):
            self.keep(watched)

    def keep(self, tensor: torch.Tensor) -> None:
        """Save the values of `tensor`, unless they are saved already."""
        if id(tensor) not in self._saved:
            keep_version = torch.autograd._unsafe_preserve_version_counter(tensor)  # type: ignore[attr-defined]
            self._saved[id(tensor)] = (tensor, tensor.detach().clone(), keep_version)

    def written(self) -> list[torch.Tensor]:
        """Return the tensors that were written to so far."""
        return [tensor for tensor, _, _ in self._saved.values()]

    def restore(self) -> None:
        """Restore the saved values, without changing the version."""
        with torch.no_grad():
            for tensor, values, keep_version in self._saved.values():
                with keep_version:
                    tensor.copy_(values)


def _storage_key(tensor: torch.Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key


class ModuleState:
    """The attributes of one module and their contents, one level deep."""

    def __init__(self, module: nn.Module, left_out: frozenset[str] = frozenset()) -> None:
        """Save the attributes, except those in `left_out`."""
        self._module, self._held = module, vars(module)
        self._left_out = left_out
        self._attributes = {name: value for name, value in self._held.items() if name not in left_out}
        self._in_slots = attributes_of(module) if slots_of(type(module)) else {}
        self._cells = containers_in([*self._attributes.values(), *self._in_slots.values()])

    def restore(self) -> None:
        """Restore the attributes."""
        others = {name: value for name, value in self._held.items() if name in self._left_out}
        restore_dict(self._held, others | self._attributes)
        restore_slots(self._module, self._in_slots)
        restore_cells(self._cells, [self._held])


@contextlib.contextmanager
def moved_to(tree: ModelTree, device: torch.device) -> Iterator[None]:
    """Move the parameters and buffers to `device` within the block, and restore the original storages afterwards.

    Use it inside `Preserved.during`, whose copies of the buffers it moves.
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
    """Copy the tensors in arguments, so that a forward that writes to its inputs does not change the caller's.

    Tensors in lists, tuples, dicts and registered types are found; each distinct one is copied once, to `device` or
    where it is. Those for which `keep` returns True, by default parameters, are passed on uncopied.
    """
    copies: dict[int, torch.Tensor] = {}

    def copied(item: object) -> object:
        if not isinstance(item, torch.Tensor) or keep(item):
            return item
        if id(item) not in copies:
            copy = item.detach().clone() if device is None else item.detach().to(device, copy=True)
            copy.requires_grad_(item.requires_grad)
            if item.requires_grad and not item.is_leaf:  # non-leaf tensors may be written to in place
                with torch.enable_grad():
                    copy = copy.clone()
            copies[id(item)] = copy
        return copies[id(item)]

    copied_args, copied_kwargs = tree_map(copied, (tuple(args), dict(kwargs)))
    return copied_args, copied_kwargs
