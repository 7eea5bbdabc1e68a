"""The task of a thread, also where autograd's engine runs parts of its backward on other threads."""

from __future__ import annotations

import ctypes
import threading

import torch

_NAME = "shardwright.thread"


class _Running:
    """What a thread runs."""

    __slots__ = ("task",)
    #: The task that it runs; None outside a step.
    task: object | None


class _Own(threading.local):
    #: Of a thread that has run a task; None for others, such as the script's own and those of autograd's engine.
    running: _Running | None = None


_own = _Own()


def task_of_thread() -> object | None:
    """Return the task that the calling thread runs; None outside a step, and in the script's own thread.

    Torch carries its thread-local objects to the threads on which the autograd engine runs nodes of a backward, so
    there it is the task that called the engine.
    """
    running = _own.running
    if running is None and torch._C._is_key_in_tls(_NAME):
        running = torch._C._get_obj_in_tls(_NAME)
    return None if running is None else running.task


def set_task_of_thread(task: object | None) -> None:
    """Set the task of the calling thread."""
    running = _own.running
    if running is None:
        running = _own.running = _Running()
        # Torch takes over a reference, without making one of its own (2.11), and drops it when the thread ends.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(running))
        torch._C._stash_obj_in_tls(_NAME, running)
    running.task = task
