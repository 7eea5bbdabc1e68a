"""``smp.set_activation_checkpointing``."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from shardwright import logs
from shardwright.activation_checkpointing.interception import intercept_marked, is_sequence
from shardwright.errors import ConfigError
from shardwright.frames import current_frame
from shardwright.frames.checkpointing import Checkpointing, clear_mark, set_mark
from shardwright.job.runtime import find_runtime
from shardwright.job.wrapped import WrappedModels
from shardwright.safe_repr import safe_repr

_GROUP = re.compile(r"group_([1-9][0-9]{0,8})")
_STRATEGIES = "'each', 'contiguous', and 'group_k' with a number k from 1"


def set_activation_checkpointing(
    module: nn.Module, preserve_rng_state: bool = True, pack_args_as_tuple: bool = False, strategy: str = "each"
) -> None:
    """Have a module keep only its arguments for the backward, which computes the module again (interface 2.8.2).

    Gradients, random numbers and what modules keep (buffers, counters) are those of a run without checkpointing. Call
    it in the same way on every rank, outside of step functions, before or after ``smp.DistributedModel`` wraps the
    module. A module may have parts on several ranks: each rank computes its own parts again.

    Args:
        module: A module of the model, or the ``smp.DistributedModel`` itself. Of an ``nn.ModuleList``, which is never
            called, each module is marked by itself, whatever the strategy.
        preserve_rng_state: Whether the second computation draws the random numbers of the first. False saves keeping
            the generators' states; results are then only right if the module draws none.
        pack_args_as_tuple: Only for an ``nn.Sequential`` whose children take a tuple. Tuples always reach the children
            as they are, so that either value gives the same.
        strategy: Only for an ``nn.Sequential``: what is computed again at a time. ``"each"``: each child by itself;
            ``"contiguous"``: all consecutive children that one rank runs; ``"group_k"``, such as ``"group_2"``: k
            consecutive children, fewer where another rank follows.

    Raises:
        ConfigError: An argument has an invalid value; or the module is a container that is never called; or it is not
            an ``nn.Sequential`` and an argument is only for those; or a step function is running.
    """
    function = "smp.set_activation_checkpointing"
    if not isinstance(module, nn.Module):
        raise ConfigError(f"{function} was given {safe_repr(module)}, a {type(module).__name__}; allowed: an nn.Module")
    runtime = find_runtime()
    models = runtime[WrappedModels].alive if runtime is not None else []
    # The hooks after a partition run inside the first step, but in no code of it.
    if runtime is not None and runtime.step.running and (runtime.place.pp_size == 1 or current_frame() is not None):
        raise ConfigError(
            f"{function} was called for a {type(module).__name__} inside a step: call it between steps, on every rank"
        )
    wrapped: dict[int, nn.Module] = {id(model): model.module for model in models}
    module = wrapped.get(id(module), module)
    named = _named(module, models)
    group = checked(function, named, preserve_rng_state, pack_args_as_tuple, strategy)
    if type(module) is nn.ModuleList:
        if group != 1:
            logs.warn_once(
                f"{function}: strategy {strategy!r} of {named}, which is never called itself: its modules are "
                "checkpointed one by one"
            )
        for child in module:
            set_activation_checkpointing(child, preserve_rng_state)
        return
    refuse_unfit(function, named, module)
    if not is_sequence(module):
        given = {"strategy": (strategy, "each"), "pack_args_as_tuple": (pack_args_as_tuple, False)}
        for name, (value, default) in given.items():
            if value != default:
                raise ConfigError(
                    f"{function}: {name} is {value!r} for {named}, which is not an nn.Sequential (or has a forward of "
                    f"its own); allowed there: {default!r}"
                )
        set_mark(module, Checkpointing(isolated=True, preserves_rng_state=preserve_rng_state, group=0))
    else:
        clear_mark(module)
        for child in module.children():
            clear_mark(child)
            if group == 1:
                set_mark(child, Checkpointing(isolated=True, preserves_rng_state=preserve_rng_state, group=0))
        if group != 1:
            set_mark(module, Checkpointing(isolated=True, preserves_rng_state=preserve_rng_state, group=group))
    for model in models:
        if model.placement.partitioned:
            intercept_marked(part for _, part in model.placement.local_named_modules())


def checked(function: str, named: str, preserve_rng_state: object, pack_args_as_tuple: object, strategy: object) -> int:
    """Check the arguments of a function, and return the number of children of a group; 0 for all.

    Raises:
        ConfigError: One has an invalid value.
    """
    for name, value in (("preserve_rng_state", preserve_rng_state), ("pack_args_as_tuple", pack_args_as_tuple)):
        if not isinstance(value, bool):
            raise ConfigError(f"{function}: {name} is {safe_repr(value)} for {named}; allowed: True and False")
    match = _GROUP.fullmatch(strategy) if isinstance(strategy, str) else None
    if match is None and strategy not in ("each", "contiguous"):
        raise ConfigError(f"{function}: strategy is {safe_repr(strategy)} for {named}; allowed: {_STRATEGIES}")
    if match is not None:
        return int(match[1])
    return 1 if strategy == "each" else 0


def refuse_unfit(function: str, named: str, module: nn.Module) -> None:
    """Raise :class:`ConfigError` if a module is never called itself, or TorchScript compiles parts of it."""
    for name, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            where = f"part {name!r} of it" if name else "it"
            raise ConfigError(
                f"{function} was given {named}, and {where} is compiled by TorchScript, which computes in other ways "
                "from one call to the next: what it keeps for the backward cannot be computed again. Give it the "
                "modules around such parts, each by itself, or leave them uncompiled"
            )
    if type(module).forward is nn.Module.forward and "forward" not in vars(module):
        raise ConfigError(
            f"{function} was given {named}, which has no forward and is never called: give it the modules in it, each "
            "by itself, or an nn.Sequential"
        )


def _named(module: nn.Module, models: list[Any]) -> str:
    for model in models:
        for name, part in model.module.named_modules():
            if part is module and name:
                return f"module {name!r} (a {type(module).__name__})"
    return f"a {type(module).__name__}"
