"""Calls of modules that are checkpointed: those that are marked, and those called in one with parts elsewhere."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

from torch import nn

from shardwright.activation_checkpointing.children import children_of, grouped
from shardwright.activation_checkpointing.recompute import Run, entered, makes_graph, run_checkpointed
from shardwright.frames import current_frame
from shardwright.frames.checkpointing import Checkpointing, mark_of
from shardwright.frames.guards import divided_modules

_intercepted: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def intercept_marked(modules: Iterable[nn.Module]) -> None:
    """Intercept the calls of those modules that are marked; they must run on this rank."""
    for module in modules:
        if mark_of(module) is not None:
            _intercept(module)


def is_sequence(module: nn.Module) -> bool:
    """Return whether a module calls its children one after another, as ``nn.Sequential`` does."""
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def _intercept(module: nn.Module) -> None:
    """Intercept the calls of a module: of its forward, so that its own hooks run once, unless it is compiled."""
    if module in _intercepted:
        return
    _intercepted.add(module)
    compiled = module._compiled_call_impl
    if _is_compiled(compiled):
        call: Any = compiled

        def called(own: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return _called(own, call, args, kwargs, is_whole=True)

        object.__setattr__(module, "_compiled_call_impl", MethodType(called, module))
        return
    # Pass the module as an argument if possible, so that a deep copy of the module runs the copy.
    own_forward = module.__dict__.get("forward")
    bound = own_forward is None or getattr(own_forward, "__self__", None) is module
    forward: Any = own_forward if not bound else getattr(own_forward, "__func__", type(module).forward)

    @functools.wraps(forward)
    def forwarded(own: nn.Module, *args: Any, **kwargs: Any) -> Any:
        run = MethodType(forward, own) if bound else forward
        return _called(own, run, args, kwargs)

    forwarded._torchdynamo_disable = True  # type: ignore[attr-defined]  # code that is compiled around it calls it
    object.__setattr__(module, "forward", MethodType(forwarded, module))  # also in the code of a step


def _is_compiled(call: Any) -> bool:
    return call is not None and (hasattr(call, "_torchdynamo_orig_callable") or getattr(call, "is_compiled", False))


def _called(
    module: nn.Module, run: Run, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, is_whole: bool = False
) -> Any:
    if not makes_graph():
        return run(*args, **kwargs)
    if entered.module is module:  # the call of it is a checkpoint already
        entered.module = None
        return run(*args, **kwargs)
    how = mark_of(module)
    if how is None:
        region = isolating_region()
        if region is None:
            return run(*args, **kwargs)
        how = region._replace(group=0)
    if is_sequence(module) and how.group and module not in divided_modules and not is_whole:
        return run_in_groups(module, run, how, args, kwargs)
    return checkpointed(module, run, how, args, kwargs)


def checkpointed(
    module: nn.Module, run: Run, how: Checkpointing, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Run a module checkpointed; if it has parts on other ranks, each rank computes its own parts again.

    Args:
        module: The module, which runs on this rank.
        run: The function that runs it.
        how: How it is checkpointed.
        args: Positional arguments.
        kwargs: Keyword arguments.
    """
    if module not in divided_modules:
        return run_checkpointed([module], run, how, args, kwargs)
    with region(module, how):
        return run(*args, **kwargs)


def isolating_region() -> Checkpointing | None:
    """Return how modules called now are checkpointed because a module around them with parts elsewhere is."""
    frame = current_frame()
    how = None if frame is None else frame.checkpointing
    return how if how is not None and how.isolated else None


@contextmanager
def region(module: nn.Module, how: Checkpointing) -> Iterator[None]:
    """Have the modules that a module with parts on other ranks calls in the block be checkpointed where they run."""
    frame = current_frame()
    if frame is None or not makes_graph():
        yield
        return
    _intercept_parts(module, set())
    before, frame.checkpointing = frame.checkpointing, how
    try:
        yield
    finally:
        frame.checkpointing = before


