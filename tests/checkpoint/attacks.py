"""What goes wrong: a function for each case, which the ranks of a running job call."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import shardwright as smp
import torch
from shardwright._core import CheckpointWriter
from shardwright.checkpoints import background, together
from torch import nn

from tests.checkpoint.models import Odd, Training
from tests.checkpoint.saving import values
from tests.jobs.patience import slowdown


@contextmanager
def no_more_space(rank: int) -> Iterator[None]:
    """On this rank no file can be larger than some bytes, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if smp.rank() == rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def full_disk(folder: str) -> None:
    """A rank that cannot write fails the save on all, names itself, and leaves what was there."""
    training = Training()
    training.run(1)
    smp.save_checkpoint(folder, "a", user_content=1)
    expected = values(training, buffers=not smp.dp_rank())
    training.run(1)
    for rank in range(smp.size()):
        with no_more_space(rank), pytest.raises(smp.CheckpointError, match=f"failed on rank {rank} .*File too large"):
            smp.save_checkpoint(folder, "b", user_content=2)
        smp.barrier()
        assert sorted(os.listdir(folder)) == ["a_partial", "newest"]
        smp.barrier()
    assert smp.resume_from_checkpoint(folder) == 1
    found = values(training, buffers=not smp.dp_rank())
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    smp.save_checkpoint(folder, "b", user_content=2, num_kept_partial_checkpoints=1)
    assert sorted(os.listdir(folder)) == ["b_partial", "newest"]


def wrong_calls(folder: str) -> None:
    """Arguments and places that cannot work; each is told on all ranks."""
    training = Training()
    for tag, why in (("a/b", "names of files cannot have"), ("", "it is empty"), (".x", "begins with a dot")):
        with pytest.raises(smp.CheckpointError, match=why):
            smp.save_checkpoint(folder, tag)
    with pytest.raises(smp.CheckpointError, match="tag is a int; allowed: a str"):
        smp.save_checkpoint(folder, 3)  # type: ignore[arg-type]
    with pytest.raises(smp.CheckpointError, match="num_kept_partial_checkpoints is 0"):
        smp.save_checkpoint(folder, "a", num_kept_partial_checkpoints=0)
    with pytest.raises(smp.CheckpointError, match="newest checkpoint"):
        smp.resume_from_checkpoint(folder)
    smp.save_checkpoint(folder, "a")
    with pytest.raises(smp.CheckpointError, match=r'"b"'):
        smp.resume_from_checkpoint(folder, "b")
    with pytest.raises(smp.CheckpointError, match=r"cannot open .*: Not a directory"):
        smp.save_checkpoint(Path(folder) / "a_partial" / "manifest.json", "c")
    if smp.size() > 1:
        with pytest.raises(smp.CheckpointError, match="ranks gave different values of tag"):
            smp.save_checkpoint(folder, f"of-{smp.rank()}")
        with pytest.raises(smp.CheckpointError, match=r"failed on rank 1 .*model is a str; allowed"):
            smp.save_checkpoint(folder, "x", model="m" if smp.rank() == 1 else None)  # type: ignore[arg-type]

    @smp.step
    def inside(x: torch.Tensor) -> torch.Tensor:
        smp.save_checkpoint(folder, "c")
        return training.model(x)  # type: ignore[no-any-return]

    with pytest.raises((smp.FrameError, smp.RemoteError), match="called inside a step function"):
        inside(torch.randn(4, 7))
    assert sorted(os.listdir(folder)) == ["a_partial", "newest"]


def by_one(folder: str) -> None:
    """A call on one rank only ends there with what to write."""
    training = Training()
    if smp.rank() == 0:
        with pytest.raises(smp.ShardwrightError) as raised:
            smp.save_checkpoint(folder, "a")
        notes = " ".join(getattr(raised.value, "__notes__", ()))
        assert "outside of `if smp.rank() == 0:`" in notes or "smp.barrier" in str(raised.value), raised.value
    else:
        with pytest.raises(smp.ShardwrightError):
            smp.barrier()
    assert training.losses == []


def another_model(folder: str) -> None:
    """Equal names and other shapes, other names, other dtypes, another optimizer: refused, with a list."""
    training = Training()
    training.run(1)
    smp.save_checkpoint(folder, "a")
    smp.shutdown()
    smp.init({"microbatches": 2, "ddp": True})
    torch.manual_seed(1)
    other = Odd(48)
    other.more = nn.Linear(2, 2)
    del other.frozen
    other.scale = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))
    training = Training(module=other, kind="SGD")
    before = {name: one.detach().clone() for name, one in training.model.named_parameters()}
    with pytest.raises(smp.CheckpointError) as raised:
        smp.resume_from_checkpoint(folder)
    text = str(raised.value)
    for line in (
        "unexpected: model/frozen",
        "missing: model/more.weight",
        "shape: model/first.weight is [40, 7], wanted [48, 7]",
        "dtype: model/scale is F32, wanted F64",
        "the optimizer was AdamW, wanted SGD",
        "missing in parameter group 0: more.bias",
        "unexpected in parameter group 0: frozen",
    ):
        assert line in text, (line, text)
    assert all(torch.equal(before[name], one) for name, one in training.model.named_parameters())
    smp.resume_from_checkpoint(folder, strict=False)
    assert not torch.equal(before["last.bias"], training.model.module.last.bias)
    assert torch.equal(before["first.weight"], training.model.module.first.weight)
    assert not training.optimizer.state


