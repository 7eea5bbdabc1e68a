"""Which modules may draw random numbers: their calls get seeds of their own under ``reproducible_rng``."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

#: Modules of torch defined here draw no random numbers, except those below.
_DETERMINISTIC_PACKAGES = frozenset(
    f"torch.nn.modules.{name}"
    for name in (
        *("activation", "batchnorm", "conv", "distance", "flatten", "fold", "linear", "loss", "normalization"),
        *("padding", "pixelshuffle", "pooling", "sparse", "upsampling"),
    )
)
_DRAWING = (LazyModuleMixin, nn.RReLU, nn.MultiheadAttention, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)
_STANDS_FOR = "_stands_for_drawing"


def may_draw(module: nn.Module) -> bool:
    """Return whether calls of a module get their own seed; the same on every rank before modules are partitioned.

    A module that has replaced another one answers as that one did, so that all that follows draws the same numbers.
    """
    if (answer := module.__dict__.get(_STANDS_FOR)) is not None:
        return bool(answer)
    if isinstance(module, _DRAWING):
        return True
    if type(module) is nn.Sequential:
        return any(may_draw(child) for child in module if child is not None)
    return type(module).__module__ not in _DETERMINISTIC_PACKAGES


def stand_for(substitute: nn.Module, module: nn.Module) -> None:
    """Make a module that replaces another one take the seeds that the other would take."""
    substitute.__dict__[_STANDS_FOR] = may_draw(module)
