"""A backward runs in the name of its task on all threads that autograd takes for it; that is seen without a device."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from shardwright.job.threads import set_task_of_thread, task_of_thread

from tests.jobs.patience import HANG_SECONDS

#: More backwards inside one another than torch runs on one thread.
DEPTH = 70


class Nested(torch.autograd.Function):
    """The identity, whose backward notes where it runs, and runs another backward of its kind."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, depth: int, notes: list[tuple[int, object]]) -> torch.Tensor:
        ctx.depth, ctx.notes = depth, notes
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.notes.append((threading.get_ident(), task_of_thread()))
        if ctx.depth:
            with torch.enable_grad():
                x = torch.ones(1, requires_grad=True)
                Nested.apply(x, ctx.depth - 1, ctx.notes).sum().backward()  # type: ignore[no-untyped-call]
        return gradients[0], None, None


def noted(task: object, together: threading.Barrier) -> list[tuple[int, object]]:
    """Where a deep backward of a thread with this task runs, and in whose name."""
    set_task_of_thread(task)
    notes: list[tuple[int, object]] = []
    x = torch.ones(1, requires_grad=True)
    y = Nested.apply(x, DEPTH, notes)  # type: ignore[no-untyped-call]
    together.wait(HANG_SECONDS)
    y.sum().backward()
    assert task_of_thread() is task
    set_task_of_thread(None)
    assert task_of_thread() is None
    return notes


def each_of_two_backwards_at_once_has_its_own_task_on_all_threads() -> None:
    tasks = ["one", "another"]
    together = threading.Barrier(len(tasks))
    with ThreadPoolExecutor(len(tasks)) as threads:
        found = list(threads.map(lambda task: noted(task, together), tasks))
    for task, notes in zip(tasks, found, strict=True):
        assert len(notes) == DEPTH + 1
        assert {name for _, name in notes} == {task}
        assert len({thread for thread, _ in notes}) > 1, "torch ran all of it on one thread: this shows nothing"


def a_thread_that_ends_leaves_what_it_ran_intact() -> None:
    """Torch drops a reference when a thread ends, which must be one of its own."""
    for _ in range(50):
        thread = threading.Thread(target=set_task_of_thread, args=(object(),))
        thread.start()
        thread.join()
    assert task_of_thread() is None


if __name__ == "__main__":
    each_of_two_backwards_at_once_has_its_own_task_on_all_threads()
    a_thread_that_ends_leaves_what_it_ran_intact()
    print("all hold")
