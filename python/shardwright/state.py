"""``smp.state``: read-only state of the library."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from shardwright.job.runtime import current_runtime
from shardwright.model.models import Models
from shardwright.model.translation import as_distributed, as_in_one_process, replaced

#: Takes a whole state dict, and returns it with other names and layouts.
Translation = Callable[[Mapping[str, Any]], dict[str, Any]]


class ModuleManager:
    """What is known of the modules of the job's models."""

    @property
    def translate_functions(self) -> list[tuple[Translation, Translation]]:
        """How whole state dicts of models with replaced modules are translated, a pair of functions for each model.

        The first takes ``model.state_dict()`` and returns the state dict of the model before tensor parallelism
        replaced its modules; the second is the way back. Both leave other entries as they are. Without replaced
        modules the list is empty.
        """
        modules = [model.module for model in current_runtime()[Models].alive]
        return [
            (functools.partial(as_in_one_process, module), functools.partial(as_distributed, module))
            for module in modules
            if any(True for _ in replaced(module))
        ]


class State:
    """Read-only state of the library. Its attributes raise ``ShardwrightError`` before ``smp.init``."""

    @property
    def cfg(self) -> Any:
        """The effective configuration, one attribute for each key."""
        return current_runtime().place.cfg

    @property
    def step(self) -> int:
        """The number of the current or last step, counted from 1."""
        return current_runtime().step.of_training

    @property
    def module_manager(self) -> ModuleManager:
        """What is known of the modules of the job's models."""
        current_runtime()
        return ModuleManager()


state = State()
