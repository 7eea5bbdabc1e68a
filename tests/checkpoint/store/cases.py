"""Saving into an object store and loading: a function for each case, which the ranks of a running job call."""

from __future__ import annotations

import os
import signal
import time
from typing import Any
from unittest.mock import patch

import pytest
import shardwright as smp
import torch
from shardwright._core import CheckpointReader, CheckpointWriter
from shardwright.checkpoints import saving

from tests.checkpoint.models import Training
from tests.checkpoint.saving import seed
from tests.jobs.patience import slowdown

#: Within which every rank has to raise what is wrong.
_SECONDS = 60.0


def save_there(
    path: str, beside: str, number: int, tag: str = "a", big: int = 0, keep: int | None = None, background: bool = False
) -> None:
    """Train and save; what was saved is written to the disk as well."""
    training = Training("SGD", seed=number)
    seed()
    training.run(1)
    content = {"number": number, "big": torch.randn(big)}
    state = {name: value.clone() for name, value in training.model.state_dict().items()}
    smp.save_checkpoint(path, tag, user_content=content, num_kept_partial_checkpoints=keep, asynchronous=background)
    if background:
        training.run(2)
    if smp.rank() == 0:
        smp.save({"state": state, "content": content}, f"{beside}/{number}", partial=False)


def found_there(path: str, beside: str, number: int, tag: str | None = None) -> None:
    """What is loaded is what was saved, bit for bit, on every rank."""
    training = Training("SGD", seed=50)
    training.run(1)
    content: Any = smp.resume_from_checkpoint(path, tag)
    expected = smp.load(f"{beside}/{number}", partial=False)
    found = training.model.state_dict()
    assert found.keys() == expected["state"].keys()
    for name, value in expected["state"].items():
        assert torch.equal(found[name], value), name
    assert content["number"] == number
    assert torch.equal(content["big"], expected["content"]["big"])
    training.run(1)
    if smp.rank() == 0:
        assert CheckpointReader(path, tag).verify() == []
    smp.barrier()


def refused(path: str, why: str) -> None:
    """A store that cannot be used is refused on every rank, before anything is copied."""
    training = Training()
    training.run(1)
    begin = time.monotonic()
    message = rf"(?s)save_checkpoint failed on all ranks .*cannot list {path}: .*{why}"
    with patch.object(saving, "_collect") as collect, pytest.raises(smp.CheckpointError, match=message):
        smp.save_checkpoint(path, "a")
    collect.assert_not_called()
    with pytest.raises(smp.CheckpointError, match=rf"(?s)resume_from_checkpoint failed on rank 0 .*{path}.*{why}"):
        smp.resume_from_checkpoint(path)
    assert time.monotonic() - begin < _SECONDS * slowdown()
    training.run(1)


def gone(path: str, server: int) -> None:
    """A server that ends while ranks save, and stays away, is told on all ranks; the job goes on."""
    training = Training()
    training.run(1)
    smp.save_checkpoint(path, "a", user_content=1)

    class Ends:
        """A writer before whose part is written on rank 0, the server ends."""

        def __init__(self, *arguments: Any) -> None:
            self._writer = CheckpointWriter(*arguments)

        def __getattr__(self, name: str) -> Any:
            if name == "write_part" and smp.rank() == 0:
                os.kill(server, signal.SIGKILL)
            return getattr(self._writer, name)

    begin = time.monotonic()
    with (
        patch.object(saving, "CheckpointWriter", Ends),
        pytest.raises(smp.CheckpointError, match=rf"(?s)save_checkpoint failed on .*rank.* {path}/.*: .*127\.0\.0\.1"),
    ):
        smp.save_checkpoint(path, "b", user_content=torch.zeros(6 << 20))
    for call in (lambda: smp.resume_from_checkpoint(path), lambda: smp.save_checkpoint(path, "b")):
        with pytest.raises(smp.CheckpointError, match=rf"(?s)failed on .*cannot (list|read) {path}"):
            call()
    assert time.monotonic() - begin < 2 * _SECONDS * slowdown()
    training.run(1)


def only_in_parts(path: str) -> None:
    """Full checkpoints are files on a disk."""
    Training().run(1)
    with pytest.raises(smp.CheckpointError, match="only checkpoints in parts"):
        smp.save_checkpoint(path, "a", partial=False)
    with pytest.raises(smp.CheckpointError, match="only checkpoints in parts"):
        smp.resume_from_checkpoint(path, "a", partial=False)
