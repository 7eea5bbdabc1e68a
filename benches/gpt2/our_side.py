"""The library: the same training script for every schedule and partition."""

from __future__ import annotations

from typing import Any

import shardwright as smp
import torch
from torch import nn

from benches.gpt2.model import MICROBATCHES, make_batch, make_model, make_optimizer


def place(model: nn.Module, digits: str) -> None:
    """Place a model by hand.

    Args:
        model: The model.
        digits: By block its rank, and last that of the embeddings and the head; ``a`` is a block of rank 0 whose MLP is
            on rank 1, ``b`` the other way round.
    """
    body = model.transformer
    *blocks, ends = digits
    for module in (body, body.wte, body.wpe, body.ln_f, model.lm_head):
        smp.set_partition(module, int(ends))
    for block, digit in zip(body.h, blocks, strict=True):
        rank = "ab".index(digit) if digit in "ab" else int(digit)
        smp.set_partition(block, rank)
        if digit in "ab":
            smp.set_partition(block.mlp, 1 - rank)


class Shardwright:
    """A schedule and a partition; see :class:`benches.gpt2.rank.Configuration`."""

    idle = False

    def __init__(self, schedule: str, partition: str, active: str | None = None, mode: str = "dynamic") -> None:
        """Such as ``interleaved`` and ``auto``.

        Args:
            schedule: The value of ``pipeline``.
            partition: ``auto``, or digits as :func:`place` takes them.
            active: The value of ``active_microbatches``, its default otherwise.
            mode: ``dynamic``, or ``static`` for static and fast mode.
        """
        keys: dict[str, Any] = {} if active is None else {"active_microbatches": int(active)}
        if mode == "static":
            keys |= {"static_mode": True, "fast_mode": True, "static_steps": 1}
        smp.init(pipeline_parallel_degree=2, microbatches=MICROBATCHES, pipeline=schedule, **keys)
        network = make_model()
        if partition != "auto":
            place(network, partition)
        self._model: Any = smp.DistributedModel(network)
        self._optimizer = smp.DistributedOptimizer(make_optimizer(self._model.parameters()))
        self._ids = make_batch()

        @smp.step
        def step(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
            loss = model(input_ids=ids, labels=ids).loss
            model.backward(loss)
            return loss

        self._step: Any = step

    def step(self) -> float | None:
        self._optimizer.zero_grad()
        loss = self._step(self._model, self._ids)
        self._optimizer.step()
        return float(loss.reduce_mean())

    def barrier(self) -> None:
        smp.barrier()

    def close(self) -> None:
        smp.shutdown()
