"""The file in which the state of a rank's optimizers is, mapped into memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.dlpack import from_dlpack
from torch.utils.weak import WeakIdKeyDictionary

from shardwright import _core
from shardwright.errors import ConfigError
from shardwright.offloading import find_offload_directory
from shardwright.offloading.tensors import is_dense, may_be_offloaded

if TYPE_CHECKING:
    from shardwright.job.runtime import Runtime


class Pages(NamedTuple):
    """A part of what a tensor has in the file.

    Attributes:
        memory: All of it.
        offset: Where the part begins, in bytes.
        nbytes: How large it is.
    """

    memory: _core.MappedMemory
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
    """Keeps tensors in a file. Where a tensor's pages are not in memory, a look at it brings them back."""

    def __init__(self, runtime: Runtime) -> None:
        """Make the file.

        Raises:
            OffloadError: There is no directory for it.
        """
        directory = find_offload_directory(runtime.place.cfg)
        self._file = _core.MappedFile(rank=runtime.place.rank, directory=directory)
        # The memory of a tensor stays mapped as long as it stands here, whatever the script does with the tensor.
        self._memories: Any = WeakIdKeyDictionary()
        if self._file.stays_in_memory():
            runtime.logger.warning(
                "rank %d offloads the optimizer's state to %s, which is in memory too and saves nothing: set it to a "
                'directory on a disk for "offload_directory"',
                runtime.place.rank,
                directory,
            )

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor with the same values in the file; the same if it is there, or is better left where it is.

        Args:
            tensor: The tensor. One below 4 KiB, or that is not dense, is left.

        Raises:
            OffloadError: The disk is full.
        """
        if tensor in self._memories or tensor.device.type != "cpu" or not may_be_offloaded(tensor):
            return tensor
        kept = self.empty_like(tensor)
        kept.copy_(tensor)
        self.release(kept)
        return kept

    def release(self, tensor: torch.Tensor) -> None:
        """Take a tensor out of memory, if it is in the file.

        Args:
            tensor: The tensor.
        """
        if tensor in self._memories:
            self.pages_of(tensor).release()

    def keep_data(self, parameter: torch.Tensor) -> None:
        """Move the values of a parameter into the file.

        Args:
            parameter: The parameter.

        Raises:
            OffloadError: The disk is full.
        """
        kept = self.keep(parameter.detach())
        if kept in self._memories:
            parameter.data = kept
            self._memories[parameter] = self._memories[kept]

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor in the file with any values, with the shape and dtype of another one.

        Args:
            tensor: The other, on the CPU.

        Raises:
            OffloadError: The disk is full.
        """
        memory = self._file.map(tensor.numel() * tensor.element_size())
        strides = tensor.stride() if is_dense(tensor) else torch.empty_like(tensor, device="meta").stride()
        # Not a view of the bytes, which PyTorch would save along with it.
        made = torch.empty(0, dtype=tensor.dtype)
        made.set_(from_dlpack(memory.bytes()).untyped_storage(), 0, tensor.size(), strides)
        self._memories[made] = memory
        return made

    def pages_of(self, tensor: torch.Tensor, begin: int = 0, end: int | None = None) -> Pages:
        """Return what a tensor that is in the file has there.

        Args:
            tensor: The tensor.
            begin: The first element, in the order of memory.
            end: The one behind the last; None for all.
        """
        each = tensor.element_size()
        stop = tensor.numel() if end is None else end
        return Pages(self._memories[tensor], begin * each, (stop - begin) * each)

    def __contains__(self, tensor: object) -> bool:
        """Whether a tensor is in the file."""
        return isinstance(tensor, torch.Tensor) and tensor in self._memories

    def bytes_of(self, tensors: Iterable[torch.Tensor]) -> int:
        """Return how many bytes of tensors are in the file.

        Args:
            tensors: The tensors, each counted once.
        """
        found = {id(tensor): tensor for tensor in tensors if tensor in self._memories}
        return sum(tensor.numel() * tensor.element_size() for tensor in found.values())


def check_device(runtime: Runtime) -> None:
    """Say what ``offload_optimizer`` cannot do on this rank's device.

    Args:
        runtime: The rank.

    Raises:
        ConfigError: It is a CUDA device.
    """
    where, place = runtime.place.cfg.offload_optimizer, runtime.place
    if not where:
        return
    if place.device.type != "cpu":
        raise ConfigError(
            f'the configuration key "offload_optimizer" is {where!r}, and rank {place.rank} computes on '
            f"{place.device}: optimizer state of CUDA ranks cannot be offloaded yet; allowed there: False"
        )
    if where is True:
        runtime.logger.warning(
            "rank %d computes in host memory and offloads the optimizer's state to the same memory, which saves "
            'nothing: set "offload_optimizer" to "disk"',
            place.rank,
        )
