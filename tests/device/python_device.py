"""A device in Python: tensors that are not the CPU's, on an accelerator that every machine has.

Its memory is the host's and its kernels are the CPU's, but to torch it is an accelerator: tensors have a device with an
index, the autograd engine has a thread for it, a tensor on it cannot be mixed with one of the CPU. What this library
does in Python for a device is rehearsed on it; streams, pinned memory and speed are not.

Torch has one such device per process (``PrivateUse1``), and asks for its number once, at the first backward. So
:func:`install` belongs at the start of a process of its own (`tests/device/on_python_device.py`).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils import backend_registration
from torch.utils._pytree import tree_map

NAME = "rehearsal"
_CPU = torch._C.DispatchKey.CPU
_aten = torch.ops.aten


class _Module(backend_registration._DummyBackendModule):
    """What torch asks of the module ``torch.rehearsal``. Random numbers are the CPU's."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float32, torch.bfloat16, torch.float16]

    def get_rng_state(self, device: object = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: object = None) -> None:
        """The CPU's is put back by who asks for this one."""


@functools.cache
def install() -> torch.device:
    """Register the device, and return it."""
    backend_registration._setup_privateuseone_for_python_backend(NAME, _Module())
    library = torch.library.Library("_", "IMPL")
    library.fallback(_run_on_host, "PrivateUse1")
    install.library = library  # type: ignore[attr-defined]  # kernels live as long as it
    return torch.device(NAME, 0)


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor of the CPU."""
    host = tensor.untyped_storage()._host  # type: ignore[attr-defined]
    return torch.empty(0, dtype=tensor.dtype).set_(host, tensor.storage_offset(), tensor.shape, tensor.stride())


def _storage_over(host: torch.UntypedStorage) -> torch.UntypedStorage:
    storage: Any = torch._C._construct_storage_from_data_pointer(host.data_ptr(), torch.device(NAME, 0), host.nbytes())
    storage._host = host  # torch keeps the Python object as long as the storage
    return storage


def _lay(tensor: torch.Tensor, storage: torch.UntypedStorage, host: torch.Tensor) -> None:
    place = host.storage_offset(), host.shape, host.stride()
    _aten.set_.source_Storage_storage_offset._op_dk(_CPU, tensor, storage, *place)


def _over(storage: torch.UntypedStorage, host: torch.Tensor) -> torch.Tensor:
    """A tensor of the device in a storage, laid out as a tensor of the CPU in the same memory."""
    tensor: torch.Tensor = torch._C._acc.create_empty_tensor([0], host.dtype)
    _lay(tensor, storage, host)
    return tensor


def _run_on_host(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operation of the device by the CPU's kernel, in the same memory."""
    given: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    storages: dict[int, torch.UntypedStorage] = {}

    def down(value: Any) -> Any:
        if isinstance(value, torch.device):
            return torch.device("cpu")
        if not isinstance(value, torch.Tensor) or value.device.type != NAME:
            return value
        if id(value) not in given:
            given[id(value)] = value, _on_host(value)
            storage: Any = value.untyped_storage()
            storages[storage._host._cdata] = storage
        return given[id(value)][1]

    def up(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        for tensor, host in given.values():
            if host is value:
                return tensor
        memory = value.untyped_storage()
        return _over(storages.get(memory._cdata) or _storage_over(memory), value)

    if op is _aten._copy_from.default:
        source, target = args[:2]
        down(target).copy_(down(source))
        return target
    kwargs.pop("pin_memory", None)
    result = op(*tree_map(down, args), **tree_map(down, kwargs))
    for tensor, host in given.values():  # an output may have been resized
        memory, storage = host.untyped_storage(), tensor.untyped_storage()
        if memory.nbytes() > storage.nbytes():
            storage = _storage_over(memory)
        elif host.shape == tensor.shape and host.stride() == tensor.stride():
            continue
        _lay(tensor, storage, host)
    return tree_map(up, result)
