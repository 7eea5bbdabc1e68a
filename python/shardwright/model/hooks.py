"""Hooks of a model that run once, and loads that wait until it is divided."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from shardwright.delayed.materialise import has_delayed
from shardwright.errors import ShardwrightError

if TYPE_CHECKING:
    from shardwright.model.distributed import DistributedModel


class PostPartitionHooks:
    """Hooks that run once, as ``hook(model, optimizer)``."""

    def __init__(self) -> None:
        """Start without hooks."""
        self._hooks: OrderedDict[int, Callable[..., Any]] = OrderedDict()

    def register(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Add a hook."""
        handle = RemovableHandle(self._hooks)
        self._hooks[handle.id] = hook
        return handle

    def __bool__(self) -> bool:
        """Return whether any hook has not run yet."""
        return bool(self._hooks)

    def run(self, model: DistributedModel, optimizer: Any) -> None:
        """Run the hooks in order, and remove them."""
        hooks = list(self._hooks.values())
        self._hooks.clear()
        for hook in hooks:
            hook(model, optimizer)


class DeferredLoads:
    """Loads of weights that wait until the model is divided, when each rank reads its part.

    A script that reads or changes the weights before gets, on each rank, those of the whole model.
    """

    def __init__(self) -> None:
        """Start without loads."""
        self._loads: list[tuple[str, Callable[[], None] | None]] = []
        #: What is called for each of them once the model is divided, also if its weights have come before.
        self._divided: list[Callable[[], None]] = []
        self._runs = False
        self._versions: dict[str, int | None] = {}
        self._put_back: set[str] = set()

    def add(
        self, what: str, load: Callable[[], None] | None, module: nn.Module, load_divided: Callable[[], None]
    ) -> None:
        """Add a load.

        Args:
            what: What is loaded, for errors.
            load: Loads the whole model; None if only the part of this rank is known.
            module: The model.
            load_divided: Loads what is not loaded yet once the model is divided, before any hook of the script runs.
        """
        self._loads.append((what, load))
        self._divided.append(load_divided)
        self._versions = versions(module)

    def __bool__(self) -> bool:
        """Return whether a load waits, and is not under way."""
        return bool(self._loads) and not self._runs

    def finish(self) -> None:
        """Load into the model that is now divided, in the order of the loads; each runs, also if one before fails."""
        self._loads.clear()
        with contextlib.ExitStack() as stack:
            for load in reversed(self._divided):
                stack.callback(load)
            self._divided = []

    def begin_step(self, module: nn.Module) -> None:
        """Note which buffers nobody has written into, before a step that puts back those of a model if it fails."""
        self._put_back = {name for name, _ in module.named_buffers()} - set(self._changed(module)) if self else set()

    def undo_step(self, module: nn.Module) -> None:
        """Take what the library has just put back, into these buffers, for no change."""
        if self:
            self._versions |= {name: one for name, one in versions(module).items() if name in self._put_back}

    def _changed(self, module: nn.Module) -> list[str]:
        return [name for name, version in versions(module).items() if version != self._versions.get(name)]

    def check_unchanged(self, module: nn.Module) -> None:
        """Raise if somebody has written into the model since a load that is about to reach it, and would be undone.

        Raises:
            ShardwrightError: Somebody has.
        """
        if not self:
            return
        if changed := self._changed(module):
            more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            raise ShardwrightError(
                f"{changed[0]!r}{more} changed after {self._loads[-1][0]} was loaded and before the first step, in "
                "which the loaded values come and would undo the change: change it after that step, or change what "
                "model.parameters(), model.buffers() or model.get_module() of the smp.DistributedModel returns, which "
                "load first"
            )

    def settle(self, module: nn.Module) -> None:
        """Load the whole model now, for who is about to read or change it, unless its values come with the first step.

        Delayed parameters raise by themselves when they are read; the values of a rank's part have no place before.
        """
        if self and all(load is not None for _, load in self._loads) and not has_delayed(module):
            self.run(module)

    def run(self, module: nn.Module) -> None:
        """Load the whole model now.

        Raises:
            ShardwrightError: It has parameters whose creation is delayed, which no rank has room for, or only a part of
                it is known.
        """
        self.check_unchanged(module)
        while self:
            what, load = self._loads[0]
            if load is None or has_delayed(module):
                reason = "only this rank's part was given" if load is None else "the creation of parameters is delayed"
                raise ShardwrightError(
                    f"the weights of {what} come with the first step, since {reason}: save, read and change them after "
                    "it"
                )
            self._runs = True
            try:
                load()
            finally:
                self._runs = False
            del self._loads[0]


def versions(module: nn.Module) -> dict[str, int | None]:
    """How often each parameter and buffer has been written to; None where torch does not count."""
    tensors = (*module.named_parameters(), *module.named_buffers())
    return {name: None if tensor.is_inference() else tensor._version for name, tensor in tensors}
