"""One rank of a job that runs cases one after another: ``python -m tests.parity.rank PROBLEMS CASES RESULTS``."""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import shardwright as smp
import torch
from shardwright.delayed.materialise import has_delayed
from torch import nn

from tests.jobs.patience import HANG_SECONDS

from .cases import Case
from .compare import Comparison, at_microbatch
from .lives import lived
from .partitions import random_places
from .problem import Phase, Problem, generator
from .reference import Expected, Reference
from .schedules import pipeline_of
from .table import row_of_failure

SEED = 7
#: A case that takes longer hangs; every thread's stack is then printed and the job ends.
CASE_SECONDS = HANG_SECONDS


class RankRun:
    """One case on one rank. Rank 0 has the reference too and compares what all ranks report."""

    def __init__(self, case: Case, problem: Problem) -> None:
        self.case = case
        self.problem = problem
        self.comparison = Comparison()
        self.reference = self._build_reference() if smp.rank() == 0 else None
        places = self._places()
        torch.manual_seed(SEED)
        with smp.delay_param_initialization(case.delayed):
            built = self.problem.build()
        delayed = all(map(has_delayed, built.values()))
        assert delayed == case.delayed, f"parameters were {'' if delayed else 'not '}delayed"
        self.models = {
            name: smp.DistributedModel(
                module,
                average_grads_across_microbatches=case.average,
                backward_passes_per_step=self.problem.passes_per_step,
                **dict(case.options),
            )
            for name, module in built.items()
        }
        self._pin(places)
        self.optimizers = {
            name: smp.DistributedOptimizer(self.problem.optimizer(model)) for name, model in self.models.items()
        }
        scheduler = self.problem.scheduler
        self.schedulers = {} if scheduler is None else {n: scheduler(o) for n, o in self.optimizers.items()}
        self.steps = [
            smp.step(non_split_inputs=phase.whole, input_split_axes=phase.axes)(phase.body)
            for phase in self.problem.phases
        ]

    def _build_reference(self) -> Reference:
        torch.manual_seed(SEED)
        shared_buffers = dict(self.case.options).get("broadcast_buffers", True)
        return Reference(self.problem, self.case.dp, self.case.microbatches, self.case.average, bool(shared_buffers))

    def _places(self) -> dict[str, int]:
        """Where modules go that are placed by hand, the same on every rank."""
        if self.case.partition is None:
            return self.problem.pins(self.case.pp) if self.problem.pins else {}
        if smp.rank():
            return dict(smp.recv_from(0, smp.RankType.WORLD_RANK))
        places = random_places(self.case.problem, self.problem, self.case.pp, self.case.partition)
        smp.broadcast(places, smp.WORLD)
        return places

    def _pin(self, places: dict[str, int]) -> None:
        for path, pp_rank in places.items():
            name, _, inner = path.partition(".")
            smp.set_partition(self.models[name].module.get_submodule(inner), pp_rank)

    def run(self) -> None:
        """Train, comparing after every phase."""
        for step in range(self.case.steps):
            if self.problem.prepare is not None:
                modules = self.reference.modules.values() if self.reference is not None else ()
                for module in (*(model.module for model in self.models.values()), *modules):
                    self.problem.prepare(module, step)
            for index, phase in enumerate(self.problem.phases):
                self._run_phase(step, index, phase)
        self._report_weights()

    def _run_phase(self, step: int, index: int, phase: Phase) -> None:
        batches = [
            self.problem.batch(step, generator(self.case.problem, step, index, replica))
            for replica in range(self.case.dp)
        ]
        for name in phase.zero:
            self.optimizers[name].zero_grad()
        for model in self.models.values():
            model.train(phase.training)
        with torch.set_grad_enabled(phase.training):
            outputs = self.steps[index](self.models, *batches[smp.dp_rank()])
        where = f"step {step}, {phase.body.__name__}"
        self._check_this_rank(where)
        expected = None
        if self.reference is not None:
            self.reference.zero(phase.zero)
            for whole in self.reference.models.values():
                whole.module.train(phase.training)
            expected = self.reference.run(phase, batches)
        report = {
            "outputs": [at_microbatch(outputs, m) for m in range(self.case.microbatches)],
            "gradients": self._local("gradients"),
            "buffers": self._local("buffers"),
            "replica": smp.dp_rank(),
        }
        self._compare(report, expected, where)
        norms = [self._update(name) for name in phase.update]
        if self.reference is not None:
            self.comparison.value(norms, self.reference.update(phase.update), f"{where}: norm of the gradients")
        if self.problem.accounted and step == self.case.steps - 1:
            self._report_bytes()

    def _update(self, name: str) -> torch.Tensor | None:
        norm = None
        if self.problem.clip is not None:
            norm = smp.clip_grad_norm_(self.models[name].parameters(), self.problem.clip)
        self.optimizers[name].step()
        if name in self.schedulers:
            self.schedulers[name].step()
        return norm

    def _check_this_rank(self, where: str) -> None:
        stats = smp.stats()
        left = {"live frames": stats["live_frames"], "unclosed frames": stats["unclosed_frames"]}
        for kind, number in (left | {"live requests": stats["server"]["live_requests"]}).items():
            if number:
                self.comparison.fail(f"{where}: {number} {kind} on rank {smp.rank()}")
        for name, model in self.models.items():
            local = {id(parameter) for parameter in model.local_parameters()}
            trained = {id(parameter) for parameter in model.local_parameters() if parameter.requires_grad}
            held = {id(p) for group in self.optimizers[name].param_groups for p in group["params"]}
            if not trained <= held <= local:
                self.comparison.fail(f"{where}: the optimizer of rank {smp.rank()} does not hold what it owns")

    def _local(self, kind: str) -> dict[str, torch.Tensor | None]:
        found: dict[str, torch.Tensor | None] = {}
        for model_name, model in self.models.items():
            if kind == "buffers":
                items = dict(model.local_named_buffers())
            elif kind == "weights":
                items = {name: parameter.detach() for name, parameter in model.local_named_parameters()}
            else:
                items = {name: parameter.grad for name, parameter in model.local_named_parameters()}
            for name, tensor in items.items():
                found[f"{model_name}.{name}"] = tensor.to_dense() if tensor is not None else None
        return found

    def _reports(self, report: Any) -> list[Any]:
        """Every rank's report, on rank 0."""
        if smp.rank():
            smp.send(report, 0, smp.RankType.WORLD_RANK)
            return []
        return [report, *(smp.recv_from(rank, smp.RankType.WORLD_RANK) for rank in range(1, smp.size()))]

    def _compare(self, report: dict[str, Any], expected: Expected | None, where: str) -> None:
        reports = self._reports(report)
        if expected is None:
            return
        if expected.trained and not any(
            gradient is not None and gradient.any() for gradient in expected.gradients[0].values()
        ):
            self.comparison.fail(f"{where}: there is no gradient to compare")
        for rank, found in enumerate(reports):
            replica, place = found["replica"], f"{where}, rank {rank}"
            self.comparison.gradients(found["gradients"], expected.gradients[replica], f"{place}: gradient")
            self.comparison.gradients(found["buffers"], expected.buffers[replica], f"{place}: buffer")
            for m, output in enumerate(found["outputs"]):
                self.comparison.value(output, expected.outputs[replica][m], f"{place}: output of microbatch {m}")
        for replica in range(self.case.dp):
            owned = [name for found in reports if found["replica"] == replica for name in found["gradients"]]
            if sorted(owned) != sorted(expected.gradients[replica]):
                self.comparison.fail(f"{where}: the ranks of replica {replica} do not own each parameter exactly once")

    def _report_weights(self) -> None:
        for rank, weights in enumerate(self._reports(self._local("weights"))):
            assert self.reference is not None, "reports come together on rank 0"
            expected = {name: parameter.detach() for name, parameter in self.reference.parameters().items()}
            self.comparison.gradients(weights, expected, f"rank {rank}: final weight")

    def _report_bytes(self) -> None:
        """Bytes held equal the partition table on every rank, and sum to those of one process."""
        report: dict[str, Any] = {"held": {}, "replica": smp.dp_rank()}
        for name, model in self.models.items():
            decision = model.placement.ownership.decision
            parameters = decision.parameter_bytes(smp.pp_rank())
            table = {"parameters": parameters, "buffers": decision.buffer_bytes(smp.pp_rank())}
            held = {
                "parameters": _bytes(model.local_parameters()),
                "buffers": _bytes(model.local_buffers()),
                "gradients": _bytes(p.grad for p in model.local_parameters() if p.grad is not None),
                "optimizer": _bytes(_state_tensors(self.optimizers[name])),
            }
            for kind, size in held.items():
                if size != table.get(kind, parameters):
                    self.comparison.fail(
                        f"rank {smp.rank()} holds {size} bytes of {kind}, the partition table says "
                        f"{table.get(kind, parameters)}"
                    )
            report["held"][name] = held
        reports = self._reports(report)
        if self.reference is None:
            return
        for name, module in self.reference.modules.items():
            whole = {
                "parameters": _bytes(module.parameters()),
                "buffers": _bytes(module.buffers()),
                "gradients": _bytes(module.parameters()),
                "optimizer": _bytes(_state_tensors(self.reference.optimizers[name])),
            }
            for replica in range(self.case.dp):
                for kind, size in whole.items():
                    held = sum(found["held"][name][kind] for found in reports if found["replica"] == replica)
                    if abs(held - size) > 0.01 * size:
                        self.comparison.fail(
                            f"the pipeline of replica {replica} holds {held} bytes of {kind}, one process {size}"
                        )

    def result(self, seconds: float) -> dict[str, Any]:
        """This rank's row."""
        sent = smp.stats()["server"]["total"]["sent"]
        requests = None if self.case.partition is not None else self.problem.requests
        samples = self.case.steps * self.case.microbatches * self.case.dp
        return {
            "case": self.case.name,
            "worst": self.comparison.worst,
            "where": self.comparison.where,
            "failures": self.comparison.failures,
            "parameters": sum(p.numel() for model in self.models.values() for p in model.local_parameters()),
            "replica": smp.dp_rank(),
            "bytes": sum(_bytes(model.local_parameters()) for model in self.models.values()),
            "body_bytes": sum(_bytes(self._local_body(model)) for model in self.models.values()),
            "forward": sent["forward"],
            "backward": sent["backward"],
            "expected_forward": None if requests is None else requests(self.case.pp) * samples,
            "seconds": seconds,
        }

    def _local_body(self, model: smp.DistributedModel) -> list[torch.Tensor]:
        body = body_parameters(model.module)
        return [parameter for name, parameter in model.local_named_parameters() if name in body]


