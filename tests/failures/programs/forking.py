"""Trains while processes are forked off: a data loader's workers, and a child that tries to use the job."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
from collections.abc import Iterator

import common
import shardwright as smp
import torch
from common import say
from torch.utils.data import DataLoader, Dataset

ANSWER_BYTES = 10_000


class Numbers(Dataset[torch.Tensor]):
    """Batches that a worker makes, with a glance at the rank."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((common.WIDTH,), float(index + 100 * smp.rank()))


def in_child() -> str:
    """Fork, try to use the job in the child, let the child end as a Python process does; what it says."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        faulthandler.dump_traceback_later(30)
        words = []
        for attempt in (smp.barrier, smp.stats, smp.comm_stats, smp.shutdown):
            try:
                attempt()
                words.append(f"{attempt.__name__}: done")
            except Exception as error:
                words.append(f"{attempt.__name__}: {type(error).__name__}: {error}")
        os.write(writer, "\n".join(words).encode())
        sys.exit(0)  # runs the exit handlers
    os.close(writer)
    with os.fdopen(reader, "rb") as answer:
        said = answer.read(ANSWER_BYTES).decode()
    _, status = os.waitpid(child, 0)
    say("child", said=said, code=os.waitstatus_to_exitcode(status))
    return said


def terminated() -> None:
    """Fork, and terminate the child, as a pool of processes does with its workers."""
    child = os.fork()
    if child == 0:
        time.sleep(60.0)
    os.kill(child, signal.SIGTERM)
    _, status = os.waitpid(child, 0)
    say("terminated", code=os.waitstatus_to_exitcode(status))


def endless(loader: DataLoader[torch.Tensor]) -> Iterator[torch.Tensor]:
    while True:
        yield from loader


def main() -> None:
    job = common.start()
    job.exact_step()
    in_child()
    terminated()
    loader = DataLoader(Numbers(), batch_size=2, num_workers=2, persistent_workers=True)
    batches = endless(loader)
    for step in range(20):
        batch = next(batches)
        assert int(batch[0, 0]) == 100 * smp.rank() + 2 * step % 12
        say("step", number=step, error=job.exact_step())
    say("end")


if __name__ == "__main__":
    main()
