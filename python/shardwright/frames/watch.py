"""Watching tensors that must not be written to in place any more."""

from __future__ import annotations

import torch

from shardwright.errors import FrameError

_empty: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}


class Watched:
    """A tensor that must not be written to, because the write could not reach everywhere where it should.

    It keeps the tensor's version counter, which all its views and aliases share and which outlives it, but neither the
    tensor nor its memory.
    """

    __slots__ = ("_counter", "_version", "why")

    def __init__(self, tensor: torch.Tensor, why: str) -> None:
        """Watch a tensor from now on; ``why`` begins the error: what was done with it."""
        key = (tensor.dtype, tensor.device)
        empty = _empty.get(key)
        if empty is None:
            with torch.inference_mode(False):
                empty = _empty[key] = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        self._counter = tensor.detach()
        self._counter.data = empty
        self._version = tensor._version
        self.why = why

    def check(self, microbatch: int) -> None:
        """Raise :class:`FrameError` if the tensor was written to."""
        if self._counter._version != self._version:
            raise FrameError(
                f"{self.why}, and it was written to in place later (microbatch {microbatch}): across ranks that write "
                "cannot be seen everywhere where it should be; write to a clone(), or have the module use a clone()"
            )
