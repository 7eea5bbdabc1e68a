"""How modules are checkpointed, and the mark that says so of a module."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

#: An attribute of the module, so that copies of the module have it too.
_MARK = "_smp_activation_checkpointing"


class Checkpointing(NamedTuple):
    """How modules are checkpointed. Requests to other ranks carry it as a tuple.

    Attributes:
        isolated: Whether what modules keep changes in the first computation only, as without a checkpoint; False for a
            checkpoint of PyTorch, which changes it in the second computation too.
        preserves_rng_state: Whether the second computation draws the random numbers of the first.
        group: How many consecutive children of an ``nn.Sequential`` are one checkpoint; 0 for all.
    """

    isolated: bool
    preserves_rng_state: bool
    group: int


#: A checkpoint of the script's own, around code that calls modules on other ranks.
OF_THE_SCRIPT = Checkpointing(isolated=False, preserves_rng_state=True, group=1)


def mark_of(module: nn.Module) -> Checkpointing | None:
    """Return how a module is marked to be checkpointed; None if it is not."""
    mark: Checkpointing | None = module.__dict__.get(_MARK)
    return mark


def clear_mark(module: nn.Module) -> None:
    """Remove the mark of a module."""
    module.__dict__.pop(_MARK, None)


def set_mark(module: nn.Module, how: Checkpointing) -> None:
    """Mark a module; the last mark counts."""
    module.__dict__[_MARK] = how  # past the observers of attributes that forwards set