def _intercept_parts(module: nn.Module, seen: set[nn.Module]) -> None:
    """Intercept the outermost modules inside a module that lie entirely on this rank."""
    for child in module.children():
        if child in seen:
            continue
        seen.add(child)
        if child in divided_modules:
            _intercept_parts(child, seen)
        elif (
            next(child.children(), None) is not None
            or next(child.parameters(), None) is not None
            or not type(child).__module__.startswith("torch.nn.modules.")
        ):
            _intercept(child)


def in_groups(modules: Sequence[nn.Module], group: int) -> Iterator[list[nn.Module]]:
    """Yield groups of consecutive modules that lie entirely on this rank, and the other modules one by one.

    Args:
        modules: The modules.
        group: The size of a group; 0 for as many as there are.
    """
    gathered: list[nn.Module] = []
    for module in modules:
        if module in divided_modules:
            if gathered:
                yield gathered
            yield [module]
            gathered = []
            continue
        gathered.append(module)
        if len(gathered) == group:
            yield gathered
            gathered = []
    if gathered:
        yield gathered


def run_modules(modules: Sequence[nn.Module], value: Any) -> Any:
    """Run consecutive children of an ``nn.Sequential``, checkpointed in groups if one around them asks for it."""
    how = isolating_region()
    if how is None or not makes_graph():
        for module in modules:
            value = module(value)
        return value
    for group in in_groups(modules, how.group):
        value = group[0](value) if len(group) == 1 else run_checkpointed(group, _one_by_one(group), how, (value,), {})
    return value


def _one_by_one(modules: Sequence[nn.Module]) -> Run:
    def run(value: Any) -> Any:
        for module in modules:
            value = module(value)
        return value

    return run


class _Group(nn.Module):
    """Consecutive children of an ``nn.Sequential`` in the place of which it stands."""

    def __init__(self, modules: list[nn.Module], how: Checkpointing) -> None:
        super().__init__()
        self._modules.update({str(index): module for index, module in enumerate(modules)})
        self._group, self._how = tuple(modules), how

    def __call__(self, value: Any) -> Any:
        """Run the group as no module: it is none of the model's, and hooks of all modules do not see it."""
        return run_checkpointed(self._group, _one_by_one(self._group), self._how, (value,), {})


def run_in_groups(
    module: nn.Module, run: Run, how: Checkpointing, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Run an ``nn.Sequential`` that lies entirely on this rank, with its children checkpointed in groups.

    Its own forward runs, which may have been replaced, for example to give each of its calls random numbers of its own.
    """
    children = [child for child in children_of(module).values() if child is not None]
    with grouped(module, [_Group(group, how) for group in in_groups(children, how.group)]):
        return run(*args, **kwargs)


def execute(
    modules: Sequence[nn.Module],
    call_of: Callable[[nn.Module], Run],
    how: Checkpointing,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run modules one after another, checkpointed, for another rank in whose code a checkpoint is open.

    Args:
        modules: The modules.
        call_of: Returns the function that runs a module.
        how: How they are checkpointed.
        args: Positional arguments of the first.
        kwargs: Keyword arguments of the first.
    """
    value = None
    for group in in_groups(modules, how.group if len(modules) > 1 else 1):
        if len(group) == 1 and not how.isolated:
            value = run_checkpointed(group, call_of(group[0]), how, args, kwargs)
        elif len(group) == 1:
            value = checkpointed(group[0], call_of(group[0]), how, args, kwargs)
        else:
            calls = [call_of(module) for module in group]
            value = run_checkpointed(group, _chained(calls), how, args, kwargs)
        args, kwargs = (value,), {}
    return value


def _chained(calls: Sequence[Run]) -> Run:
    def run(*args: Any, **kwargs: Any) -> Any:
        value = calls[0](*args, **kwargs)
        for call in calls[1:]:
            value = call(value)
        return value

    return run
