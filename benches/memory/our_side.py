"""The library: one training script; a row is what it is configured with."""

from __future__ import annotations

from typing import Any

import shardwright as smp
import torch
from shardwright.job.runtime import find_runtime
from shardwright.offloading.activations import OffloadedActivations
from torch import nn

from benches.gpt2.model import make_optimizer
from benches.gpt2.our_side import place
from benches.memory.model import DEFAULT_SIZE, Size, make_batch, make_model


class Shardwright:
    """One row of the library."""

    def __init__(
        self,
        *,
        checkpointing: bool = False,
        placed: str | None = None,
        size: Size = DEFAULT_SIZE,
        **keys: Any,
    ) -> None:
        """Build it.

        Args:
            checkpointing: Whether each block is checkpointed.
            placed: By block its rank, and last that of embeddings and head, instead of the partition's choice.
            size: Of the model and its batch.
            keys: Of the configuration.
        """
        smp.init({"microbatches": size.microbatches, **keys})
        network = make_model(size)
        if placed is not None:
            place(network, placed)
        self._model: Any = smp.DistributedModel(network)
        self._optimizer = smp.DistributedOptimizer(make_optimizer(self._model.parameters()))
        if checkpointing:
            for block in network.transformer.h:
                smp.set_activation_checkpointing(block)
        # Each replica has a part of the batch, in as many microbatches.
        self._ids = make_batch(size).chunk(smp.dp_size())[smp.dp_rank()]

        @smp.step
        def step(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
            loss = model(input_ids=ids, labels=ids).loss
            model.backward(loss)
            return loss

        self._step: Any = step

    def step(self) -> float:
        """Run one training step; the mean loss over this rank's microbatches."""
        self._optimizer.zero_grad()
        loss = self._step(self._model, self._ids)
        self._optimizer.step()
        return float(loss.reduce_mean())

    def optimizer_bytes(self) -> int:
        """Bytes of the optimizer's state on this rank."""
        found: int = smp.memory_report()[smp.rank()]["measured"]["optimizer_state"]
        return found

    def offloaded_bytes(self) -> int:
        """The bytes of optimizer state on a disk, and the most of activations that were offloaded at once."""
        account = smp.memory_report()[smp.rank()]
        return int(account["offloaded"] + account["offloaded_optimizer_state"])

    def moved_bytes(self) -> int:
        """Bytes of activations that each step moves out of memory on this rank, on average."""
        offloaded = find_runtime().find(OffloadedActivations)
        return 0 if offloaded is None else offloaded.counts()["stored_bytes"] // int(smp.stats()["steps"])

    def barrier(self) -> None:
        """Wait for the other rank."""
        smp.barrier()

    def close(self) -> None:
        """Leave."""
        smp.shutdown()
