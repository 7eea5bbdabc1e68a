"""The scripts in each dtype and division: trained, evaluated, saved, resumed in fresh processes, and compared."""

from __future__ import annotations

import functools
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.jobs.forked import ROOT
from tests.jobs.ranks import outputs_of_ranks

_HERE = Path(__file__).parent
#: The largest relative difference from plain PyTorch in float32, and from a run that never stopped.
BARS = {"fp32": 2e-5, "fp16": 1e-2, "bf16": 3e-2}
_RESUMED_BAR = 1e-6
_STOPS_AFTER = 3

_DIVISIONS = {
    "pipeline": (2, {"pipeline": 2, "microbatches": 2}),
    "tensor": (2, {"tensor": 2}),
    "sharded": (2, {"sharded": 2}),
    "pipeline with tensor": (4, {"pipeline": 2, "microbatches": 2, "tensor": 2}),
}
#: The options of each script for them.
_LANGUAGE = {
    "pipeline": "pipeline_parallel_degree",
    "tensor": "tensor_parallel_degree",
    "sharded": "sharded_data_parallel_degree",
    "microbatches": "microbatches",
}
_BERT = {**_LANGUAGE, "pipeline": "partitions"}


@dataclass(frozen=True)
class Example:
    """A script in one dtype and division."""

    model: str
    dtype: str
    division: str
    options: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """What it shows."""
        return f"{self.model}, {self.dtype}, {self.division}" + (f" ({' '.join(self.options)})" if self.options else "")

    @property
    def ranks(self) -> int:
        """How many ranks it has."""
        return _DIVISIONS[self.division][0]

    @property
    def script(self) -> str:
        """The script's name."""
        return "bert" if self.model == "bert" else "language_model"

    def arguments(self, folder: str) -> tuple[str, ...]:
        """The command line, apart from what resumes."""
        names = _BERT if self.model == "bert" else _LANGUAGE
        _, degrees = _DIVISIONS[self.division]
        given = [f"--{names[name]}={value}" for name, value in degrees.items()]
        given += [] if self.dtype == "fp32" else [f"--{self.dtype}=1"]
        own = (
            [f"--output_dir={folder}"]
            if self.model == "bert"
            else [f"--checkpoint_dir={folder}", f"--model_type={self.model}"]
        )
        return (*own, *given, *self.options)

    @property
    def resuming(self) -> tuple[str, ...]:
        """What a fresh process gets besides."""
        if self.model == "bert":
            return ("--resume_from_checkpoint=1", f"--resume_step={_STOPS_AFTER}")
        return ("--load_partial=1",)


@dataclass(frozen=True)
class Compared:
    """What came of it: the largest relative difference from plain PyTorch, and why it failed."""

    example: Example
    worst: float = math.nan
    why: str = ""


EXAMPLES: tuple[Example, ...] = (
    *(
        # LAMB exchanges norms of whole parameters, and is refused by name where they are sharded.
        Example(model, dtype, division, ("--use_lamb=0",) if (model, division) == ("bert", "sharded") else ())
        for model in ("gpt2", "gptneo", "bert")
        for dtype in BARS
        for division in _DIVISIONS
        if (dtype, division) != ("fp16", "sharded")  # refused by name
    ),
    Example("gpt2", "fp32", "pipeline", ("--use_distributed_transformer=0",)),
    Example("gpt2", "fp16", "pipeline", ("--static_mode=1", "--fast_mode=1", "--offload_activations=1")),
    Example("gpt2", "fp32", "pipeline", ("--manual_partition=1", "--checkpoint_sublayers=1")),
    Example("gpt2", "fp32", "tensor", ("--prescaled_batch=1", "--shard_optimizer_state=1", "--optimize=memory")),
    Example("gpt2", "fp32", "pipeline", ("--activation_strategy=group_2", "--delayed_param=0", "--skip_tracing=1")),
)


@functools.cache
def _plain(script: str, *arguments: str) -> dict[str, Any]:
    (out,) = outputs_of_ranks("-m", "tests.compat.published.plain", script, *arguments, ranks=0, folder=ROOT)
    report: dict[str, Any] = json.loads(out.splitlines()[-1])
    return report


def compare(example: Example, folder: Path) -> Compared:
    """Run a script to its end, resume it in fresh processes where it had saved, and evaluate its whole model.

    Raises:
        AssertionError: A rank failed.
    """
    arguments, script = example.arguments(str(folder)), _HERE / f"{example.script}.py"
    whole, resumed = (
        _report(outputs_of_ranks(script, *arguments, *more, ranks=example.ranks, folder=folder))
        for more in ((), example.resuming)
    )
    plain = _plain(example.script, *example.arguments("unused"))
    saved = _plain.__wrapped__(example.script, "--saved", *arguments)["evaluated"]
    bar = BARS[example.dtype]
    expected = [*plain["losses"], plain["evaluated"], plain["evaluated"]]
    worst = _differ([*whole["losses"], whole["evaluated"], saved], expected)
    after = _differ([*resumed["losses"], resumed["evaluated"]], [*whole["losses"][_STOPS_AFTER:], whole["evaluated"]])
    why = ""
    if not worst <= bar:
        why = f"a loss differs by {worst:.1e} from plain PyTorch: {whole}, {saved} and {plain}"
    elif not after <= _RESUMED_BAR:
        why = f"a loss differs by {after:.1e} after resuming: {resumed} and {whole}"
    elif max(whole["held"]) >= plain["parameters"]:
        why = f"a rank holds all {plain['parameters']} parameters: {whole['held']}"
    elif "--use_distributed_transformer=0" not in example.options and example.model != "bert":
        why = "" if whole["distributed_modules"] else "no module was replaced"
    return Compared(example, worst, why)


def _report(outputs: list[str]) -> dict[str, Any]:
    lines = [line for line in outputs[0].splitlines() if line.startswith('{"losses"')]
    report: dict[str, Any] = json.loads(lines[-1])
    return report


def _differ(found: list[float], expected: list[float]) -> float:
    if len(found) != len(expected):
        return math.inf
    return max(abs(ours - theirs) / abs(theirs) for ours, theirs in zip(found, expected, strict=True))
