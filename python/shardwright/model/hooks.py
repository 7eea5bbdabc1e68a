"""Hooks of a model that run once, and loads that wait until it is divided."""

from __future__ import annotations

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
        self._loads: list[tuple[str, Callable[[], None]]] = []

    def add(self, what: str, load: Callable[[], None]) -> None:
        """Add a load.

        Args:
            what: What is loaded, for errors.
            load: Loads the whole model.
        """
        self._loads.append((what, load))

    def forget(self) -> None:
        """Forget them: the model is divided."""
        self._loads.clear()

    def run(self, module: nn.Module) -> None:
        """Load the whole model now.

        Raises:
            ShardwrightError: It has parameters whose creation is delayed, which no rank has room for.
        """
        while self._loads:
            what, load = self._loads[0]
            if has_delayed(module):
                raise ShardwrightError(
                    f"the weights of {what} come with the first step, since the creation of parameters is delayed: "
                    "save, read and change them after it"
                )
            load()
            del self._loads[0]
