"""Hooks of a model that run once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.utils.hooks import RemovableHandle

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
