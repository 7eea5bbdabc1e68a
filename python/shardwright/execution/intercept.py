"""Interception of module calls: on a rank that does not own a module, a call of it sends a request to its owner."""

from __future__ import annotations

import functools
import itertools
import operator
import sys
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from shardwright.activation_checkpointing.interception import run_modules
from shardwright.errors import FrameError
from shardwright.execution.call import Link, RemoteModule, call_chain, call_remote


def make_remote(module: nn.Module, target: RemoteModule, check: Callable[[nn.Module], None]) -> None:
    """Make every call of a module a request to the rank that owns it.

    Replace both the compiled call and ``forward``, so that a ``__call__`` of a subclass and direct calls of
    ``forward`` are intercepted too. Direct calls of ``forward`` run no hooks on either rank.

    Args:
        module: The module on this rank, which does not own its parameters.
        target: The module on the rank that owns it.
        check: Raises if the module's parameters were swapped since this rank released them.
    """

    forward = module.forward

    def remote(*, hooks: bool) -> Callable[..., Any]:
        @functools.wraps(forward)
        def call(*args: Any, **kwargs: Any) -> Any:
            check(module)
            return call_remote(target, args, kwargs, hooks=hooks)

        call._torchdynamo_disable = True  # type: ignore[attr-defined]
        return call

    module._compiled_call_impl = remote(hooks=True)
    module.forward = remote(hooks=False)


def refuse_compiled(name: str, module: nn.Module) -> None:
    """Raise :class:`FrameError` if a module with parts on other ranks is compiled: its graph would bypass requests."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    wrapped = dynamo is not None and isinstance(module, dynamo.OptimizedModule)
    if module._compiled_call_impl is not None or wrapped:
        raise FrameError(
            f"module {name or type(module).__name__!r} is compiled, but parts of it live on other ranks: compile "
            "modules that lie entirely on one rank instead, with module.compile()"
        )


def group_sequential(
    module: nn.Sequential,
    target_of: Callable[[nn.Module], RemoteModule | None],
    remote_self: Callable[[int, list[nn.Module]], RemoteModule],
) -> None:
    """Send each run of consecutive children of an ``nn.Sequential`` that one rank owns as one request (appendix B).

    Children without parameters and buffers between two children of a run are included in it. If one run directly
    follows another, the first rank sends its result directly to the second, not through the caller.

    Args:
        module: An ``nn.Sequential`` that this rank runs itself, with children on other ranks.
        target_of: Returns the remote module of a child; None if the child runs on this rank.
        remote_self: Returns the ``nn.Sequential`` itself as a module of the given rank, which runs the given children.
    """
    if type(module).forward is not nn.Sequential.forward:
        return

    def rank_of(child: nn.Module) -> int | None:
        target = target_of(child)
        return None if target is None else target.rank

    runs = runs_of(module, rank_of)
    if all(rank is None for rank, _, _ in runs):
        return

    # In order: a chain of requests, or a range of children to call one by one.
    parts: list[list[Link] | tuple[int, int]] = []
    for is_remote, group in itertools.groupby(runs, lambda run: run[0] is not None):
        neighbours = list(group)
        if is_remote and (len(neighbours) > 1 or neighbours[0][2] - neighbours[0][1] > 1):
            parts.append(
                [(remote_self(rank, list(module)[start:end]), (start, end)) for rank, start, end in _remote(neighbours)]
            )
        else:
            parts += [(start, end) for _, start, end in neighbours]

    divided = list(module._modules.values())  # children() would omit repeated ones

    @functools.wraps(module.forward)
    def forward(input: Any) -> Any:
        children = list(module._modules.values())
        is_divided = len(children) == len(divided) and all(map(operator.is_, children, divided))
        for part in parts if is_divided else [(0, len(children))]:
            if isinstance(part, list):
                done = 0
                while done < len(part):
                    input, number = call_chain(part[done:], input)
                    done += number
            else:
                input = run_modules([child for child in children[part[0] : part[1]] if child is not None], input)
        return input

    module.forward = forward  # type: ignore[method-assign]


def _remote(runs: list[tuple[int | None, int, int]]) -> list[tuple[int, int, int]]:
    return [(rank, start, end) for rank, start, end in runs if rank is not None]


def runs_of(module: nn.Sequential, rank_of: Callable[[nn.Module], int | None]) -> list[tuple[int | None, int, int]]:
    """Return the runs in which the rank that runs an ``nn.Sequential`` executes its children.

    Args:
        module: The ``nn.Sequential``.
        rank_of: Returns the rank of a child; None if it runs on the rank that runs the ``nn.Sequential``.

    Returns:
        The runs ``(rank, start, end)``, where a rank of None is the rank itself. A run of another rank ends with a
        child that this rank owns.
    """
    runs: list[tuple[int | None, int, int]] = []
    light = 0  # number of children since the end of the last run that could be included in a longer one
    for index, child in enumerate(module._modules.values()):
        assert child is not None, "an nn.Sequential holds modules only"
        rank = rank_of(child)
        if rank is None and next(child.parameters(), None) is None and next(child.buffers(), None) is None:
            light += 1
            continue
        last = runs[-1] if runs else None
        if last is not None and last[0] == rank and rank is not None and last[2] == index - light:
            runs[-1] = (rank, last[1], index + 1)
        else:
            if light:
                runs.append((None, index - light, index))
            runs.append((rank, index, index + 1))
        light = 0
    end = len(module)
    if light:
        runs.append((None, end - light, end))
    return runs


def _prefixes(path: str) -> Iterator[str]:
    yield ""
    parts = path.split(".") if path else []
    for end in range(1, len(parts) + 1):
        yield ".".join(parts[:end])


def entered(path: str, modules: Mapping[str, nn.Module], here: Container[str]) -> nn.Module:
    """Return the module whose calls can be intercepted: the outermost compiled or scripted one around it, or itself."""
    for prefix in _prefixes(path):
        module = modules[prefix] if prefix in here else None
        if module is not None and (
            isinstance(module, torch.jit.ScriptModule)
            or module._compiled_call_impl is not None
            or "_orig_mod" in module._modules
        ):
            return module
    return modules[path]
