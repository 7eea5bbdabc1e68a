"""Random numbers in one process, drawn as on the ranks of a job.

The library starts each request to another rank from its own seed, derived from the caller's position; see
:mod:`shardwright.execution.reproducible`. The division of the model is known, so one process can use the same seeds.
Dropout then drops the same elements on both sides.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from shardwright.execution import process, reproducible
from shardwright.execution.intercept import runs_of
from shardwright.partition.decision import Decision


class KeyedCalls:
    """Seeds those calls in a whole model that are requests in the divided model."""

    def __init__(self) -> None:
        """Start in the step function, on the first rank of the pipeline."""
        self._ranks = [0]

    def install(self, modules: Mapping[str, nn.Module], decision: Decision) -> None:
        """Intercept every call of the modules of a copy. The interception is not removed."""
        owners: dict[nn.Module, int] = {
            module: decision.modules[path]
            for path, module in modules.items()
            if path in decision.modules and path not in decision.follows
        }
        for module in modules.values():
            if isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward:
                module.forward = functools.partial(self._run_sequential, module, owners)  # type: ignore[method-assign]
            if module not in owners or isinstance(module, torch.jit.ScriptModule):
                continue
            call, forward = module._call_impl, module.forward
            module.__dict__["_compiled_call_impl"] = functools.partial(self._call, owners[module], call)
            module.__dict__["forward"] = functools.partial(self._call, owners[module], forward)

    def _call(self, owner: int, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._ranks[-1] == owner:
            return run(*args, **kwargs)
        with self._request_to(owner):
            return run(*args, **kwargs)

    @contextmanager
    def _request_to(self, rank: int) -> Iterator[None]:
        seed, before = reproducible.place(), process.random_state()
        process.seed(reproducible.within(seed))
        self._ranks.append(rank)
        try:
            yield
        finally:
            self._ranks.pop()
            process.restore_random_state(before)
            reproducible.pass_calls(seed, 1)

    def _run_sequential(self, module: nn.Sequential, owners: Mapping[nn.Module, int], input: Any) -> Any:
        """Run an ``nn.Sequential`` as in the divided model: consecutive children of one other rank are one request."""
        here = self._ranks[-1]
        children = list(module._modules.values())

        def elsewhere(child: nn.Module) -> int | None:
            owner = owners.get(child, here)
            return None if owner == here else owner

        for rank, start, end in runs_of(module, elsewhere):
            if rank is not None and end - start > 1:
                with self._request_to(rank):
                    input = _through(children[start:end], input)
            else:
                input = _through(children[start:end], input)
        return input


def _through(children: Sequence[nn.Module | None], value: Any) -> Any:
    for child in children:
        assert child is not None, "an nn.Sequential holds modules only"
        value = child(value)
    return value
