"""The scripts as jobs, each beside plain PyTorch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.compat.plain import SCRIPTS
from tests.jobs.forked import ROOT
from tests.jobs.ranks import outputs_of_ranks

#: The largest relative difference of a loss in float32.
BAR = 1e-5


@dataclass(frozen=True)
class Run:
    """A script on the ranks of one job, or of several, one after another.

    Attributes:
        name: What it shows.
        script: The script.
        ranks: How many ranks it has.
        jobs: The arguments of each job, in which ``{folder}`` is a folder of the run's own. Those of the last are those
            of the plain form, too.
        parameters: What the launcher says.
        divided: Whether no rank holds all parameters.
        distributed: Whether distributed modules take part.
        bar: The largest relative difference of a loss.
        quick: Whether ``make test`` has it.
        reloaded: Whether the last job saves a model, which is evaluated in one process.
    """

    name: str
    script: str
    ranks: int = 2
    jobs: tuple[tuple[str, ...], ...] = ((),)
    parameters: Mapping[str, Any] = field(default_factory=dict)
    divided: bool = True
    distributed: bool = False
    bar: float = BAR
    quick: bool = False
    reloaded: bool = False


@dataclass(frozen=True)
class Outcome:
    """What came of a run.

    Attributes:
        run: The run.
        losses: How many losses were compared.
        worst: The largest relative difference among them.
        why: Why it failed; empty if it did not.
    """

    run: Run
    losses: int = 0
    worst: float = math.nan
    why: str = ""


def _options(**options: Any) -> tuple[str, ...]:
    return tuple(f"--{name}={value}" for name, value in options.items())


_CHECKPOINTED = {"checkpoint_dir": "{folder}", "checkpoint_freq": 3}
_FINETUNED = ("--model_name_or_path={folder}/pretrained", "--checkpoint_dir={folder}", "--output_dir={folder}/tuned")

RUNS: tuple[Run, ...] = (
    Run("GPT-2, configured by the launcher", "gpt2", parameters={"partitions": 2, "microbatches": 4}, quick=True),
    Run(
        "GPT-2, pipeline and data parallelism",
        "gpt2",
        ranks=4,
        jobs=(
            _options(
                pipeline_parallel_degree=2,
                microbatches=2,
                ddp=1,
                ddp_dist_backend="auto",
                placement_strategy="spread",
                pipeline="simple",
                deterministic_server=1,
                gradient_as_bucket_view=1,
                bucket_cap_mb=1,
                broadcast_buffers=0,
                find_unused_parameters=1,
                trace_device="cpu",
                trace_memory_usage=1,
            ),
        ),
    ),
    Run(
        "GPT-2, tensor parallelism, optimized for speed",
        "gpt2",
        jobs=(
            _options(
                tensor_parallel_degree=2,
                ddp=1,
                microbatches=2,
                optimize="speed",
                _prescaled_batch=1,
                _match_weights=1,
                checkpoint_attentions=0,
                attention_in_fp32=1,
                fp32_residual_addition=1,
                fused_softmax=1,
                fused_bias_gelu=1,
                fused_dropout=1,
                flash_attention=1,
                query_key_layer_scaling=0,
                distribute_embedding=1,
                zero_init=0,
            ),
        ),
        distributed=True,
    ),
    Run(
        "GPT-2, pipeline and tensor parallelism, optimized for memory",
        "gpt2",
        ranks=4,
        jobs=(
            _options(
                pipeline_parallel_degree=2,
                tensor_parallel_degree=2,
                ddp=1,
                microbatches=2,
                optimize="memory",
                activation_checkpointing=1,
                activation_strategy="group_2",
                offload_activations=1,
                activation_loading_horizon=2,
            ),
        ),
        distributed=True,
    ),
    Run(
        "GPT-2, sharded optimizer state",
        "gpt2",
        jobs=(_options(ddp=1, shard_optimizer_state=1, microbatches=2, overlapping_allreduce=0),),
        divided=False,
    ),
    Run(
        "GPT-2, sharded data parallelism",
        "gpt2",
        jobs=(
            _options(
                ddp=1,
                sharded_data_parallel_degree=2,
                sdp_reduce_bucket_size=100000,
                sdp_param_persistence_threshold=64,
                sdp_max_live_parameters=100000,
                sdp_hierarchical_allgather=0,
                sdp_gradient_clipping=1.0,
            ),
        ),
        divided=False,
    ),
    Run(
        "GPT-2, float16 with a dynamic loss scale",
        "gpt2",
        # A scale with which no gradient overflows: plain PyTorch leaves no update out.
        jobs=(_options(partitions=2, microbatches=4, fp16=1, _fp32_grad_accumulation=1, init_loss_scale=2048),),
        bar=5e-3,
    ),
    Run(
        "GPT-2, float16 with a static loss scale, by tensor parallelism",
        "gpt2",
        jobs=(
            _options(
                tensor_parallel_degree=2, ddp=1, microbatches=2, fp16=1, prescaled_batch=1, static_loss_scale=1024
            ),
        ),
        distributed=True,
        bar=5e-3,
    ),
    Run(
        "GPT-2, bfloat16",
        "gpt2",
        jobs=(_options(partitions=2, microbatches=4, bf16=1),),
        bar=3e-2,
    ),
    Run(
        "GPT-2, saved, resumed in static mode, saved whole",
        "gpt2",
        jobs=(
            _options(
                partitions=2,
                microbatches=2,
                max_steps=3,
                **_CHECKPOINTED,
                delayed_parameter_initialization=1,
                skip_tracing=1,
                memory_weight=0.5,
                active_microbatches=2,
                partition_file="{folder}/partition.json",
            ),
            _options(
                partitions=2,
                microbatches=2,
                load_partial=1,
                **_CHECKPOINTED,
                static_mode=1,
                fast_mode=1,
                load_partition=1,
                partition_file="{folder}/partition.json",
                save_final_full_model=1,
            ),
        ),
    ),
    Run(
        "GPT-2, placed by hand",
        "gpt2",
        jobs=(
            _options(
                partitions=2,
                microbatches=2,
                auto_partition=0,
                default_partition=0,
                manual_partition=1,
                activation_checkpointing=1,
            ),
        ),
    ),
    Run(
        "GPT-2, tensor parallelism, layers placed by hand",
        "gpt2",
        ranks=4,
        jobs=(
            _options(
                partitions=2,
                tensor_parallel_degree=2,
                ddp=1,
                microbatches=2,
                prescaled_batch=1,
                auto_partition=0,
                default_partition=0,
                manual_partition=1,
            ),
        ),
        distributed=True,
    ),
    Run("BERT, LAMB with a scaler", "bert", parameters={"partitions": 2, "microbatches": 4}, quick=True),
    Run(
        "BERT, Adam with a scaler, pipeline and data parallelism, saved and loaded",
        "bert",
        ranks=4,
        jobs=(
            ("--optimizer=adam", "--max_steps=3", "--output={folder}"),
            ("--optimizer=adam", "--resume", "--first_step=3", "--output={folder}"),
        ),
        parameters={"partitions": 2, "microbatches": 2, "ddp": True},
    ),
    Run(
        "Classifier with a scaler",
        "classifier",
        parameters={"partitions": 2, "microbatches": 4, "optimize": "speed"},
        quick=True,
    ),
    Run(
        "Classifier with a scaler, in bfloat16",
        "classifier",
        jobs=(("--amp=bfloat16",),),
        parameters={"partitions": 2, "microbatches": 2},
        bar=2e-2,
    ),
    Run("Manual partition", "manual_partition", quick=True),
    Run(
        "Registered modules, optimized for memory",
        "registered_modules",
        distributed=True,
        quick=True,
    ),
    Run(
        "Registered modules in a pipeline, optimized for speed",
        "registered_modules",
        ranks=4,
        jobs=(("--optimize=speed", "--pipeline_parallel_degree=2"),),
        distributed=True,
    ),
    Run(
        "Fine-tuned from transformers, cut off and resumed",
        "finetune",
        jobs=((*_FINETUNED, "--stop_after=3"), (*_FINETUNED, "--resume")),
        quick=True,
        reloaded=True,
    ),
    Run(
        "Fine-tuned from transformers by tensor parallelism",
        "finetune",
        ranks=4,
        jobs=((*_FINETUNED, "--tensor_parallel_degree=2"),),
        distributed=True,
        reloaded=True,
    ),
)


def compare(run: Run, folder: Path) -> Outcome:
    """Run the jobs and their plain form, and compare the losses.

    Raises:
        AssertionError: A rank failed.
    """
    jobs = [[each.replace("{folder}", str(folder)) for each in arguments] for arguments in run.jobs]
    plain = _plain(run, jobs[-1])
    script = SCRIPTS / f"{run.script}.py"
    environment = {"SM_HP_MP_PARAMETERS": json.dumps(dict(run.parameters))}
    reports = []
    for arguments in jobs:
        out, *_ = outputs_of_ranks(script, *arguments, ranks=run.ranks, folder=folder, environment=environment)
        reports.append(json.loads(out.splitlines()[-1]))
    last = reports[-1]
    if run.reloaded:
        last["evaluated"] = _plain(run, ["--saved", *jobs[-1]])["evaluated"]
    found = [loss for report in reports for loss in report["losses"]]
    expected = list(plain["losses"])
    if "evaluated" in plain:
        found.append(last["evaluated"])
        expected.append(plain["evaluated"])
    return _judged(run, found, expected, last, plain["parameters"])


def _plain(run: Run, arguments: list[str]) -> dict[str, Any]:
    (out,) = outputs_of_ranks("-m", "tests.compat.plain", run.script, *arguments, ranks=0, folder=ROOT)
    report: dict[str, Any] = json.loads(out.splitlines()[-1])
    return report


def _judged(run: Run, found: list[float], expected: list[float], report: Mapping[str, Any], parameters: int) -> Outcome:
    if len(found) != len(expected):
        return Outcome(run, why=f"{len(found)} losses, and {len(expected)} in plain PyTorch")
    worst = max(abs(ours - theirs) / abs(theirs) for ours, theirs in zip(found, expected, strict=True))
    why = ""
    if not worst <= run.bar:
        why = f"a loss differs by {worst:.1e}: {found} and {expected}"
    elif run.divided and max(report["parameters_of_ranks"]) >= parameters:
        why = f"a rank holds all {parameters} parameters: {report['parameters_of_ranks']}"
    elif run.distributed != (report["distributed_modules"] > 0):
        why = f"{report['distributed_modules']} modules were distributed"
    return Outcome(run, len(found), worst, why)
