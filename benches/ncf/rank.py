"""A process of one configuration, which trains the model of ``examples/ncf.py``.

usage: python -m benches.ncf.rank CONFIGURATION,USERS SOCKET, as a rank of a job; CONFIGURATION is ``different`` or
``same`` (batches of tp ranks), ``one`` or ``ddp``
"""

from __future__ import annotations

import os
import resource
import sys
import time
from typing import Any

import shardwright as smp
import torch
import torch.distributed as dist
from torch import nn

from benches.ranks import serve
from examples.ncf import NeuralCollaborativeFiltering, Ratings

ITEMS, GMF_WIDTH, MLP_WIDTH = 1792, 64, 512
SEED = 0
LEARNING_RATE = 1e-3


def embedding(number: int, width: int, sparse: bool) -> nn.Embedding:
    """A plain one, that starts with the numbers of a distributed one."""
    return nn.Embedding(number, width, sparse=sparse, _weight=torch.empty(number, width).normal_(std=0.02))


def loss_of(model: nn.Module, users: torch.Tensor, items: torch.Tensor, likes: torch.Tensor) -> torch.Tensor:
    """The mean over samples, each [batch]."""
    return nn.functional.binary_cross_entropy_with_logits(model(users, items), likes)


class Training:
    """What a rank can be told."""

    def __init__(self, name: str, users: int) -> None:
        """Nothing is built yet."""
        self.rank, self._size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._name, self._users = name, users
        self._ours = name in ("different", "same")
        self._parts = 1 if name == "same" else self._size

    def build(self) -> None:
        """Build the model and its optimizers."""
        name, sizes = self._name, (self._users, ITEMS, GMF_WIDTH, MLP_WIDTH)
        if self._ours:
            smp.init(tensor_parallel_degree=self._size, ddp=True, prescaled_batch=name == "same")
        elif name == "ddp":
            dist.init_process_group("gloo")
        torch.manual_seed(SEED)
        if self._ours:
            self._model: Any = smp.DistributedModel(NeuralCollaborativeFiltering(*sizes))
        else:
            self._model = NeuralCollaborativeFiltering(*sizes, embedding=embedding)
            if name == "ddp":
                self._model = nn.parallel.DistributedDataParallel(self._model)
        named = list(self._model.named_parameters())
        self._tables = [one for key, one in named if "users" in key or "items" in key]
        others = [one for key, one in named if not ("users" in key or "items" in key)]
        self._optimizers: list[Any] = [
            torch.optim.SparseAdam(self._tables, lr=LEARNING_RATE),
            torch.optim.Adam(others, lr=LEARNING_RATE),
        ]
        self._states = self._optimizers[0].state
        if self._ours:
            self._optimizers = [smp.DistributedOptimizer(one) for one in self._optimizers]

        @smp.step
        def step(model: Any, users: torch.Tensor, items: torch.Tensor, likes: torch.Tensor) -> torch.Tensor:
            loss = loss_of(model, users, items, likes)
            model.backward(loss)
            return loss

        self._step: Any = step

    def _train(self, batch: list[torch.Tensor]) -> float:
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        if self._ours:
            loss = self._step(self._model, *batch).reduce_mean()
        else:
            loss = loss_of(self._model, *batch)
            loss.backward()
            loss = loss.detach()
        for optimizer in self._optimizers:
            optimizer.step()
        return float(loss)

    def steps(self, total: int, number: int, seed: int) -> dict[str, Any]:
        """Train on batches of so many samples of all ranks together.

        Returns:
            When it began and ended here, in seconds of a clock that all ranks share, its processor time, and losses.
        """
        ratings = Ratings(self._users, ITEMS, seed)
        place = self.rank % self._parts
        batches = [[one.chunk(self._parts)[place] for one in ratings.batch(total)] for _ in range(number)]
        if self._size > 1:
            (smp if self._ours else dist).barrier()
        began, used = time.monotonic(), time.process_time()
        losses = [self._train(batch) for batch in batches]
        return {"began": began, "ended": time.monotonic(), "cpu": time.process_time() - used, "losses": losses}

    def memory(self) -> dict[str, int]:
        """Bytes of this rank's tables with their optimizer's state, and the process's peak."""
        states = [one for of in self._states.values() for one in of.values() if isinstance(one, torch.Tensor)]
        tables = sum(one.nbytes for one in [*self._tables, *(one for one in states if one.dim())])
        return {"tables": tables, "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}

    def close(self) -> None:
        """Leave."""
        if self._ours:
            smp.shutdown()
        elif dist.is_initialized():
            dist.destroy_process_group()


def main() -> None:
    """Serve one configuration."""
    kind, address = sys.argv[1:]
    name, _, users = kind.partition(",")
    torch.set_num_threads(1)
    serve(Training(name, int(users)), address)


if __name__ == "__main__":
    main()
