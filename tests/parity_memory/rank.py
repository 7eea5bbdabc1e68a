"""One rank of a job that runs cases: ``python -m tests.parity_memory.rank CLASS CASES RESULTS``."""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import shardwright as smp
import torch
from shardwright.execution import process, reproducible
from shardwright.job.runtime import current_runtime
from shardwright.memory.optimizers import streamed_bytes
from shardwright.offloading import OffloadedActivations, activations
from shardwright.sharded_data_parallel.parameters import ShardedParameters, shard_of

from tests.jobs.listed import write_rows
from tests.jobs.patience import HANG_SECONDS
from tests.optimizer_sharding.shares import owned_elements, whole_gradients
from tests.parity import rank as of_pipelines
from tests.parity.problem import Phase
from tests.parity.reference import Expected, Reference
from tests.parity.table import row_of_failure
from tests.parity_tp import rank as of_tensors
from tests.parity_tp.precision import compute_in_double

from . import cases
from .cases import DividedCase, HalfCase, MemoryCase, PipelineCase, feature_of
from .recomputed import Recomputed

#: A case that takes longer hangs; every thread's stack is then printed and the job ends.
CASE_SECONDS = HANG_SECONDS
#: A forward waits until what it keeps has gone out, so that a test sees it come back.
activations.MOST_OUTGOING_BYTES = 0


class KeyedReference(Reference):
    """One process, whose modules draw the random numbers that ``reproducible_rng`` gives them in a job."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        for module in self.modules.values():
            reproducible.install(current_runtime(), module.modules())

    def run(self, phase: Phase, batches: list[tuple[Any, ...]]) -> Expected:
        """Run a phase for every replica's batch, each microbatch from its own seed."""
        runtime = current_runtime()
        own, drawn = runtime.step.num_microbatches, 0
        runtime.step.num_microbatches = self.microbatches

        @functools.wraps(phase.body)
        def body(*args: Any) -> Any:
            nonlocal drawn
            replica, microbatch = divmod(drawn, self.microbatches)
            drawn += 1
            process.seed(reproducible.microbatch_seed(runtime, 0, microbatch, replica))
            return phase.body(*args)

        runtime.step.running = True
        try:
            return super().run(dataclasses.replace(phase, body=body), batches)
        finally:
            runtime.step.running = False
            runtime.step.num_microbatches = own


class PipelineRun(of_pipelines.RankRun):
    """A case of pipelines and data parallelism on one rank."""

    case: PipelineCase

    def _build_reference(self) -> Reference:
        torch.manual_seed(of_pipelines.SEED)
        return KeyedReference(self.problem, self.case.dp, self.case.microbatches, self.case.average, True)

    def _run_phase(self, step: int, index: int, phase: Phase) -> None:
        if not index:
            feature_of(self.case).before_step(self.models, self.case, step)
        super()._run_phase(step, index, phase)

    def _update(self, name: str) -> torch.Tensor | None:
        update = getattr(feature_of(self.case), "update", None)
        return super()._update(name) if update is None else update(self, name, super()._update)

    def _local(self, kind: str) -> dict[str, torch.Tensor | None]:
        registry = current_runtime()[ShardedParameters]
        found = super()._local(kind) if kind == "buffers" else {}
        for model_name, model in self.models.items() if kind != "buffers" else ():
            for name, parameter in model.local_named_parameters():
                value = parameter.grad if kind == "gradients" else parameter.detach()
                if registry.is_sharded(parameter) and value is not None:
                    value = registry.whole(parameter, shard_of(value))
                found[f"{model_name}.{name}"] = None if value is None else value.to_dense()
            if kind == "gradients":
                found |= {f"{model_name}.{name}": gradient for name, gradient in whole_gradients(model).items()}
        return found

    def result(self, seconds: float) -> dict[str, Any]:
        """This rank's row."""
        held = [parameter for model in self.models.values() for parameter in model.local_parameters()]
        registry = current_runtime()[ShardedParameters]
        return {
            **super().result(seconds),
            "owned": sum(owned_elements(model) or 0 for model in self.models.values()),
            "sharded": sum(registry.is_sharded(one) for one in held),
            "whole": sum(not registry.is_sharded(one) for one in held),
            "elements": sum(one.numel() for one in held if registry.is_sharded(one)),
            "held": sum(shard_of(one).numel() for one in held if registry.is_sharded(one)),
            "streamed": streamed_bytes(self.optimizers.values()),
        }


class TensorRun(of_tensors.RankRun):
    """A case of tensor parallelism on one rank."""

    case: DividedCase

    def run(self) -> None:
        """Train, comparing every step."""
        feature_of(self.case).before_step({"model": self.model}, self.case, 0)
        super().run()

    def _compare(self, found: Any, values: Any, where: str) -> None:
        super()._compare(found | whole_gradients(self.model) if "gradient" in where else found, values, where)

    @property
    def owned(self) -> int | None:
        """How many elements of parameters this rank owns among those that hold them; None if nobody owns any."""
        return owned_elements(self.model)


def run_case(case: MemoryCase) -> dict[str, Any]:
    """Run one case in a job of its own within these processes; this rank's row."""
    from .problems import PROBLEMS

    started = time.monotonic()
    counted = Recomputed()
    further = feature_of(case).configuration(case)
    try:
        if isinstance(case, HalfCase):
            row = feature_of(case).row(case)
        elif isinstance(case, DividedCase):
            smp.init({**of_tensors.configuration(case), **dict(case.keys), **further})
            tensors = TensorRun(case)
            tensors.run()
            smp.barrier()
            row = {**tensors.row(time.monotonic() - started), "owned": tensors.owned}
            row["streamed"] = streamed_bytes([tensors.optimizer])
        else:
            problem = feature_of(case).problem_of(case, PROBLEMS[case.problem])
            smp.init({**of_pipelines.configuration(case, problem), "reproducible_rng": True, **further})
            pipeline = PipelineRun(case, problem)
            pipeline.run()
            smp.barrier()
            row = pipeline.result(time.monotonic() - started)
    except Exception as error:
        traceback.print_exc()
        return row_of_failure(case.name, error)
    finally:
        recomputed = counted.end()
    offloaded = current_runtime().find(OffloadedActivations)
    return {**row, "recomputed": recomputed, "offloaded": {} if offloaded is None else dict(offloaded.counts())}


def main() -> int:
    """Run the cases of a file, and write a row for each; end after one that raised, which may have left ranks apart."""
    kind: Any = getattr(cases, sys.argv[1])
    todo = [kind(**fields) for fields in json.loads(Path(sys.argv[2]).read_text())]
    torch.set_num_threads(1)
    if kind is DividedCase:
        compute_in_double()
    elif kind is PipelineCase:
        torch.set_default_dtype(torch.float64)
    return write_rows(run_case, todo, CASE_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
