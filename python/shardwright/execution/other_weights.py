"""Weights replaced for one call (``torch.func.functional_call``), which no other microbatch may see."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from shardwright.execution.task import RunningTask, may_overlap, running_task, state_write
from shardwright.frames.remote import bring
from shardwright.patches import original_of


def reparametrize_module(*args: Any, **kwargs: Any) -> contextlib.AbstractContextManager[None]:
    """Fetch the task's tensors from other ranks, then call ``torch.nn.utils.stateless._reparametrize_module``."""
    task = running_task()
    if task is None:
        given: contextlib.AbstractContextManager[None] = original_of(reparametrize_module)(*args, **kwargs)
        return given
    return _exchanged(task, args, kwargs)


@contextlib.contextmanager
def _exchanged(task: RunningTask, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
    for response in list(task.responses):
        bring(response.tensors)
    with original_of(reparametrize_module)(*args, **kwargs):
        task.other_weights += 1
        try:
            yield
        finally:
            task.other_weights -= 1


def check_wait(task: RunningTask | None) -> None:
    """Raise :class:`StateWriteError` if a task is about to wait while a module's weights are replaced."""
    if task is not None and task.other_weights and may_overlap(task.runtime):
        raise state_write(
            task,
            "a task waits for another rank inside torch.func.functional_call: other microbatches would find the "
            "weights that it has exchanged",
        )
