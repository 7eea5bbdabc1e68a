"""Joins modules that change state inside a checkpoint, which the backward recomputes, with all their submodules."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint

from shardwright.contents import INTERNAL
from shardwright.execution.kept import Attribute, Seen, seen_of
from shardwright.execution.placed import KeptState
from shardwright.frames.guards import GENERATOR
from shardwright.partition.decision import JoinReason
from shardwright.partition.observe import Stack
from shardwright.partition.tree import ModelTree, join_path
from shardwright.patches import replaced


class Recomputed:
    """Compares the state of modules before and after their code runs inside a checkpoint."""

    def __init__(self, tree: ModelTree, stack: Stack) -> None:
        """Start without any record."""
        self._tree = tree
        self._stack = stack
        self._depth = 0
        #: State of modules at the start of their code, with their paths, innermost last.
        self._before: list[tuple[str, list[tuple[Attribute, Seen]]]] = []
        #: Full names of attributes that changed inside a checkpoint, with the paths of the modules that hold them.
        self._changed: dict[str, str] = {}

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Detect the checkpoints that this thread enters."""
        original, function = getattr(torch_checkpoint, GENERATOR), torch_checkpoint.CheckpointFunction

        def generator(*args: Any, **kwargs: Any) -> Iterator[None]:
            if getattr(args[0], "isolated", False):  # a checkpoint that changes what modules keep once
                yield from original(*args, **kwargs)
                return
            with self._inside():
                yield from original(*args, **kwargs)

        def apply(*args: Any) -> Any:
            with self._inside():
                return function.apply(*args)  # type: ignore[no-untyped-call]

        with replaced(torch_checkpoint, {GENERATOR: generator, "CheckpointFunction": SimpleNamespace(apply=apply)}):
            yield

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        if not self._stack.here():
            yield
            return
        path, outside = self._stack.top.path, len(self._before)
        self._depth += 1
        self.called(path)
        try:
            yield
        finally:
            del self._before[outside + 1 :]
            self.returned(path)
            self._depth -= 1

    def called(self, path: str) -> None:
        """Record the start of a module's code."""
        if self._depth:
            module = self._tree.by_path[path].module
            names: list[str] = []
            if not isinstance(module, torch.jit.ScriptModule):  # never divided
                names = [*module._buffers, *(name for name in vars(module) if name not in INTERNAL)]
            self._before.append((path, [((module, name), seen_of((module, name))) for name in names]))

    def returned(self, path: str) -> None:
        """Record the end of a module's code. Modules inside it that raised an exception are skipped."""
        while self._depth and self._before:
            begun, held = self._before.pop()
            if begun != path:
                continue
            for place, seen in held:
                if not seen.is_like(seen_of(place)):
                    self._changed[join_path(path, place[1])] = path
            break

    def joins(self, kept: Iterable[KeptState]) -> Iterator[JoinReason]:
        """Yield joins of each such module with all its submodules.

        Only `kept` state counts: state that each forward sets anew is the same in the recomputation.
        """
        known = {name for state in kept for name in state.names}
        joined = set()
        for name, path in sorted(self._changed.items()):
            if name not in known or path in joined:
                continue
            joined.add(path)
            reason = f"changes {name} inside a checkpoint, which is computed again in the backward"
            for entry in self._tree.modules:
                if entry.path != path and entry.path.startswith(join_path(path, "")):
                    yield JoinReason(modules=(path, entry.path), reason=reason)
