"""Without a pipeline: one process, two processes with half a batch each, and DDP."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benches.gpt2.model import MICROBATCHES, make_batch, make_model, make_optimizer


class Plain:
    """Accumulates gradients over microbatches; see :class:`benches.gpt2.rank.Configuration`."""

    def __init__(self, name: str) -> None:
        """One of ``single``, ``halves`` and ``ddp``."""
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        rank, parts = dist.get_rank(), 1 if name == "single" else 2
        self.idle = name == "single" and rank == 1
        if self.idle:
            return
        self._model: Any = make_model()
        if name == "ddp":
            self._model = DistributedDataParallel(self._model)
        self._optimizer = make_optimizer(self._model.parameters())
        half = make_batch().chunk(parts)[rank % parts]
        self._microbatches = half.chunk(MICROBATCHES // parts)
        self._together = name == "ddp"

    def step(self) -> float | None:
        if self.idle:
            return None
        self._optimizer.zero_grad()
        losses = []
        for number, ids in enumerate(self._microbatches, 1):
            last = number == len(self._microbatches)
            with contextlib.nullcontext() if last or not self._together else self._model.no_sync():
                loss = self._model(input_ids=ids, labels=ids).loss
                (loss / len(self._microbatches)).backward()
            losses.append(loss.detach())
        self._optimizer.step()
        return float(torch.stack(losses).mean())

    def barrier(self) -> None:
        dist.barrier()

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
