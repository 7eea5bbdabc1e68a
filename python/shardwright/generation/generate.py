"""``model.generate`` outside of step functions: a step of its own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils._pytree import tree_map

from shardwright.caches import CacheTable
from shardwright.execution.reproducible import numbers_of_script
from shardwright.generation.batches import Part, Parts, joined, padding_of
from shardwright.generation.draws import drawing
from shardwright.job.runtime import current_runtime
from shardwright.model import DistributedModel
from shardwright.step import StepFunction, StepOutput, step

Context = Callable[[], AbstractContextManager[Any]]


def generate(
    model: DistributedModel, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, within: Context = nullcontext
) -> Any:
    """Generate for a batch, as one process would. All ranks of the pipeline call this, with the same batch.

    Sequences run in as many microbatches as the configuration has, so that ranks compute at the same time; in a single
    one where code is called that looks at all of them.

    Args:
        model: The divided model.
        args: Arguments of its ``generate``.
        kwargs: Keyword arguments of it.
        within: What it is called in.

    Returns:
        What ``generate`` returns, on all ranks.
    """
    place = current_runtime().place
    parts = Parts(args, kwargs)
    number = min(place.cfg.microbatches, parts.most(model.module)) if place.pp_size > 1 else 1
    with torch.no_grad():
        results, drawn, draws, padding = _step(number)(model, parts, within)
    states = drawn.outputs
    counts = draws if isinstance(draws, list) else [draws] * number
    torch.set_rng_state(states[max(range(number), key=counts.__getitem__)])
    if number == 1:
        return tree_map(lambda one: one.outputs[0] if isinstance(one, StepOutput) else one, results)
    return joined(results.outputs, padding)


@functools.cache
def _step(number: int) -> StepFunction[..., Any]:
    return step(microbatches=number)(_generated)


def _generated(model: DistributedModel, part: Part, within: Context) -> Any:
    """Generate for the sequences of a microbatch."""
    table = current_runtime()[CacheTable]
    began = table.begin_generation()
    with numbers_of_script(part.drawn), drawing(part.rows), within():
        result = model.generate(*part.args, **part.kwargs)
        if isinstance(result, torch.Tensor):
            table.end_generation(began)
        return result, torch.get_rng_state(), part.rows.draws, padding_of(model.module, part.kwargs)
