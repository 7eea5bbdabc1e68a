"""PyTorch's own: DistributedDataParallel and FSDP2, with and without ``torch.utils.checkpoint``."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from benches.gpt2.model import make_optimizer
from benches.memory.model import DEFAULT_SIZE, make_batch, make_model


class Torch:
    """One row of PyTorch, on two data-parallel ranks."""

    def __init__(
        self,
        *,
        sharded: bool = False,
        reshards: bool = True,
        reduces_once: bool = False,
        checkpointing: bool = False,
    ) -> None:
        """Build it.

        Args:
            sharded: FSDP2 instead of DistributedDataParallel.
            reshards: Whether parameters are sharded again after the forward (ZeRO stage 3, else 2).
            reduces_once: Whether FSDP2 keeps whole gradients until the last microbatch, which neither stage does.
            checkpointing: Whether each block is checkpointed.
        """
        dist.init_process_group("gloo")
        network = make_model()
        if checkpointing:
            network.gradient_checkpointing_enable({"use_reentrant": False})
        self._sharded, self._reduces_once = sharded, reduces_once
        if sharded:
            mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
            for block in network.transformer.h:
                fully_shard(block, mesh=mesh, reshard_after_forward=reshards)
            self._model: Any = fully_shard(network, mesh=mesh, reshard_after_forward=reshards)
        else:
            self._model = DistributedDataParallel(network)
        self._optimizer = make_optimizer(self._model.parameters())
        part = make_batch().chunk(dist.get_world_size())[dist.get_rank()]
        self._microbatches = part.chunk(DEFAULT_SIZE.microbatches)

    def step(self) -> float:
        """Run one training step; the mean loss over this rank's microbatches."""
        self._optimizer.zero_grad()
        losses = []
        for number, ids in enumerate(self._microbatches, 1):
            last = number == len(self._microbatches)
            if self._sharded:
                self._model.set_requires_gradient_sync(last or not self._reduces_once)
            with contextlib.nullcontext() if last or self._sharded else self._model.no_sync():
                loss = self._model(input_ids=ids, labels=ids).loss
                (loss / len(self._microbatches)).backward()
            losses.append(loss.detach())
        self._optimizer.step()
        return float(torch.stack(losses).mean())

    def optimizer_bytes(self) -> int:
        """Bytes of the optimizer's state on this rank."""
        tensors = [value for state in self._optimizer.state.values() for value in state.values()]
        local = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]
        return sum(tensor.numel() * tensor.element_size() for tensor in local)

    def offloaded_bytes(self) -> int:
        """None are."""
        return 0

    def moved_bytes(self) -> int:
        """None are."""
        return 0

    def barrier(self) -> None:
        """Wait for the other rank."""
        dist.barrier()

    def close(self) -> None:
        """Leave."""
        dist.destroy_process_group()
