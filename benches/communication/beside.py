"""A rank that computes, with and without messages beside its computation."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import shardwright as smp
import torch

#: How the kernel knows the threads that move messages: the library's, and the one that UCX may start.
COMMUNICATION_THREADS = ("sw-", "async")
_WORLD = smp.RankType.WORLD_RANK


def cpu_seconds_of_threads() -> dict[str, float]:
    """Processor time of this process's threads so far, by name; those of one name together."""
    found: dict[str, float] = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            name = (task / "comm").read_text().strip()
            nanoseconds = int((task / "schedstat").read_text().split()[0])
        except OSError:
            continue  # it has ended since
        found[name] = found.get(name, 0.0) + nanoseconds / 1e9
    return found


class Beside:
    """One rank of two."""

    def __init__(self) -> None:
        """Join the job."""
        smp.init({"pipeline_parallel_degree": 2})
        self.rank = smp.rank()
        self._other = 1 - self.rank
        self._matrix = torch.rand(192, 192)
        self._product = torch.empty(192, 192)
        self._products = 1

    def _task(self) -> None:
        for _ in range(self._products):
            torch.mm(self._matrix, self._matrix, out=self._product)

    def calibrate(self, task_seconds: float) -> None:
        """Make the task of both ranks as long as it should be on rank 0, while both compute."""
        for _ in range(2):
            repeated, began = 0, time.perf_counter()
            while time.perf_counter() - began < 1.0:
                self._task()
                repeated += 1
            took = (time.perf_counter() - began) / repeated
            self._products = max(1, round(self._products * task_seconds / took))
        if self.rank == 0:
            smp.send(self._products, self._other, _WORLD)
        else:
            self._products = smp.recv_from(self._other, _WORLD)

    def compute_in_silence(self, seconds: float) -> dict[str, float]:
        """Compute without a message; the share of a core that each thread took meanwhile, by name."""
        before, began = cpu_seconds_of_threads(), time.perf_counter()
        while time.perf_counter() - began < seconds:
            self._task()
        took, after = time.perf_counter() - began, cpu_seconds_of_threads()
        return {name: (used - before.get(name, 0.0)) / took for name, used in after.items()}

    def step(self, tasks: int, activation_bytes: int) -> float:
        """The seconds of a step of some tasks; each sends and takes an activation, if it has any bytes.

        What a task sends is taken by the other rank's next task, as activations of a pipeline that has more than one
        microbatch under way: neither waits for the other while they are less than a task apart.
        """
        exchange = self._exchange(activation_bytes) if activation_bytes else None
        smp.barrier()
        began = time.perf_counter()
        for index in range(tasks):
            if exchange is not None:
                exchange(index)
            self._task()
        took = time.perf_counter() - began
        if exchange is not None:
            smp.recv_from(self._other, _WORLD)  # the last one has no task to be beside
        return took

    def _exchange(self, activation_bytes: int) -> Callable[[int], None]:
        activation = torch.ones(activation_bytes // 4)

        def exchange(index: int) -> None:
            smp.send(activation, self._other, _WORLD)
            if index:
                smp.recv_from(self._other, _WORLD)

        return exchange

    def close(self) -> None:
        """Leave the job."""
        smp.shutdown()
