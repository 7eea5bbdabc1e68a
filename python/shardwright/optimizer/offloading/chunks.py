"""Divides what an optimizer updates into chunks, of whose state a bounded number of bytes is in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

#: The most bytes of state of a chunk. Two are in memory at once, that which is updated and the next; on a device also
#: that which was updated before.
CHUNK_BYTES = 64 << 20
#: Parameters are cut at multiples of so many elements, so that vectorised loops treat each element as in the whole.
CUT_ELEMENTS = 1 << 15


class Part(NamedTuple):
    """A parameter that is updated, or elements of it.

    Attributes:
        group: The number of its group.
        parameter: The parameter.
        begin: The first element.
        end: The one behind the last; None if it is the whole parameter.
    """

    group: int
    parameter: torch.Tensor
    begin: int = 0
    end: int | None = None

    @property
    def is_last(self) -> bool:
        """Whether nothing of the parameter comes after it."""
        return self.end is None or self.end == self.parameter.numel()


def most_resident_bytes(*, on_device: bool = False) -> int:
    """Return how many bytes of state are at hand during a step at most, where parameters can be cut.

    Args:
        on_device: Whether they pass through a device.
    """
    return (3 if on_device else 2) * CHUNK_BYTES


def elements(tensor: torch.Tensor, part: Part) -> torch.Tensor:
    """Return a view of the elements that a part is of a contiguous tensor.

    Args:
        tensor: The tensor, of the shape of the part's parameter.
        part: The part.
    """
    return tensor.detach().view(-1)[part.begin : part.end]


def chunks_of(
    param_groups: Sequence[dict[str, Any]],
    nbytes: Callable[[Mapping[str, Any], torch.Tensor], int],
    may_be_cut: Callable[[torch.Tensor], bool],
) -> Iterator[list[Part]]:
    """Yield the parts of each chunk, in the order of the groups.

    Args:
        param_groups: The groups, with the parameters that may be updated.
        nbytes: Returns the bytes of the state that a parameter of a group has, or will have.
        may_be_cut: Returns whether elements of a parameter can be updated by themselves.
    """
    chunk: list[Part] = []
    filled = 0
    for number, group in enumerate(param_groups):
        for parameter in group["params"]:
            size = nbytes(group, parameter)
            if size > CHUNK_BYTES and may_be_cut(parameter):
                if chunk:
                    yield chunk
                    chunk, filled = [], 0
                yield from ([part] for part in _cut(number, parameter, size))
                continue
            if chunk and filled + size > CHUNK_BYTES:
                yield chunk
                chunk, filled = [], 0
            chunk.append(Part(number, parameter))
            filled += size
    if chunk:
        yield chunk


def _cut(group: int, parameter: torch.Tensor, nbytes: int) -> Iterator[Part]:
    total = parameter.numel()
    fitting = CHUNK_BYTES * total // nbytes
    length = max(fitting // CUT_ELEMENTS, 1) * CUT_ELEMENTS
    if length >= total:
        yield Part(group, parameter)
        return
    for begin in range(0, total, length):
        yield Part(group, parameter, begin, min(begin + length, total))
