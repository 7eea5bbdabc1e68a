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
from shardwright.stalls import lone_calls

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


def beside_a_thread(wait: Callable[[], object]) -> None:
    """A thread of the script's own runs, which might send what others wait for: that all wait proves nothing then."""
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()
    try:
        wait()
    finally:
        ended.set()
        thread.join()


def save_of_one_rank(job: common.TrainingJob) -> None:
    def wait() -> None:
        if smp.rank() == 0:
            smp.save_checkpoint(f"/nowhere-{os.getpid()}", "a")
        job.exact_step()

    beside_a_thread(wait)


def save_of_the_last_rank(job: common.TrainingJob) -> None:
    def wait() -> None:
        if smp.rank() == smp.size() - 1:
            smp.save_checkpoint(f"/nowhere-{os.getpid()}", "a")
        job.exact_step()

    beside_a_thread(wait)


def save_meets_a_state_dict(job: common.TrainingJob) -> None:
    beside_a_thread(lambda: job.model.state_dict() if smp.rank() else smp.save_checkpoint("/nowhere", "a"))


def save_at_the_end(job: common.TrainingJob) -> None:
    if smp.rank() == 0:
        smp.save_checkpoint(f"/nowhere-{os.getpid()}", "a")


def slow_evaluation(job: common.TrainingJob) -> None:
    """Rank 1 comes late to each call, and is named; nothing is raised."""
    lone_calls.WARN_SECONDS = 1.0

    def wait() -> None:
        if smp.rank() == 1:
            time.sleep(4)
        assert smp.allgather(smp.rank(), smp.WORLD) == list(range(smp.size()))
        job.exact_step()

    beside_a_thread(wait)
    wait()


def on_after_a_lone_save(job: common.TrainingJob) -> None:
    """All ranks catch the error, and what they do then is exact."""
    for turn in range(2):
        try:
            beside_a_thread(lambda: save_meets_a_step(job))
        except smp.ShardwrightError as error:
            say("raised", kind=type(error).__name__, text=str(error), notes=getattr(error, "__notes__", []))
        else:
            raise AssertionError("no lone call was found")
        if smp.rank() == 0:
            try:  # the step that failed elsewhere, while this rank waited before it, fails here as well
                job.train(job.model, torch.ones(common.BATCH, common.WIDTH, dtype=torch.float64))
            except smp.ShardwrightError as error:
                say("raised again", kind=type(error).__name__)
        assert smp.allgather(turn + smp.rank(), smp.WORLD) == [turn + rank for rank in range(smp.size())]
        say("worst", errors=[job.exact_step() for _ in range(2)])


def save_meets_a_step(job: common.TrainingJob) -> None:
    if smp.rank() == 0:
        smp.save_checkpoint(f"/nowhere-{os.getpid()}", "a")
    else:
        job.train(job.model, torch.ones(common.BATCH, common.WIDTH, dtype=torch.float64))


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
        save_of_one_rank,
        save_of_the_last_rank,
        save_meets_a_state_dict,
        save_at_the_end,
        slow_evaluation,
        on_after_a_lone_save,
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
        say("raised", kind=type(error).__name__, text=str(error), notes=getattr(error, "__notes__", []))
        raise
    say("done")


if __name__ == "__main__":
    main()
