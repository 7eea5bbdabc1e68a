"""Ranks that wait for one another, or seem to: ``waiting.py SCENARIO...``; nothing is caught."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable

import common
import shardwright as smp
import torch
from common import say

LARGE_BYTES = 400_000_000


def state_dict_of_one_rank(job: common.TrainingJob) -> None:
    if smp.rank() == 0:
        job.model.state_dict()
    job.exact_step()


def step_of_one_rank(job: common.TrainingJob) -> None:
    if smp.rank() == smp.size() - 1:
        job.exact_step()
    smp.barrier()


def different_groups(job: common.TrainingJob) -> None:
    smp.barrier(smp.WORLD if smp.rank() else smp.MP_GROUP)
    smp.barrier()


def receive_in_a_circle(job: common.TrainingJob) -> None:
    smp.recv_from((smp.rank() + 1) % smp.size(), smp.RankType.WORLD_RANK)


def receive_in_forward(job: common.TrainingJob) -> None:
    common.fault.arm("second", "forward", lambda: smp.recv_from(0, smp.RankType.WORLD_RANK), 1)
    job.exact_step()


def slow_script(job: common.TrainingJob) -> None:
    if smp.rank() == 0:
        time.sleep(4)
    smp.barrier()
    job.exact_step()


def slow_module(job: common.TrainingJob) -> None:
    common.fault.arm("second", "forward", lambda: time.sleep(4), 1)
    job.exact_step()


def large_objects(job: common.TrainingJob) -> None:
    for turn in range(2):
        if smp.rank() == turn:
            smp.broadcast(torch.zeros(LARGE_BYTES, dtype=torch.uint8), smp.WORLD)
        else:
            smp.recv_from(turn, smp.RankType.WORLD_RANK)


def late_thread(job: common.TrainingJob) -> None:
    def send() -> None:
        time.sleep(4)
        smp.broadcast("late", smp.WORLD)

    if smp.rank() == 0:
        threading.Thread(target=send).start()
        smp.recv_from(1, smp.RankType.WORLD_RANK)
    else:
        smp.recv_from(0, smp.RankType.WORLD_RANK)
        if smp.rank() == 1:
            smp.send("answer", 0, smp.RankType.WORLD_RANK)


def busy(job: common.TrainingJob) -> None:
    """Every wait is short, but the ranks wait nearly all of the time."""
    for turn in range(10):
        if turn % smp.size() == smp.rank():
            time.sleep(0.4)
            smp.broadcast(turn, smp.WORLD)
        else:
            smp.recv_from(turn % smp.size(), smp.RankType.WORLD_RANK)


def state_dict_meets_a_receive(job: common.TrainingJob) -> None:
    if smp.rank() == 0:
        job.model.state_dict()
    else:
        smp.recv_from(0, smp.RankType.WORLD_RANK)


def state_dict_meets_a_step(job: common.TrainingJob) -> None:
    if smp.rank() == 0:
        job.model.state_dict()
    else:
        job.train(job.model, torch.ones(common.BATCH, common.WIDTH, dtype=torch.float64))


def on_after_a_stall(job: common.TrainingJob) -> None:
    """All ranks catch the error: what they do then is exact, however slow, and nothing of that which failed is left."""
    for stall in (state_dict_meets_a_receive, state_dict_meets_a_step):
        try:
            stall(job)
        except smp.ShardwrightError as error:
            say("raised", kind=type(error).__name__, text=str(error))
        else:
            raise AssertionError("no stall was found")
        if stall is state_dict_meets_a_step and smp.rank() == 0:
            try:  # the step that failed elsewhere, while this rank waited before it, fails here as well
                job.train(job.model, torch.ones(common.BATCH, common.WIDTH, dtype=torch.float64))
            except smp.ShardwrightError as error:
                say("raised again", kind=type(error).__name__)
        say("worst", errors=[job.exact_step() for _ in range(2)])
        common.fault.arm("second", "forward", lambda: time.sleep(1.2), 1)
        say("worst", errors=[job.exact_step()])
        common.fault.disarm()
        time.sleep(1.2 * (smp.rank() > 0))
        assert smp.allgather(smp.rank(), smp.WORLD) == list(range(smp.size()))
        saved = job.model.state_dict()
        for name, parameter in job.whole.named_parameters():
            assert torch.allclose(saved[name], parameter, rtol=1e-9), name


def barrier_meets_a_gather(job: common.TrainingJob) -> None:
    if smp.rank() == 0:
        smp.allgather({"loss": 1.0}, smp.WORLD)
    else:
        smp.barrier()


SCENARIOS: dict[str, Callable[[common.TrainingJob], None]] = {
    each.__name__.replace("_", " "): each
    for each in (
        state_dict_of_one_rank,
        step_of_one_rank,
        different_groups,
        receive_in_a_circle,
        receive_in_forward,
        slow_script,
        slow_module,
        large_objects,
        late_thread,
        busy,
        on_after_a_stall,
        barrier_meets_a_gather,
    )
}


def main() -> None:
    job = common.start(ddp=int(os.environ["WORLD_SIZE"]) > 2)
    job.exact_step()
    say("begins")
    try:
        for name in sys.argv[1:]:
            SCENARIOS[name](job)
    except smp.ShardwrightError as error:
        say("raised", kind=type(error).__name__, text=str(error))
        raise
    say("done")


if __name__ == "__main__":
    main()
