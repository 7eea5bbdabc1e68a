"""Random numbers that depend on the place in the model where they are drawn, not on the rank or the time.

The seed of the default generator identifies the place in the program. A module call starts from a seed derived from its
caller's seed, and after the call the caller continues from the next seed. Because the generator stores the seed, code
that saves and restores the generator's state, such as ``torch.utils.checkpoint``, preserves the place too.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardwright import _core
from shardwright.drawing import may_draw
from shardwright.execution import process

if TYPE_CHECKING:
    from shardwright.job.runtime import Runtime

_INTO, _PAST = 0, 1


def root_seed(seed: int, streams: Iterable[int], microbatch: int) -> int:
    """Return the seed with which the step function of a microbatch begins, in a step with these numbers."""
    return functools.reduce(_core.derive_seed, (*streams, microbatch), seed)


def microbatch_seed(runtime: Runtime, script_seed: int, microbatch: int, dp_rank: int | None = None) -> int:
    """Return the seed with which a microbatch of the current step begins.

    Args:
        runtime: This rank.
        script_seed: The seed that the script last set on the default generator; not used with ``reproducible_rng``.
        microbatch: The index of the microbatch on its rank. With ``reproducible_rng``, the seed depends on the
            data-parallel rank too.
        dp_rank: The index among the ranks that have different samples, with ``reproducible_rng``; None for this rank's.
    """
    place, step = runtime.place, runtime.step
    if not place.cfg.reproducible_rng:
        return root_seed(script_seed, step.streams, microbatch)
    replica = place.sample_ranks.index(place.rank) if dp_rank is None else dp_rank
    return root_seed(place.cfg.seed, step.streams, replica * step.num_microbatches + microbatch)


class _Own(threading.local):
    """What a thread knows of its place.

    Attributes:
        place: The seed that identifies the place, where the default generator is that of the script.
    """

    place: int | None = None


_own = _Own()


@contextmanager
def numbers_of_script(state: torch.Tensor) -> Iterator[None]:
    """Draw random numbers in the block, outside of modules, from a state of the default generator.

    Calls of modules leave that alone. The calling thread is that of a step function of one microbatch.
    """
    _own.place = place()
    torch.default_generator.set_state(state)
    try:
        yield
    finally:
        _own.place = None


def place() -> int:
    """Return the current seed, which identifies the place in the program."""
    return torch.default_generator.initial_seed() if _own.place is None else _own.place


def within(seed: int) -> int:
    """Return the seed with which a call at the place ``seed`` begins."""
    return _core.derive_seed(seed, _INTO)


def behind(seed: int, count: int) -> int:
    """Return the seed after ``count`` calls from the place ``seed``."""
    for _ in range(count):
        seed = _core.derive_seed(seed, _PAST)
    return seed


def pass_calls(seed: int, count: int) -> None:
    """Continue with the seed after ``count`` calls from the place ``seed``.

    After none, what has been drawn since the place began stays drawn.
    """
    if count and _own.place is not None:
        _own.place = behind(seed, count)
    elif count:
        process.seed(behind(seed, count))


def install(runtime: Runtime, modules: Iterable[nn.Module]) -> None:
    """Make every call of these modules inside a step start from its own seed, if the module may draw random numbers."""
    compiled: set[nn.Module] = set()
    for module in modules:
        if module in compiled or isinstance(module, torch.jit.ScriptModule) or not may_draw(module):
            continue
        if module._compiled_call_impl is not None:
            compiled.update(module.modules())  # they run in its graph
            module._compiled_call_impl = _seeded(runtime, module._compiled_call_impl)
        elif "forward" in module.__dict__:
            module.forward = _seeded(runtime, module.forward)
        else:
            # A bound method, so that a deep copy of the module runs the copy.
            module.forward = MethodType(_seeded(runtime, type(module).forward), module)


def _seeded(runtime: Runtime, forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def seeded(*args: Any, **kwargs: Any) -> Any:
        if not runtime.step.running or torch.compiler.is_compiling():
            return forward(*args, **kwargs)
        seed = place()
        state = None if _own.place is None else process.random_state()
        _own.place = None
        process.seed(within(seed))
        try:
            return forward(*args, **kwargs)
        finally:
            if state is not None:
                process.restore_random_state(state)
                _own.place = seed
            pass_calls(seed, 1)

    return seeded
