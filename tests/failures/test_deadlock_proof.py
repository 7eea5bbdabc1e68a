"""The proof that ranks wait for one another: found for every order of messages, and never while one may go on."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import pytest
from shardwright import _core
from shardwright.stalls.wait_state import WaitState

#: After how long ranks compare their waits.
QUIET_SECONDS = 1.0
LOOKS = 400
GROUP = [0, 1]


class Ranks:
    """Ranks in one thread: looks and deliveries happen in any order, messages of two ranks in theirs."""

    def __init__(self, number: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.number = number
        self.now = 0.0
        self.queues: dict[tuple[int, int], deque[Any]] = {}
        self.state = [WaitState(None) for _ in range(number)]
        self.proofs = [_core.DeadlockDetector(rank, [r for r in range(number) if r != rank]) for rank in range(number)]

    def receive(self, rank: int, sender: int, announcement: Any) -> None:
        self.proofs[rank].receive(sender, announcement)

    def wait(self, rank: int, wait_id: int, **options: Any) -> None:
        self.state[rank] = WaitState(("wait", wait_id), **options)

    def happen(self) -> None:
        """One update or delivery."""
        self.now += 0.01
        waiting = [pair for pair, queue in self.queues.items() if queue]
        if waiting and self.random.random() < 0.5:
            sender, receiver = pair = self.random.choice(waiting)
            self.receive(receiver, sender, self.queues[pair].popleft())
            return
        rank = self.random.randrange(self.number)
        state = self.state[rank]._replace(last_checked=self.now - 0.001, seconds=QUIET_SECONDS)
        announcement = self.proofs[rank].update(*state, self.now, lambda: f"rank {rank}")
        for other in range(self.number) if announcement is not None else ():
            if other != rank:
                self.queues.setdefault((rank, other), deque()).append(announcement)

    @property
    def proven(self) -> list[bool]:
        return [proof.proof is not None for proof in self.proofs]


@pytest.mark.parametrize("number", [2, 3, 5])
@pytest.mark.parametrize("seed", range(20))
def test_ranks_that_all_wait_prove_it(number: int, seed: int) -> None:
    ranks = Ranks(number, seed)
    for rank in range(number):
        ranks.wait(rank, 1)
        for _ in range(ranks.random.randrange(20)):
            ranks.happen()
    for _ in range(LOOKS * number):
        ranks.happen()
    assert any(ranks.proven)
    proof = next(each.proof for each in ranks.proofs if each.proof is not None)
    assert proof == "\n".join(f"rank {rank}" for rank in range(number))


@pytest.mark.parametrize("number", [2, 3, 5])
@pytest.mark.parametrize("seed", range(20))
def test_waits_after_a_proof_are_proven_by_themselves(number: int, seed: int) -> None:
    """Whoever has raised goes on; the messages of the proof that still come say nothing of the waits that follow."""
    ranks = Ranks(number, seed)
    ended = 0
    for turn in range(1, 4):
        for rank in range(number):
            ranks.wait(rank, turn)
        while not any(ranks.proven):
            ranks.happen()
        ended, before = next(each.round for each in ranks.proofs if each.proof is not None), ended
        assert ended > before
        for rank in range(number):
            ranks.state[rank] = WaitState(None)
            ranks.proofs[rank].reset(ended)
        ranks.wait(0, turn)  # again, on this rank alone
        for _ in range(LOOKS):
            ranks.happen()
        assert not any(ranks.proven)


@pytest.mark.parametrize("number", [2, 3, 5])
@pytest.mark.parametrize("seed", range(20))
def test_nothing_is_proven_while_an_object_is_under_way(number: int, seed: int) -> None:
    """A token goes round among the announcements: who gets it goes on, and waits again."""
    ranks = Ranks(number, seed)
    marks = [1] * number
    for rank in range(1, number):
        ranks.wait(rank, 1)
    holder: int | None = 0
    receive_announcement = ranks.receive

    def receive(rank: int, sender: int, announcement: Any) -> None:
        nonlocal holder
        if announcement == "token":
            marks[rank] += 1
            ranks.state[rank] = WaitState(None)
            holder = rank
        else:
            receive_announcement(rank, sender, announcement)

    ranks.receive = receive  # type: ignore[method-assign]
    for _ in range(LOOKS * number):
        if holder is not None and ranks.random.random() < 0.1:
            target = ranks.random.choice([rank for rank in range(number) if rank != holder])
            ranks.queues.setdefault((holder, target), deque()).append("token")
            ranks.wait(holder, marks[holder])
            holder = None
        ranks.happen()
        assert not any(ranks.proven)


@pytest.mark.parametrize(("begun", "is_proven"), [(7, True), (8, False)])
def test_a_collective_that_all_have_begun_may_end_by_itself(begun: int, is_proven: bool) -> None:
    ranks = Ranks(2, 0)
    ranks.wait(0, 1, collective=(GROUP, 8), begun=[(GROUP, 8)])
    ranks.wait(1, 1, begun=[(GROUP, begun)])
    for _ in range(LOOKS):
        ranks.happen()
    assert any(ranks.proven) == is_proven


def test_a_rank_that_computes_holds_up_the_proof() -> None:
    ranks = Ranks(3, 0)
    ranks.wait(0, 1)
    ranks.wait(1, 1)
    for _ in range(LOOKS):
        ranks.happen()
    assert not any(ranks.proven)
    ranks.wait(2, 1)
    for _ in range(LOOKS):
        ranks.happen()
    assert any(ranks.proven)
