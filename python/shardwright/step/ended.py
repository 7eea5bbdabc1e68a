"""What the root of a pipeline tells the other ranks at the end of a step."""

from __future__ import annotations

from functools import partial
from typing import Any

from shardwright import _core
from shardwright.caches import CacheTable
from shardwright.data_parallel.weights import StepWeights
from shardwright.job.received import decode_from
from shardwright.job.runtime import Runtime
from shardwright.step.batches import Fingerprints
from shardwright.step.deferred import deferring_large
from shardwright.step.output import map_tensors
from shardwright.values import encode


def tell(runtime: Runtime, results: list[Any], batch: Fingerprints | None) -> None:
    """End the step on all ranks, with its results, one per microbatch, and the checksums of the root's batch."""
    sent = map_tensors(results, partial(deferring_large, runtime))
    weights = runtime[StepWeights]
    caches = runtime[CacheTable].end_step()
    runtime.server.end_step(*encode((sent, batch, weights.given, weights.counts, caches)))


def hear(runtime: Runtime, body: tuple[_core.Spec, _core.TensorParts]) -> tuple[list[Any], Fingerprints | None]:
    """Take over what the root has told; return the results, and the checksums of its batch."""
    results, batch, given, counts, caches = decode_from(runtime, runtime.place.pp_ranks[0], *body)
    runtime[StepWeights].take_over(given, counts)
    runtime[CacheTable].keep(caches)
    assert isinstance(results, list), "the root sends one result per microbatch"
    return results, batch
