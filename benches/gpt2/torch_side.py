"""``torch.distributed.pipelining``, with the model split by hand and the tied embedding's gradient summed by hand."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from transformers import GPT2LMHeadModel

from benches.gpt2.model import MICROBATCHES, NUM_BLOCKS, loss_of_logits, make_batch, make_model, make_optimizer

_CLASSES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
}
_SINGLE = ("gpipe", "1f1b")


class Part(nn.Module):
    """Some blocks, with the embeddings before the first one and the head after the last one."""

    def __init__(self, model: GPT2LMHeadModel, begin: int, end: int) -> None:
        """Take the blocks from ``begin`` to before ``end``."""
        super().__init__()
        body = model.transformer
        first, last = begin == 0, end == NUM_BLOCKS
        self.wte = body.wte if first else None
        self.wpe = body.wpe if first else None
        self.blocks = nn.ModuleList(body.h[begin:end])
        self.ln_f = body.ln_f if last else None
        self.head = model.lm_head if last else None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.wte is not None and self.wpe is not None:
            inputs = self.wte(inputs) + self.wpe(torch.arange(inputs.shape[-1])[None])
        for block in self.blocks:
            inputs = block(inputs)
        if self.ln_f is not None and self.head is not None:
            inputs = self.head(self.ln_f(inputs))
        return inputs


class TorchPipelining:
    """A schedule and a split; see :class:`benches.gpt2.rank.Configuration`."""

    idle = False

    def __init__(self, schedule: str, split: str) -> None:
        """Such as ``1f1b`` and ``5-3``: the numbers of blocks of the stages, which go round the ranks."""
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        self._rank, num_ranks = dist.get_rank(), dist.get_world_size()
        sizes = [int(size) for size in split.split("-")]
        if sum(sizes) != NUM_BLOCKS or len(sizes) % num_ranks:
            raise ValueError(f"{split!r} is no split of {NUM_BLOCKS} blocks over {num_ranks} ranks")
        bounds = [sum(sizes[:index]) for index in range(len(sizes) + 1)]
        model = make_model()
        mine = range(self._rank, len(sizes), num_ranks)
        parts = [Part(model, bounds[index], bounds[index + 1]) for index in mine]
        stages = [
            PipelineStage(part, index, len(sizes), torch.device("cpu")) for index, part in zip(mine, parts, strict=True)
        ]
        self._schedule = _CLASSES[schedule](
            stages[0] if schedule in _SINGLE else stages, n_microbatches=MICROBATCHES, loss_fn=loss_of_logits
        )
        self._optimizer = make_optimizer(parameter for part in parts for parameter in part.parameters())
        #: The first rank's embedding and the last one's head are the same parameter.
        self._tied = model.transformer.wte.weight
        self._ids = make_batch()

    def step(self) -> float | None:
        self._optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        if self._rank == 0:
            self._schedule.step(self._ids, return_outputs=False)
        else:
            self._schedule.step(target=self._ids, losses=losses, return_outputs=False)
        dist.all_reduce(self._tied.grad)
        self._optimizer.step()
        return float(torch.stack(losses).mean()) if losses else None

    def barrier(self) -> None:
        dist.barrier()

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
