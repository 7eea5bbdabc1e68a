"""Collectives of GPUs: streams wait for them, and the host watches a bounded number behind; on fakes of NCCL."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shardwright.data_parallel import collectives
from shardwright.data_parallel.collectives import Collectives, ReplicaCollectives
from shardwright.errors import PeerLostError, RemoteError, ShardwrightError
from shardwright.job import queued
from shardwright.job.queued import MAX_BEHIND, QueuedCollectives, orders_streams
from shardwright.job.runtime import Runtime
from shardwright.model import vote as voting
from shardwright.sharded_data_parallel.communication import ShardCollectives
from shardwright.sharded_data_parallel.groups import SHARDS
from shardwright.tensor_parallel.back_ends.process_group import ByProcessGroup

from tests.jobs.runtimes import make_runtime

CUDA = torch.device("cuda", 0)
#: On no device, but not on the CPU, as the fakes see it.
ON_DEVICE = {"device": "meta"}
LOST = PeerLostError(1, "there", None, None, None, "PeerLostError", "rank 1 has died")
FAILED = RemoteError(1, "there", None, None, None, "ValueError", "a wrong value")


class _Work:
    """A collective that a device comes to late: when the host has looked at it so often."""

    def __init__(self, log: list[str], looks: int) -> None:
        self._log, self._looks = log, looks
        self.looked = 0
        self.ended = False

    def is_completed(self) -> bool:
        self.looked += 1
        done = self.ended or self.looked > self._looks
        if done:
            self._log.append("done")
        return done

    def wait(self, *_: Any) -> None:
        self._log.append("stream")


class _Group:
    """A process group of a back end."""

    group_name = "fake"

    def __init__(self, name: str = "nccl") -> None:
        self._name = name
        self.works: list[_Work] = []
        self.aborted = 0

    def _get_backend(self, _: torch.device) -> _Group:
        return self

    def name(self) -> str:
        return self._name

    def abort(self) -> None:
        self.aborted += 1
        for work in self.works:
            work.ended = True


class _Server:
    failure: BaseException | None = None
    checks = 0

    def check_abort(self, *_: Any) -> None:
        self.checks += 1
        if self.failure is not None:
            raise self.failure

    def wait_outside(self, _: bool) -> float:
        return 0.0


class _Node:
    gone = False

    def recv_object(self, *_: Any) -> None:
        if self.gone:
            raise LOST


class _Rank:
    """A rank of two with a fake GPU."""

    def __init__(self, back_end: str = "nccl", looks: int = 3) -> None:
        self.server, self.node, self.group = _Server(), _Node(), _Group(back_end)
        self.runtime: Runtime = make_runtime(0, 2, node=self.node, server=self.server)
        self.runtime.place.__dict__["device"] = CUDA
        self.runtime.process_groups.update({"DP_GROUP": self.group, "TP_GROUP": self.group, SHARDS: self.group})
        self.queue = self.runtime[QueuedCollectives]
        self.log: list[str] = []
        self._looks = looks
        self.collectives = Collectives(self.runtime, "DP_GROUP", [0, 1])
        self.runtime[ReplicaCollectives].shards = Collectives(self.runtime, SHARDS, [0, 1])

    @property
    def works(self) -> list[_Work]:
        return self.group.works

    def begin(self, *_: Any, **__: Any) -> _Work:
        self.works.append(_Work(self.log, self._looks))
        return self.works[-1]

    @property
    def behind(self) -> int:
        """How many streams wait for that the host has not seen the end of."""
        return self.log.count("stream") - self.log.count("done") * 2  # the host's own wait is logged too

    def sum(self) -> None:
        self.collectives.wait(self.collectives.sum(torch.zeros(4, **ON_DEVICE)))

    def gather_shards(self) -> None:
        ShardCollectives(self.runtime).gather(torch.zeros(4, **ON_DEVICE))

    def over_tensor_group(self) -> ByProcessGroup:
        def wait(work: Any, group: Any, device: torch.device) -> None:
            assert device.type == "cpu", "that of the test's tensors"
            self.queue.wait(work, group, CUDA, [0, 1], renewed=True)

        return ByProcessGroup(self.group, wait)  # type: ignore[arg-type]

    def gather_activations(self) -> None:
        self.over_tensor_group().all_gather(torch.zeros(4, dtype=torch.uint8), [4, 4])()


@pytest.fixture(autouse=True)
def _fake_torch(monkeypatch: pytest.MonkeyPatch) -> list[_Rank]:
    """The rank whose collectives are begun is the last one that was made."""
    ranks: list[_Rank] = []
    for name in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "broadcast"):
        monkeypatch.setattr(dist, name, lambda *args, **kwargs: ranks[-1].begin(*args, **kwargs))
    monkeypatch.setattr(queued, "_is_capturing", lambda _: False)
    original = _Rank.__init__

    def init(self: _Rank, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.runtime.step.running = True
        ranks.append(self)

    monkeypatch.setattr(_Rank, "__init__", init)
    for variable in ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT"):
        monkeypatch.delenv(variable, raising=False)
    return ranks


EVERY_LAYER = [_Rank.sum, _Rank.gather_shards, _Rank.gather_activations]


@pytest.mark.parametrize("collective", EVERY_LAYER)
def test_the_host_goes_on_while_streams_wait_and_is_at_most_so_many_collectives_ahead(
    collective: Callable[[_Rank], None],
) -> None:
    rank = _Rank()
    for _ in range(MAX_BEHIND):
        collective(rank)
    assert rank.log == ["stream"] * MAX_BEHIND
    assert not any(work.looked for work in rank.works)
    for number in range(1, 30):
        collective(rank)
        assert rank.behind == MAX_BEHIND
        assert rank.works[number - 1].looked
        assert not rank.works[number].looked
    rank.queue.finish()
    assert rank.behind == 0


def test_all_layers_share_one_bound() -> None:
    rank = _Rank()
    for number in range(3 * MAX_BEHIND):
        EVERY_LAYER[number % len(EVERY_LAYER)](rank)
    assert rank.behind == MAX_BEHIND


@pytest.mark.parametrize("collective", EVERY_LAYER)
@pytest.mark.parametrize("failure", [LOST, FAILED], ids=["lost", "failed"])
def test_a_lost_rank_and_a_failed_step_are_named_by_who_would_get_too_far_ahead(
    collective: Callable[[_Rank], None], failure: RemoteError
) -> None:
    rank = _Rank(looks=10**9)
    for _ in range(MAX_BEHIND):
        collective(rank)
    rank.server.failure = failure
    with pytest.raises(type(failure), match=failure.message):
        collective(rank)
    with pytest.raises(type(failure), match=failure.message):
        rank.queue.finish()


def test_what_the_host_reads_has_ended() -> None:
    rank = _Rank()
    rank.collectives.maximum(torch.zeros(2))
    assert rank.works[0].looked > 3
    assert rank.log == ["done", "stream"]


def test_a_step_is_voted_for_when_all_collectives_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = _Rank()
    rank.sum()
    monkeypatch.setattr(voting, "exchange_in_step", lambda *_: rank.log.append("vote") or {})
    voting.vote(rank.runtime)
    assert rank.log == ["stream", "done", "stream", "vote"]


def test_where_no_stream_can_wait_the_host_does(monkeypatch: pytest.MonkeyPatch) -> None:
    by_gloo = _Rank("gloo")
    by_gloo.sum()
    assert by_gloo.log == ["done", "stream"]
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "1")
    blocking = _Rank()
    blocking.sum()
    assert blocking.log == ["done", "stream"]


def test_the_back_end_for_a_tensors_device_decides_and_not_the_device() -> None:
    both: Any = SimpleNamespace(_get_backend=lambda device: _Group("nccl" if device.type == "cuda" else "gloo"))
    assert orders_streams(both, CUDA)
    assert not orders_streams(both, torch.device("cpu"))
    assert not orders_streams(_Group("gloo"), CUDA)  # type: ignore[arg-type]


def test_for_a_tensor_on_the_cpu_the_host_waits_on_a_rank_with_a_gpu_too() -> None:
    rank, gloo = _Rank(), _Group("gloo")
    rank.group._get_backend = lambda device: gloo if device.type == "cpu" else rank.group  # type: ignore[method-assign]
    rank.collectives.wait(rank.collectives.sum(torch.zeros(4)))
    assert rank.log == ["done", "stream"]
    rank.sum()
    assert rank.log == ["done", "stream", "stream"]


def test_a_collective_that_only_another_rank_has_begun_is_begun_on_the_device_that_it_is_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rank, begun = _Rank(looks=0), []
    theirs = [("sum", 4, "float32", "cpu"), ("sum", 4, "float32", "cuda")]
    monkeypatch.setattr(collectives, "send_on", lambda *_: None)
    monkeypatch.setattr(collectives, "receive_on", lambda *_: theirs)
    monkeypatch.setattr(collectives, "device_here", lambda kind: torch.device("meta" if kind == "cuda" else kind))
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, **_: begun.append(tensor.device.type) or rank.begin())
    rank.collectives.abandon_step()
    assert begun == ["cpu", "meta"]


def test_a_collective_of_a_graph_is_not_asked_for_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = _Rank()
    monkeypatch.setattr(queued, "_is_capturing", lambda _: True)
    for _ in range(3 * MAX_BEHIND):
        rank.sum()
    assert not any(work.looked for work in rank.works)


def test_collectives_of_a_rank_that_is_gone_are_ended_for_a_script_that_waits_for_their_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rank = _Rank(looks=10**9)
    rank.sum()
    rank.queue.end_lost()
    rank.node.gone = True
    rank.queue.end_lost()
    assert rank.group.aborted == 0, "the script may see it by itself"
    monkeypatch.setattr(queued, "_UNSEEN_SECONDS", 0.0)
    for _ in range(2):
        rank.queue.end_lost()
    assert rank.group.aborted == 1
    rank.server.failure = LOST
    for use in (rank.queue.finish, rank.sum):
        with pytest.raises(PeerLostError, match="rank 1 has died"):
            use()


def test_an_ended_group_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = _Rank(looks=10**9)
    rank.sum()
    rank.node.gone = True
    monkeypatch.setattr(queued, "_UNSEEN_SECONDS", 0.0)
    rank.queue.end_lost()
    monkeypatch.setattr(queued, "raise_loss", lambda *_: None)
    with pytest.raises(ShardwrightError, match="the collectives of ranks \\[0, 1\\] were ended"):
        rank.sum()


def test_a_failed_step_ends_only_the_collectives_of_groups_that_are_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queued, "_UNSEEN_SECONDS", 0.0)
    rank = _Rank(looks=10**9)
    rank.server.failure = FAILED
    rank.sum()  # what the ranks have begun they settle
    rank.queue.end_lost()
    assert rank.group.aborted == 0
    rank.gather_activations()
    rank.queue.end_lost()
    assert rank.group.aborted == 1


def test_a_tensor_group_leaves_no_stream_behind_after_a_failed_step(monkeypatch: pytest.MonkeyPatch) -> None:
    rank, renewed = _Rank(looks=10**9), []
    back_end = rank.over_tensor_group()
    back_end._renewed = renewed.append
    back_end.all_reduce(torch.zeros(4))
    back_end._device = CUDA  # of a tensor that the fakes cannot make
    fresh: Any = _Group()
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda _: [0, 1])
    monkeypatch.setattr(dist, "new_group", lambda *_, **__: fresh)
    back_end.abandon_step()
    assert rank.group.aborted == 1
    back_end.begin_step()
    assert renewed == [fresh]


def test_the_undoing_of_a_failed_step_waits_for_no_stream_that_waits_for_a_tensor_group() -> None:
    rank = _Rank(looks=10**9)
    rank.gather_activations()
    rank.queue.abandon()
    assert rank.group.aborted == 1
    rank.queue.finish()
    done = _Rank(looks=0)
    done.gather_activations()
    done.queue.abandon()
    assert done.group.aborted == 0


def test_a_rank_that_leaves_ends_what_its_streams_still_wait_for() -> None:
    rank = _Rank(looks=10**9)
    rank.sum()
    rank.queue.abandon()
    rank.queue.leave()
    assert rank.group.aborted == 1
