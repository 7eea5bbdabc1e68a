"""One model's share in data parallelism: equal weights at the start, averaged gradients after each step."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from shardwright.data_parallel.collectives import Collectives
from shardwright.data_parallel.reducer import Reducer

if TYPE_CHECKING:
    from shardwright.data_parallel.uneven import Attendance
    from shardwright.model.placement import Placement


class Replicas:
    """Keeps this rank's part of a model equal to that of the other data-parallel ranks."""

    def __init__(self, placement: Placement, options: dict[str, Any]) -> None:
        """Nothing is exchanged before :meth:`join_group`."""
        self._placement = placement
        self._options = options
        self._reducer: Reducer | None = None
        self._comm_hook: tuple[Any, Callable[..., Any]] | None = None
        self._passes = 0
        self._average: bool = options["average_grads_across_microbatches"]
        #: Who still has batches, inside ``model.join()``.
        self.attendance: Attendance | None = None
        #: Whether means are over the whole group, also when some of its ranks have no batches left.
        self.divides_by_group = True

    def join_group(self) -> None:
        """Take the first data-parallel rank's parameters and buffers over; gradients are reduced from now on."""
        runtime = self._placement.runtime
        if len(runtime.dp_ranks) == 1:
            return
        parameters = [parameter.data for parameter in self._placement.owned_parameters()]
        self._broadcast([*parameters, *self._buffers()])
        self._reducer = Reducer(
            self._collectives,
            f"model {self._placement.model_id}",
            int(float(self._options["bucket_cap_mb"]) * 2**20),
            bool(self._options["overlapping_allreduce"]),
        )
        if self._comm_hook is not None:
            self._reducer.register_comm_hook(*self._comm_hook)
        self._reducer.begin_step(self._placement.owned_parameters(), False)

    @property
    def _collectives(self) -> Collectives:
        collectives = self._placement.runtime.collectives
        assert collectives is not None, "there is a data-parallel group"
        return collectives

    def _buffers(self) -> list[torch.Tensor]:
        found = (module._buffers[name] for module, name in self._placement.owned_buffers())
        return [buffer for buffer in found if buffer is not None]

    def _broadcast(self, tensors: list[torch.Tensor], source: int | None = None) -> None:
        """Send tensors from one rank (the group's first by default), those of one dtype together."""
        runtime = self._placement.runtime
        source = runtime.dp_ranks[0] if source is None else source
        kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for tensor in tensors:
            kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        with torch.no_grad():
            for together in kinds.values():
                flat = torch.cat([tensor.reshape(-1) for tensor in together])
                self._collectives.broadcast(flat, source)
                for tensor, part in zip(together, torch.split(flat, [t.numel() for t in together]), strict=True):
                    tensor.copy_(part.view(tensor.shape))

    @property
    def averages_microbatches(self) -> bool:
        """Whether the library averages gradients over microbatches; a communication hook does it itself."""
        return self._average and self._comm_hook is None

    def register_comm_hook(self, state: Any, hook: Callable[..., Any]) -> None:
        """Let a hook reduce gradients over data-parallel ranks."""
        self._comm_hook = (state, hook)
        if self._reducer is not None:
            self._reducer.register_comm_hook(state, hook)

    @property
    def _reduces_this_step(self) -> bool:
        return (self._passes + 1) % int(self._options["backward_passes_per_step"]) == 0

    def begin_step(self, may_overlap: bool) -> bool:
        """Prepare for a step's gradients.

        Args:
            may_overlap: Whether they may be reduced while backward runs: they become the parameters' gradients as they
                are, and no other model's are reduced then. The order of collectives is the same on all ranks.

        Returns:
            Whether they may be, still.
        """
        if self._reducer is None:
            return False
        if self.attendance is not None:
            self.attendance.attend()
        if torch.is_grad_enabled():
            self._share_buffers()
        may_overlap = may_overlap and self._reduces_this_step
        return self._reducer.begin_step(self._placement.owned_parameters(), may_overlap)

    def _share_buffers(self) -> None:
        if self._options["broadcast_buffers"]:
            source = None if self.attendance is None else self.attendance.present[0]
            self._broadcast(self._buffers(), source)

    def abandon_step(self) -> None:
        """Forget a failed step's gradients."""
        if self._reducer is not None:
            self._reducer.abandon_step()

    def reduce_gradients(self) -> None:
        """Average gradients over data-parallel ranks, at every ``backward_passes_per_step``-th training step."""
        if self._reducer is None:
            return
        if not torch.is_grad_enabled():
            self.agree()
            return
        if self._reduces_this_step:
            runtime = self._placement.runtime
            present = runtime.dp_ranks if self.attendance is None or self.divides_by_group else self.attendance.present
            self._reducer.reduce(
                len(present),
                runtime.num_microbatches if self.averages_microbatches else 1,
                bool(self._options["gradient_as_bucket_view"]),
            )
        else:
            self.agree()
        self._passes += 1  # a step that failed on any rank counts on none

    def agree(self) -> None:
        """Wait until the step has succeeded in every replica, where no gradients are reduced that would tell."""
        self._collectives.maximum(torch.zeros(1, dtype=torch.uint8, device=self._placement.runtime.device))

    def shadow_step(self) -> None:
        """Take part in the collectives of a training step that other ranks run; contributes zeros."""
        parameters = self._placement.owned_parameters()
        kept = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        assert self._reducer is not None, "only data-parallel ranks wait for each other"
        self._share_buffers()
        self._reducer.begin_step(parameters, False)
        self.reduce_gradients()
        for parameter, gradient in zip(parameters, kept, strict=True):
            parameter.grad = gradient

    def take_over_from(self, rank: int) -> None:
        """Take parameters and buffers over from a rank that trained longest."""
        parameters = [parameter.data for parameter in self._placement.owned_parameters()]
        self._broadcast([*parameters, *self._buffers()], rank)
