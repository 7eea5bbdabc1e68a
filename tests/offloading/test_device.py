"""Tensors of devices leave and come back beside the computation: the order of copies, locked memory, forked children.

Streams that run late stand for those of a device; what CUDA does is tested in ``tests/device``.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator

import pytest
import shardwright as smp
import torch
from shardwright import _core
from shardwright.errors import OffloadError
from shardwright.job.runtime import current_runtime
from shardwright.offloading import Kept, OffloadedActivations, activations, device
from shardwright.offloading.device import DeviceTransfers

from tests.jobs.patience import HANG_SECONDS

from .late_streams import LateStreams
from .test_tensors import tensors, trained

ELEMENTS = 3000
DIRECTORIES = pytest.mark.parametrize("directory", [None, tempfile.gettempdir()], ids=["host", "disk"])


class Rank:
    """The storage of a rank, with streams that run late."""

    def __init__(self, directory: str | None, horizon: int = 1) -> None:
        self.core = _core.Offload(
            rank=0, horizon=horizon, directory=directory, most_outgoing=1 << 20, timeout_seconds=HANG_SECONDS
        )
        self.streams = LateStreams()
        self.transfers = DeviceTransfers(self.core, self.streams)

    def keep(self, tensor: torch.Tensor, whole: torch.Tensor | None = None) -> Kept:
        kept = Kept(self.core.add_call(0, "a Linear"), self.transfers)
        kept.add(tensor, tensor if whole is None else whole)
        return kept

    def begin_step(self, number: int) -> None:
        """Begin a step of one microbatch."""
        self.core.begin_step(step=number, schedule="simple", ranks=1, pp_rank=0, microbatches=1, one_at_a_time=False)
        self.core.begin_task(0, backward=False)

    def until(self, holds: Callable[[], bool]) -> None:
        """Go on as tasks do, until something holds."""
        deadline = time.monotonic() + HANG_SECONDS
        while not holds():
            assert time.monotonic() < deadline, self.core.counts()
            self.transfers.settle()
            time.sleep(0.001)

    def close(self) -> None:
        self.transfers.close()
        self.core.close()


@pytest.fixture(params=[None, tempfile.gettempdir()], ids=["host", "disk"])
def rank(request: pytest.FixtureRequest) -> Iterator[Rank]:
    made = Rank(request.param)
    yield made
    made.close()


def numbered(number: int) -> torch.Tensor:
    return torch.arange(ELEMENTS, dtype=torch.float32) + number


@pytest.mark.parametrize("name", tensors())
def test_a_tensor_comes_back_bit_for_bit_in_its_layout(rank: Rank, name: str) -> None:
    tensor = tensors()[name]
    once = tensor[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())]
    kept = [rank.keep(once, tensor) for _ in range(3)]
    rank.until(lambda: rank.core.counts()["stored"] == 2)
    ((_, found),) = kept[0].take().items()
    assert "back" in rank.streams.log
    assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
    bits, expected = (one.contiguous().view(torch.uint8) for one in (found, tensor))
    assert torch.equal(bits, expected)
    if name != "sliced":  # its gaps are not kept
        assert found.stride() == tensor.stride()


def test_what_is_kept_is_a_copy_to_which_the_script_cannot_write(rank: Rank) -> None:
    given = numbered(1)
    kept = [rank.keep(given), rank.keep(numbered(2)), rank.keep(numbered(3))]
    given.zero_()
    rank.until(lambda: rank.core.counts()["stored"] == 2)
    (found,) = kept[0].take().values()
    assert torch.equal(found, numbered(1))


def test_what_is_needed_within_the_horizon_stays_on_the_device(rank: Rank) -> None:
    kept = [rank.keep(numbered(number)) for number in range(4)]
    assert rank.streams.log == ["out"] * 3
    (found,) = kept[3].take().values()
    assert torch.equal(found, numbered(3))
    assert "back" not in rank.streams.log


def test_a_call_that_is_computed_again_before_its_copy_out_is_done_uses_what_is_on_the_device(rank: Rank) -> None:
    kept = [rank.keep(numbered(number)) for number in range(3)]
    assert rank.core.counts()["stored"] == 0
    (found,) = kept[0].take().values()
    assert torch.equal(found, numbered(0))
    assert rank.streams.log[-1] == "use"
    assert "back" not in rank.streams.log


@DIRECTORIES
@pytest.mark.parametrize("horizon", [1, 2, 3])
def test_copies_back_begin_so_many_second_computations_ahead(directory: str | None, horizon: int) -> None:
    rank, calls = Rank(directory, horizon), 7
    try:
        rank.begin_step(1)
        kept = [rank.keep(numbered(number)) for number in range(calls)]
        rank.until(lambda: rank.core.counts()["stored"] == calls - horizon)
        rank.core.begin_task(0, backward=True)
        begun: list[int] = []
        for number in reversed(range(calls)):
            (found,) = kept.pop().take().values()
            assert torch.equal(found, numbered(number))
            expected = max(0, min(calls - horizon, calls - number))
            # Of those within the horizon all come back while this one is computed, and no other.
            rank.until(lambda expected=expected: rank.streams.log.count("back") >= expected)  # type: ignore[misc]
            begun.append(rank.streams.log.count("back"))
        assert begun == [min(calls - horizon, done) for done in range(1, calls + 1)]
    finally:
        rank.close()


def test_locked_memory_is_used_again_and_its_bytes_are_told(rank: Rank) -> None:
    locked = []
    for step in range(1, 5):
        rank.begin_step(step)
        kept = [rank.keep(numbered(step + number)) for number in range(6)]
        rank.until(lambda step=step: rank.core.counts()["stored"] == 5 * step)  # type: ignore[misc]
        rank.core.begin_task(0, backward=True)
        for number in reversed(range(6)):
            (found,) = kept.pop().take().values()
            assert torch.equal(found, numbered(step + number))
        rank.until(lambda: rank.core.counts()["bytes"] == 0 and rank.core.counts()["on_the_way"] == 0)
        locked.append(rank.streams.locked_bytes)
        assert rank.core.counts()["locked_bytes"] == locked[-1]
    assert 0 < locked[-1] <= 6 * (1 << 14)


def test_blocks_of_sizes_that_are_not_used_any_more_are_let_go(rank: Rank) -> None:
    for nbytes in (5000, 50_000, 500_000):
        kept = [rank.keep(torch.zeros(nbytes // 4)) for _ in range(4)]
        rank.until(lambda: rank.core.counts()["on_the_way"] == 0 and rank.core.counts()["bytes"] > 0)
        kept.clear()
        rank.until(lambda: rank.core.counts()["bytes"] == 0)
    assert rank.core.counts()["locked_bytes"] < rank.streams.locked_bytes


def test_a_forward_waits_where_too_much_is_on_its_way_to_the_host(monkeypatch: pytest.MonkeyPatch, rank: Rank) -> None:
    monkeypatch.setattr(device, "MOST_LEAVING_BYTES", 0)
    kept = [rank.keep(numbered(number)) for number in range(6)]
    assert rank.streams.waits >= 3
    assert len(kept) == 6


def test_the_end_waits_for_copies(rank: Rank) -> None:
    kept = [rank.keep(numbered(number)) for number in range(4)]
    assert rank.streams.ran < 3
    rank.transfers.close()
    assert rank.streams.ran == 3
    assert len(kept) == 4


@pytest.mark.parametrize("where", [True, "disk"], ids=["host", "disk"])
def test_gradients_are_those_without_checkpoints(monkeypatch: pytest.MonkeyPatch, where: bool | str) -> None:
    streams = LateStreams()
    monkeypatch.setattr(activations, "CudaStreams", lambda: streams)
    smp.init({"microbatches": 2, "offload_activations": where, "activation_loading_horizon": 1})
    try:
        expected, found = trained(False), trained(True)
        assert all(torch.equal(left, right) for left, right in zip(expected, found, strict=True))
        assert streams.log.count("out") >= 2 * 2 * 5
        assert current_runtime()[OffloadedActivations].counts()["computed_again"] == 2 * 2 * 6
    finally:
        smp.shutdown()


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
def test_a_forked_child_that_holds_a_call_is_told_and_ends(rank: Rank, on_device: bool) -> None:
    """Its thread is missing, and locks may be held for ever: dropping the call must not wait for them."""
    if on_device:
        kept = [rank.keep(numbered(number)) for number in range(3)]
    else:
        calls = [rank.core.add_call(0, "a Linear") for _ in range(3)]
        host = numbered(0)
        numbers = [call.add(host.data_ptr(), host.numel() * 4) for call in calls]
        assert len(set(numbers)) == 3
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        told = b"nothing"
        try:
            kept[0].take() if on_device else calls[0].take()
        except OffloadError as error:
            told = str(error).encode()
        if on_device:
            kept.clear()
        else:
            calls.clear()
        os.write(writer, told)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as told_by_child:
        told = told_by_child.read()
    assert os.waitpid(child, 0)[1] == 0
    assert b"fork" in told
    found = kept[0].take() if on_device else dict(calls[0].take())
    assert len(found) == 1
