"""Half precision: training that is the recipe bit for bit, and stays near float32; sharded, and with checkpointing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..cases import HalfCase, MemoryCase

NAME = "half_precision"
KINDS = ("fp16", "bf16")
PLACES = ((1, 1), (2, 1), (1, 2), (2, 2))
#: With so many steps the losses are held against those of float32, too.
LONG, SHORT = 200, 12
#: The largest mean difference of the losses.
BOUND = 0.003


def _cases() -> Iterator[MemoryCase]:
    for number, kind in enumerate(KINDS):
        for pp, dp in PLACES:
            yield _case(f"{kind}, adamw", pp, dp, steps=LONG)
        for pp, dp in ((2, 1), (1, 2)):
            yield _case(f"{kind}, adamw, checkpointed", pp, dp)
        for pp, dp in ((1, 2), (2, 2)):
            yield _case(f"{kind}, adamw, sharded", pp, dp, steps=LONG)
        yield _case(f"{kind}, sgd, sharded", 1, 2)
        yield _case(f"{kind}, adamw, sharded, checkpointed", 2, 2)
        for schedule in ("simple", "looped", "zero_bubble"):
            yield _case(f"{kind}, {('sgd', 'adamw')[number]}", 2, 1, schedule=schedule)
        for pp in (1, 2):
            yield _case(f"{kind}, adamw", pp, 2, tp=2, steps=LONG)
        yield _case(f"{kind}, adamw, sharded", 1, 2, tp=2, steps=LONG)


def _case(how: str, pp: int, dp: int, *, schedule: str = "interleaved", steps: int = SHORT, tp: int = 1) -> MemoryCase:
    return HalfCase("language model", pp, dp, schedule, 2, steps=steps, tp=tp, feature=NAME, how=how)


CASES = list(_cases())


def ways(case: MemoryCase) -> list[str]:
    """Return the ways of a case."""
    return case.how.split(", ")


def configuration(case: MemoryCase) -> dict[str, Any]:
    """Return the configuration keys beside those that the case names."""
    return {}


def failure(case: MemoryCase, rows: list[dict[str, Any]]) -> str | None:
    """Why the feature had not the effect that it should have; None if it had."""
    if "checkpointed" in case.how and not all(row["recomputed"] for row in rows):
        return "a rank computed nothing again"
    if "sharded" in case.how and not all(row["owned"] for row in rows):
        return "a rank owns no elements of its parameters"
    if "fp16" in case.how and not all(row["overflows"] for row in rows):
        return "no step was skipped"
    distances = [row["distance"] for row in rows if "distance" in row]
    if case.steps == LONG and not (distances and max(distances) < BOUND):
        return f"losses differ from those of float32 by {distances} in the mean, allowed is {BOUND}"
    return None


def row(case: HalfCase) -> dict[str, Any]:
    """Run a case on this rank, in a job of its own within these processes."""
    import shardwright as smp

    from tests.half_precision import cases
    from tests.half_precision.running import configuration

    kind, optimizer, *rest = case.how.split(", ")
    degrees = {"pipeline_parallel_degree": case.pp, "tensor_parallel_degree": case.tp, "ddp": case.dp > 1}
    smp.init(configuration(kind, {**degrees, "pipeline": case.schedule, "shard_optimizer_state": "sharded" in rest}))
    seen: dict[str, Any] = {"worst": 0.0, "overflows": 1}
    if case.tp == 1:
        seen = cases.is_the_recipe(SHORT, optimizer, checkpointed="checkpointed" in rest)
    if case.steps == LONG:
        curve = cases.learns_as_in_float32(LONG, BOUND, marked=case.tp > 1)
        seen = {**seen, "distance": curve["mean"], "owned": curve["owned"], "overflows": curve["overflows"]}
    sent = smp.stats()["server"]["total"]["sent"]
    smp.barrier()
    return {
        **{"case": case.name, "where": "", "failures": [], "forward": sent["forward"], "backward": sent["backward"]},
        **{"parameters": 1, **seen},
    }
