"""Traces a model with delayed parameters without their values."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from shardwright.delayed.shapes import as_shapes
from shardwright.partition.record import Trace
from shardwright.partition.trace import trace_forward
from shardwright.progress import Progress

_LOGGER = logging.getLogger("shardwright")


def trace_by_shapes(
    module: nn.Module,
    call: Callable[..., object],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    device: torch.device,
    measure_times: bool | None,
    measure_memory: bool,
    progress: Progress,
) -> Trace | None:
    """Trace one forward without the values of delayed parameters; see :func:`trace_forward`.

    Only what depends on no weight is computed. Operators are measured on `device`, one at a time. None if the forward
    cannot run so: its course depends on values that come from weights, say.
    """
    try:
        with as_shapes(module.parameters()):
            return trace_forward(
                module,
                call,
                args,
                kwargs,
                device=device,
                by_shapes=True,
                measure_times=measure_times,
                measure_memory=measure_memory,
                progress=progress,
            )
    except Exception as problem:
        _LOGGER.debug("the trace needs the values of delayed parameters: %r", problem)
        return None