def damaged(folder: str) -> None:
    """A file that was changed is named, on every rank, before anything is taken over: the training goes on."""
    training = Training()
    training.run(1)
    smp.save_checkpoint(folder, "a")
    smp.barrier()
    path = Path(folder) / "a_partial" / "part-00000.safetensors"
    if smp.rank() == 0:
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    smp.barrier()
    expected = values(training, buffers=not smp.dp_rank())
    with pytest.raises(smp.CheckpointError, match=r"part-00000.safetensors have changed"):
        smp.resume_from_checkpoint(folder)
    found = values(training, buffers=not smp.dp_rank())
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    training.run(1)


def full_disk_in_background(folder: str) -> None:
    """A save in the background that fails is told by the next call, on all ranks, and leaves what was there."""
    training = Training()
    training.run(1)
    smp.save_checkpoint(folder, "a", user_content=1, asynchronous=True)
    expected = values(training, buffers=not smp.dp_rank())
    training.run(2)
    for rank in range(smp.size()):
        smp.save_checkpoint(folder, "a2", user_content=2)
        with no_more_space(rank):
            smp.save_checkpoint(folder, "b", asynchronous=True)
            with pytest.raises(smp.CheckpointError, match=f"the save of 'b' in the background failed on .*rank {rank}"):
                smp.save_checkpoint(folder, "c")
        smp.barrier()
        assert sorted(os.listdir(folder)) == ["a2_partial", "a_partial", "newest"]
    assert smp.resume_from_checkpoint(folder, "a") == 1
    found = values(training, buffers=not smp.dp_rank())
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def in_background(folder: str) -> None:
    """What is saved is what was there at the call, though training goes on; the end of the job waits for it."""
    training = Training()
    training.run(1)
    expected = values(training, buffers=not smp.dp_rank())
    smp.save_checkpoint(folder, "a", asynchronous=True)
    training.run(2)
    smp.resume_from_checkpoint(folder)
    found = values(training, buffers=not smp.dp_rank())
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    smp.save_checkpoint(folder, "last", user_content=7, asynchronous=True)


def save_beside_another_job(folder: str, asynchronous: bool) -> None:
    """Save while another job saves into the directory: afterwards, and not at all if that one does not end."""
    model = smp.DistributedModel(nn.Linear(8, 8))
    other = CheckpointWriter(folder, "other")
    is_first = smp.rank() == 0
    if is_first:
        other.lock(1.0)
    smp.barrier()
    began = time.monotonic()
    if is_first:
        threading.Timer(1.0, other.unlock).start()
    smp.save_checkpoint(folder, "a", model=model, asynchronous=asynchronous)
    assert not is_first or time.monotonic() - began > 0.9
    smp.save_checkpoint(folder, "b", model=model, asynchronous=asynchronous)
    smp.resume_from_checkpoint(folder, "a", model=model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(together, "_LOCK_SECONDS", 0.3)
        if is_first:
            other.lock(1.0)
        smp.barrier()
        with pytest.raises(smp.CheckpointError, match=r"rank 0 .*another job has been saving into .* for 0.3 s"):
            smp.save_checkpoint(folder, "c", model=model, asynchronous=asynchronous)
    if is_first:
        other.unlock()
        assert {one.name for one in Path(folder).iterdir()} == {"a_partial", "b_partial", "newest"}
    smp.barrier()
    smp.save_checkpoint(folder, "c", model=model, asynchronous=asynchronous)
    smp.resume_from_checkpoint(folder, "c", model=model)


def unshared_in_background(folder: str) -> None:
    """Ranks that write into folders of their own are told so by the next call, on all of them."""
    model = smp.DistributedModel(nn.Linear(8, 8))
    smp.save_checkpoint(Path(folder) / str(smp.rank()), "a", model=model, asynchronous=True)
    with pytest.raises(
        smp.CheckpointError, match=r"rank 0 .*part-00001\S+ was written by another rank and is not there"
    ):
        smp.save_checkpoint(folder, "b", model=model)


def locked_as_long_as_it_saves(folder: str) -> None:
    """Another job can save once the save in the background has ended, though this one calls nothing more."""
    model = smp.DistributedModel(nn.Linear(8, 8))
    smp.save_checkpoint(folder, "a", model=model, asynchronous=True)
    if smp.rank() == 0:
        other = CheckpointWriter(folder, "other")
        other.lock(10 * slowdown())
        assert (Path(folder) / "a_partial").exists()
        other.unlock()
    smp.barrier()


def uncopied_in_background(folder: str) -> None:
    """A rank without room for its copy fails the call on all ranks, and nothing is left, not even the lock."""
    model = smp.DistributedModel(nn.Linear(8, 8))

    def no_room(*_: object) -> None:
        raise MemoryError("no room")

    with pytest.MonkeyPatch.context() as patch:
        if smp.rank() == 1:
            patch.setattr(background, "copy_part", no_room)
        with pytest.raises(smp.CheckpointError, match=r"failed on rank 1 .*no room"):
            smp.save_checkpoint(folder, "a", model=model, asynchronous=True)
    smp.barrier()
    assert os.listdir(folder) == []
    smp.barrier()
    if smp.rank() == 0:
        other = CheckpointWriter(folder, "other")
        other.lock(0.0)
        other.unlock()
    smp.barrier()
    smp.save_checkpoint(folder, "a", model=model)
