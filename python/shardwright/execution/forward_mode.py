"""Forward-mode differentiation. Torch has one level for the whole process, so no task may wait inside it.

If a task waited inside, another microbatch that entered it too would share the level: the first to leave would end it
for both, and the tangents of the other would be zeros. Tensors that are still on other ranks are therefore fetched
before a task enters it.
"""

from __future__ import annotations

from typing import Any

from torch.autograd import forward_ad

from shardwright.errors import FrameError
from shardwright.execution.task import RunningTask, running_task
from shardwright.frames.remote import bring
from shardwright.patches import original_of


def is_entered() -> bool:
    """Return whether the calling task is inside forward-mode differentiation; no other task can be while it runs."""
    return forward_ad._current_level >= 0


def check_wait(task: RunningTask | None) -> None:
    """Raise :class:`FrameError` if a task is about to wait for other ranks inside forward-mode differentiation."""
    if is_entered():
        who = "" if task is None else f" {task.describe()}"
        raise FrameError(
            f"a task{who} has to wait for another rank inside forward-mode differentiation, of which torch has one "
            "level for all microbatches: call model.backward outside it, and use results of modules elsewhere (for "
            "example by clone()) before"
        )


def _bring_all() -> None:
    task = running_task()
    if task is not None and not is_entered():
        for response in list(task.responses):
            bring(response.tensors)


def enter_dual_level() -> Any:
    """Fetch the task's tensors from other ranks, then call ``torch.autograd.forward_ad.enter_dual_level``."""
    _bring_all()
    return original_of(enter_dual_level)()


def enter_jvp_nesting() -> Any:
    """Fetch the task's tensors from other ranks, then enter the level of ``torch.func.jvp``."""
    # torch.func.jvp increments a counter of the process before it enters the level, so fetch before that.
    _bring_all()
    return original_of(enter_jvp_nesting)()
