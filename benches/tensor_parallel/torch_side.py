"""What the sides in plain ``torch.distributed`` have in common."""

from __future__ import annotations

import torch
import torch.distributed as dist

from benches.tensor_parallel.model import Model


class TorchSide:
    """See :class:`benches.tensor_parallel.rank.Side`; subclasses divide the model."""

    model: Model

    def step(self, microbatches: tuple[torch.Tensor, ...]) -> float:
        """Add up the mean gradient over microbatches; the mean loss."""
        losses = []
        for ids in microbatches:
            loss = self.model(ids)
            (loss / len(microbatches)).backward()
            losses.append(loss.detach())
        return float(torch.stack(losses).mean())

    def barrier(self) -> None:
        """Wait for the other rank."""
        dist.barrier()

    def close(self) -> None:
        """Leave."""
        dist.destroy_process_group()
