"""Readers beside a job that keeps the newest checkpoint only: what they read is whole, and nobody calls it damaged."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import shardwright as smp
import torch
from shardwright._core import CheckpointReader, CheckpointWriter
from shardwright.checkpoints import saved
from shardwright.errors import CheckpointGoneError
from shardwright.job.runtime import Runtime
from torch import nn

from tests.frames.job import Job, in_process_ranks

PARTS, SAVES = 3, 150
DESCRIPTION = (
    '{"library_version": "0", "step": null, "partition": [], "aliases": [], "user_content": null, "degrees": '
    '{"pipeline": 1, "tensor": 1, "reduced_data": 1, "optimizer_sharding": 1, "sharded_data": 1}}'
)


def save(folder: Path, tag: str, number: int) -> None:
    """A checkpoint whose elements are all this number; the only one that is kept."""
    writer = CheckpointWriter(folder, tag)
    row = torch.full((1, 50), float(number))
    parts = [
        writer.write_part(f"part-{part}.safetensors", [("x", row, [PARTS, 50], ([part, 0], [1, 50], None))])
        for part in range(PARTS)
    ]
    writer.commit(DESCRIPTION, parts, keep=1)


@pytest.mark.parametrize("tag", [lambda number: f"step{number}", lambda number: "latest"], ids=["removed", "replaced"])
def test_who_reads_the_newest_looks_again(tag: Callable[[int], str], tmp_path: Path) -> None:
    save(tmp_path, tag(0), 0)
    ended = threading.Event()

    def saves() -> None:
        try:
            for number in range(1, SAVES):
                save(tmp_path, tag(number), number)
        finally:
            ended.set()

    thread = threading.Thread(target=saves)
    thread.start()
    newest, reads = 0, 0
    into = torch.empty(PARTS, 50)
    while not ended.is_set():
        reader = CheckpointReader(tmp_path)
        try:
            reader.read([("x", into, ([0, 0], [PARTS, 50], None))])
            assert reader.verify() == []
        except CheckpointGoneError:
            continue
        reads += 1
        assert len(into.unique()) == 1
        assert into[0, 0] >= newest
        newest = int(into[0, 0])
    thread.join()
    assert reads > 0


@pytest.mark.parametrize("times", [3, 1000])
def test_all_ranks_of_a_job_look_again_so_many_times(times: int, tmp_path: Path) -> None:
    """What one of them finds gone they all load anew, until it is clear that it never ends."""
    left = [times]

    def reader(*arguments: Any) -> Any:
        if threading.current_thread().name == "rank-1" and left[0] > 0:
            left[0] -= 1
            raise CheckpointGoneError("it was removed")
        return CheckpointReader(*arguments)

    def main(runtime: Runtime) -> str:
        net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
        smp.set_partition(net[1], 1)
        model = smp.DistributedModel(net)
        smp.save_checkpoint(tmp_path, "a", model=model, user_content=7)
        try:
            return str(smp.resume_from_checkpoint(tmp_path, model=model))
        except CheckpointGoneError as error:
            return str(error)

    with in_process_ranks(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(saved, "CheckpointReader", reader)
        job = Job(2)
        results = job.run(main, {})
        assert results[0] == results[1]
        assert results[0] == "7" if times < 10 else "rank 1" in str(results[0]), results
        job.close()