def body_parameters(module: nn.Module) -> set[str]:
    """Names of the parameters in a model's body: its layers, without embeddings, poolers and heads.

    Layers are what stands in a list, a sequence or a dict of modules. A model without any is all body, but for its
    embeddings.
    """
    containers = tuple(
        f"{path}." if path else ""
        for path, part in module.named_modules()
        if isinstance(part, (nn.ModuleList, nn.Sequential, nn.ModuleDict))
    )
    tables = tuple(f"{path}." for path, part in module.named_modules() if isinstance(part, nn.Embedding))
    return {
        name
        for name, _ in module.named_parameters()
        if (name.startswith(containers) if containers else not name.startswith(tables))
    }


def _bytes(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _state_tensors(optimizer: Any) -> list[torch.Tensor]:
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]


def configuration(case: Case, problem: Problem) -> dict[str, Any]:
    """What ``smp.init`` gets."""
    keys: dict[str, Any] = {
        "pipeline_parallel_degree": case.pp,
        "microbatches": case.microbatches,
        "pipeline": pipeline_of(case),
        "ddp": case.dp > 1,
        **dict(case.keys),
    }
    if problem.pins is not None or case.partition is not None:
        keys |= {"auto_partition": False, "default_partition": 0}
    return keys


def run_case(case: Case, problem: Problem) -> dict[str, Any]:
    """Run one case in a job of its own within these processes; this rank's row."""
    started = time.monotonic()
    try:
        smp.init(configuration(case, problem))
        run = RankRun(case, problem)
        run.run()
        smp.barrier()
        row = run.result(time.monotonic() - started)
    except Exception as error:
        traceback.print_exc()
        row = row_of_failure(case.name, error)
    smp.shutdown()
    return row


def main() -> int:
    """Run the cases of a file with a package's problems, and write a row for each."""
    problems: dict[str, Problem] = importlib.import_module(sys.argv[1]).PROBLEMS
    cases = [Case(**fields) for fields in json.loads(Path(sys.argv[2]).read_text())]
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    with (Path(sys.argv[3]) / f"{os.environ['RANK']}.jsonl").open("a") as rows:
        for case in cases:
            faulthandler.dump_traceback_later(CASE_SECONDS, exit=True)
            row = run_case(case, lived(problems[case.problem], case.life, collects=case.collects))
            faulthandler.cancel_dump_traceback_later()
            print(json.dumps(row), file=rows, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
