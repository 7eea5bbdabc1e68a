"""Where the state of a rank's optimizers is: in a file that is mapped into memory, or in locked host memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch.utils.dlpack import from_dlpack
from torch.utils.weak import WeakIdKeyDictionary

from shardwright import _core
from shardwright.offloading import find_offload_directory
from shardwright.offloading.locked import LockedMemory
from shardwright.offloading.streams import CopyStreams, CudaStreams
from shardwright.offloading.tensors import MIN_BYTES, is_dense, may_be_offloaded

if TYPE_CHECKING:
    from shardwright.job.runtime import Runtime


class Memory(Protocol):
    """Memory of a tensor that may be out of the process in between."""

    def load(self, offset: int, nbytes: int, /) -> None:
        """Bring bytes to memory, to be written."""
        ...

    def release(self, offset: int, nbytes: int, /) -> None:
        """Take bytes out of memory; they stay where they are kept."""
        ...


class _Locked:
    """Memory that stays."""

    def load(self, offset: int, nbytes: int, /) -> None:
        """Do nothing."""

    def release(self, offset: int, nbytes: int, /) -> None:
        """Do nothing."""


class Pages(NamedTuple):
    """A part of what a tensor has in the storage.

    Attributes:
        memory: All of it.
        offset: Where the part begins, in bytes.
        nbytes: How large it is.
    """

    memory: Memory
    offset: int
    nbytes: int

    def load(self) -> None:
        """Bring it to memory.

        Raises:
            OffloadError: It cannot be read.
        """
        self.memory.load(self.offset, self.nbytes)

    def release(self) -> None:
        """Take it out of memory; it stays in the file."""
        self.memory.release(self.offset, self.nbytes)


class StateStorage:
    """Keeps tensors in a file or in locked host memory.

    Where a tensor's pages in the file are not in memory, a look at it brings them back.
    """

    def __init__(self, runtime: Runtime) -> None:
        """Make the file, if the state goes to a disk.

        Raises:
            OffloadError: There is no directory for it.
        """
        self.streams: CopyStreams = CudaStreams()
        self._locked = LockedMemory(self.streams.locked)
        #: Those of the last step on a device.
        self.slots: Any = None
        self._file: _core.MappedFile | None = None
        # The memory of a tensor stays mapped as long as it stands here, whatever the script does with the tensor.
        self._memories: Any = WeakIdKeyDictionary()
        #: The values of parameters of a device that have no memory there.
        self._values: Any = WeakIdKeyDictionary()
        if runtime.place.cfg.offload_optimizer == "disk":
            directory = find_offload_directory(runtime.place.cfg)
            self._file = _core.MappedFile(rank=runtime.place.rank, directory=directory)
            if self._file.stays_in_memory():
                runtime.logger.warning(
                    "rank %d offloads the optimizer's state to %s, which is in memory too and saves nothing: set it to "
                    'a directory on a disk for "offload_directory"',
                    runtime.place.rank,
                    directory,
                )

    @property
    def is_locked(self) -> bool:
        """Whether it is locked host memory, which devices read and write themselves."""
        return self._file is None

    @property
    def locked_bytes(self) -> int:
        """The bytes of locked host memory."""
        return self._locked.nbytes

    def is_of_device(self, tensor: torch.Tensor) -> bool:
        """Return whether what is kept of a tensor is in host memory, and the tensor on a device."""
        return self.streams.serves(tensor.device)

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor with the same values in the storage; the same if it is there, or is better left.

        Args:
            tensor: The tensor. One below 4 KiB, or that is not dense, is left.

        Raises:
            OffloadError: The disk is full.
        """
        if tensor in self._memories or not self.takes(tensor):
            return tensor
        kept = self.empty_like(tensor)
        kept.copy_(tensor)
        self.release(kept)
        return kept

    def takes(self, tensor: torch.Tensor) -> bool:
        """Return whether :meth:`keep` moves a tensor."""
        return may_be_offloaded(tensor) and (tensor.device.type == "cpu" or self.is_of_device(tensor))

    def takes_new(self, like: torch.Tensor) -> bool:
        """Return whether state belongs here that has the size of a tensor, which may have no values."""
        return like.numel() * like.element_size() >= MIN_BYTES

    def release(self, tensor: torch.Tensor) -> None:
        """Take a tensor out of memory, if it is in the file.

        Args:
            tensor: The tensor.
        """
        if tensor in self._memories:
            self.pages_of(tensor).release()

    def keep_data(self, parameter: torch.Tensor) -> None:
        """Move the values of a parameter into the storage. On a device, its elements have no memory any more.

        Args:
            parameter: The parameter.

        Raises:
            OffloadError: The disk is full.
        """
        kept = self.keep(parameter.detach())
        if kept not in self._memories:
            return
        self._memories[parameter] = self._memories[kept]
        if self.is_of_device(parameter):
            self._values[parameter] = kept
            parameter.data = torch.zeros((), dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)
        else:
            parameter.data = kept

    def values_of(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the values of a parameter, in host memory if :meth:`keep_data` moved them there from a device.

        Args:
            parameter: The parameter; itself if it has its values.
        """
        found: torch.Tensor = self._values.get(parameter, parameter.detach())
        return found

    def has_values_of(self, parameter: torch.Tensor) -> bool:
        """Return whether the values of a parameter are in the storage and not where the parameter is."""
        return parameter in self._values

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor in the storage with any values, with the shape and dtype of another one.

        Args:
            tensor: The other.

        Raises:
            OffloadError: The disk is full.
        """
        nbytes = tensor.numel() * tensor.element_size()
        strides = tensor.stride() if is_dense(tensor) else torch.empty_like(tensor, device="meta").stride()
        memory: Memory
        if self._file is None:
            memory, data = _Locked(), self._locked.map(nbytes)
        else:
            memory = mapped = self._file.map(nbytes)
            data = from_dlpack(mapped.bytes())
        # Not a view of the bytes, which PyTorch would save along with it.
        made = torch.empty(0, dtype=tensor.dtype)
        made.set_(data.untyped_storage(), 0, tensor.size(), strides)
        self._memories[made] = memory
        return made

    def pages_of(self, tensor: torch.Tensor, begin: int = 0, end: int | None = None) -> Pages:
        """Return what a tensor that is in the storage has there.

        Args:
            tensor: The tensor.
            begin: The first element, in the order of memory.
            end: The one behind the last; None for all.
        """
        each = tensor.element_size()
        stop = tensor.numel() if end is None else end
        return Pages(self._memories[tensor], begin * each, (stop - begin) * each)

    def __contains__(self, tensor: object) -> bool:
        """Whether a tensor is in the storage."""
        return isinstance(tensor, torch.Tensor) and tensor in self._memories

    def bytes_of(self, tensors: Iterable[torch.Tensor]) -> int:
        """Return how many bytes of tensors are in the storage.

        Args:
            tensors: The tensors, each counted once.
        """
        found = {id(tensor): tensor for tensor in tensors if tensor in self._memories}
        return sum(tensor.numel() * tensor.element_size() for tensor in found.values())


def storage_for(runtime: Runtime) -> StateStorage | None:
    """Return where the state of a rank's optimizers goes; None if it stays where it is.

    Args:
        runtime: The rank.

    Raises:
        OffloadError: There is no directory for the file.
    """
    where, place = runtime.place.cfg.offload_optimizer, runtime.place
    if not where:
        return None
    if where == "disk" or CudaStreams().serves(place.device):
        return StateStorage(runtime)
    runtime.logger.warning(
        "rank %d computes in host memory and offloads the optimizer's state to the same memory, which saves "
        'nothing: set "offload_optimizer" to "disk"',
        place.rank,
    )
    return None
