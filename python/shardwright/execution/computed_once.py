"""Code that is not recomputed, because its checkpoint is applied to the modules called in it instead."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from shardwright.activation_checkpointing.recompute import run_checkpointed
from shardwright.errors import FrameError
from shardwright.execution.kept import Attribute, Seen, Watch, seen_of
from shardwright.execution.task import RunningTask, running_task
from shardwright.frames import current_frame
from shardwright.frames.guards import divided_modules

_HINT = "or place it on one rank with smp.set_partition"


class ComputedOnce:
    """Raise :class:`FrameError` if code that is not recomputed changes the state of its own module.

    The state of other modules called in the code is not checked: those modules are recomputed. Used as a context
    manager around the code.
    """

    def __init__(self, places: Mapping[nn.Module, list[Attribute]], watch: Watch) -> None:
        """Create the context manager.

        Args:
            places: The attributes that hold the state of the local modules.
            watch: Names the modules and attributes in errors.
        """
        self._places = places
        self._watch = watch
        self._task: RunningTask | None = None
        self._module: nn.Module | None = None
        self._seen: list[tuple[Attribute, Seen]] = []

    def __enter__(self) -> None:
        """Record the state of the module that runs the code, unless another such region is already entered."""
        task = running_task()
        if task is None or not task.inside or task.computed_once is not None or not torch.is_grad_enabled():
            return
        module = task.inside[-1]
        if module in self._places:
            self._task, self._module, task.computed_once = task, module, self
            self.begin()

    def begin(self) -> None:
        """Record the module's current state, for :meth:`check` to compare with."""
        assert self._module is not None, "it has been entered"
        self._seen = [(place, seen_of(place)) for place in self._places[self._module]]

    def check(self) -> None:
        """Raise :class:`FrameError` if the state has changed since :meth:`begin`."""
        for place, seen in self._seen:
            if not seen.is_like(seen_of(place)):
                assert self._module is not None, "something has been seen"
                raise FrameError(
                    f"module {self._watch.path_of(self._module)!r} has parts on other ranks, and changed "
                    f"{self._watch.name_of(*place)} inside a checkpoint around code of its own: one process would "
                    "compute that again in the backward, and change it once more. Change it outside the checkpoint, "
                    f"{_HINT}"
                )

    def __exit__(self, kind: object, *_: object) -> None:
        """Check the state, unless an exception is being raised."""
        if self._task is not None:
            self._task.computed_once = None
            if kind is None:
                self.check()


def run_inside_checkpoint(
    module: nn.Module, path: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
) -> Any:
    """Run a module that keeps state; inside a checkpoint that is applied to the modules in it, run it checkpointed.

    Raises:
        FrameError: The module has parts on other ranks and is called inside such a checkpoint.
    """
    frame = current_frame()
    how = None if frame is None else frame.checkpointing
    if frame is None or how is None or how.isolated or not torch.is_grad_enabled():
        return call(*args, **kwargs)
    if module in divided_modules:
        raise FrameError(
            f"module {path!r} keeps something, has parts on other ranks, and is called inside a checkpoint: one "
            "process would compute it again in the backward, and change what it keeps once more. Checkpoint modules "
            f"that lie entirely on a rank instead, {_HINT}"
        )
    task = running_task()
    once = None if task is None else task.computed_once
    if once is not None:
        once.check()
    frame.checkpointing = None
    try:
        return run_checkpointed([module], call, how, args, kwargs)
    finally:
        frame.checkpointing = how
        if once is not None:
            once.begin()
