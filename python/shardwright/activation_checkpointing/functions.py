"""``smp.checkpoint`` and ``smp.checkpoint_sequential``: single calls that are checkpointed."""

from __future__ import annotations

from typing import Any

from torch import nn

from shardwright.activation_checkpointing.interception import is_sequence, region, run_in_groups
from shardwright.activation_checkpointing.marking import checked, refuse_unfit
from shardwright.activation_checkpointing.recompute import makes_graph, run_checkpointed
from shardwright.errors import ConfigError
from shardwright.frames.checkpointing import Checkpointing
from shardwright.frames.compiler import untraced
from shardwright.frames.guards import divided_modules
from shardwright.safe_repr import safe_repr


@untraced
def checkpoint(module: nn.Module, *args: Any, preserve_rng_state: bool = True, **kwargs: Any) -> Any:
    """Call a module that keeps only its arguments for the backward, which computes it again (interface 2.8.2).

    As for :func:`set_activation_checkpointing`, for this call only; the module may be on any rank, and on several.

    Args:
        module: The module.
        *args: Positional arguments of the module, of any structure.
        preserve_rng_state: Whether the second computation draws the random numbers of the first.
        **kwargs: Keyword arguments of the module, of any structure.

    Returns:
        What the module returns.

    Raises:
        ConfigError: The first argument is not a module that can be called, or ``preserve_rng_state`` is not a bool.
    """
    function = "smp.checkpoint"
    if not isinstance(module, nn.Module):
        raise ConfigError(
            f"{function} was given {safe_repr(module)}, a {type(module).__name__}; allowed: an nn.Module (for other "
            "functions: torch.utils.checkpoint.checkpoint)"
        )
    named = f"a {type(module).__name__}"
    checked(function, named, preserve_rng_state, False, "each")
    refuse_unfit(function, named, module)
    if not makes_graph():
        return module(*args, **kwargs)
    how = Checkpointing(isolated=True, preserves_rng_state=preserve_rng_state, group=0)
    if module not in divided_modules:
        return run_checkpointed([module], module, how, args, kwargs)
    with region(module, how):
        return module(*args, **kwargs)


@untraced
def checkpoint_sequential(
    sequential: nn.Sequential,
    input: Any,
    strategy: str = "each",
    preserve_rng_state: bool = True,
    pack_args_as_tuple: bool = False,
) -> Any:
    """Call an ``nn.Sequential``, parts of which are computed again in the backward (interface 2.8.2).

    Args:
        sequential: The module; its own hooks do not run.
        input: Its argument, of any structure; a tuple reaches the first child as it is.
        strategy: As for :func:`set_activation_checkpointing`.
        preserve_rng_state: Whether the second computation draws the random numbers of the first.
        pack_args_as_tuple: As for :func:`set_activation_checkpointing`.

    Returns:
        What the last child returns.

    Raises:
        ConfigError: The first argument is not an ``nn.Sequential``, or has a forward of its own; or another argument
            has an invalid value.
    """
    function = "smp.checkpoint_sequential"
    if not isinstance(sequential, nn.Module) or not is_sequence(sequential):
        raise ConfigError(
            f"{function} was given a {type(sequential).__name__}; allowed: an nn.Sequential that "
            "has no forward of its own"
        )
    group = checked(function, f"a {type(sequential).__name__}", preserve_rng_state, pack_args_as_tuple, strategy)
    forward: Any = sequential.forward
    if not makes_graph():
        return forward(input)
    how = Checkpointing(isolated=True, preserves_rng_state=preserve_rng_state, group=group)
    if sequential not in divided_modules:
        return run_in_groups(sequential, forward, how, (input,), {})
    with region(sequential, how):
        return forward(input)
