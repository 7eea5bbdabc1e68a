"""The rows of the table, and what is made of their figures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Row:
    """A way to train.

    Attributes:
        name: Its name in the table.
        side: ``ours`` or ``torch``.
        options: What that side's class is made with.
        ranks: How many ranks train.
    """

    name: str
    side: str
    options: dict[str, Any]
    ranks: int = 2


#: As PyTorch's side: every parameter is sharded, and no gradient clipped.
_SHARDED = {
    "ddp": True,
    "sharded_data_parallel_degree": 2,
    "sdp_param_persistence_threshold": 0,
    "sdp_gradient_clipping": 1e9,
}

#: Placed by hand, so that rows differ by a feature alone: every other block, embeddings and head on rank 0. With as few
#: microbatches in flight as 1F1B has, all of their activations are there when the first gradients are.
_PIPELINE = {"pipeline_parallel_degree": 2, "active_microbatches": 2, "placed": "0101010101010"}

ROWS = (
    Row("pipeline 2", "ours", _PIPELINE),
    Row("pipeline 2, checkpointing", "ours", {**_PIPELINE, "checkpointing": True}),
    Row(
        "pipeline 2, checkpointing, disk offload",
        "ours",
        {
            **_PIPELINE,
            "checkpointing": True,
            "offload_activations": "disk",
            "activation_loading_horizon": 2,
        },
    ),
    Row(
        "pipeline 2, optimizer offload to disk",
        "ours",
        {**_PIPELINE, "offload_optimizer": "disk"},
    ),
    Row("data parallel 2", "ours", {"ddp": True}),
    Row("data parallel 2, checkpointing", "ours", {"ddp": True, "checkpointing": True}),
    Row("data parallel 2, optimizer sharding", "ours", {"ddp": True, "shard_optimizer_state": True}),
    Row("data parallel 2, sharded, stage 1", "ours", {**_SHARDED, "sdp_stage": 1}),
    Row("data parallel 2, sharded, stage 2", "ours", {**_SHARDED, "sdp_stage": 2}),
    Row("data parallel 2, sharded, stage 3", "ours", {**_SHARDED, "sdp_stage": 3}),
    Row("pipeline 2, sharded 2, stage 2", "ours", {**_PIPELINE, **_SHARDED, "sdp_stage": 2}, 4),
    Row("pipeline 2, sharded 2, stage 3", "ours", {**_PIPELINE, **_SHARDED, "sdp_stage": 3}, 4),
    Row("torch DDP 2", "torch", {}),
    Row("torch DDP 2, torch.utils.checkpoint", "torch", {"checkpointing": True}),
    Row("torch FSDP2, stage 2", "torch", {"sharded": True, "reshards": False}),
    Row("torch FSDP2, stage 3", "torch", {"sharded": True}),
    Row("torch FSDP2, stage 3, reduced once", "torch", {"sharded": True, "reduces_once": True}),
)

#: Of the bytes that are offloaded, the least part by which the peaks of all ranks together have to fall.
LEAST_OFFLOADED = 0.8
#: How many times as long a step may take with offloading as without, where the disk is quick enough for what is moved.
MOST_OFFLOADING_TIME = 1.08
#: The largest part of an optimizer's state that a rank of two may have when it is sharded: 5% more than half.
MOST_SHARDED_STATE = 0.525
#: How many times as long as FSDP2's a sharded step may take.
MOST_SHARDED_TIME = 1.05


def missed_bars(rows: list[dict[str, Any]], disk: tuple[float, float]) -> list[str]:
    """Judge what was measured.

    Args:
        rows: What was measured of each row; bars of rows that are not there are left out.
        disk: Bytes a second that the disk takes and gives.

    Returns:
        A line for every bar that is missed, with the figure.
    """
    by_name = {row["name"]: row for row in rows}

    def of(*names: str) -> list[dict[str, Any]]:
        return [by_name[name] for name in names if name in by_name]

    missed = []
    match of("pipeline 2, checkpointing", "pipeline 2, checkpointing, disk offload"):
        case [kept, out]:
            missed += _offloading(kept, out, disk)
    match of("data parallel 2", "data parallel 2, optimizer sharding"):
        case [whole, sharded]:
            share = sharded["optimizer_bytes"] / whole["optimizer_bytes"]
            if share > MOST_SHARDED_STATE:
                missed.append(f"a rank has {share:.3f} of the optimizer's state; the bar is {MOST_SHARDED_STATE}")
    for stage in (2, 3):
        match of(f"data parallel 2, sharded, stage {stage}", f"torch FSDP2, stage {stage}"):
            case [ours, torch]:
                memory = ours["peak_bytes"] / torch["peak_bytes"]
                time = ours["step_seconds"] / torch["step_seconds"]
                if memory > 1:
                    missed.append(f"stage {stage} has {memory:.3f} of FSDP2's peak; the bar is 1")
                if time > MOST_SHARDED_TIME:
                    missed.append(f"stage {stage} takes {time:.3f} of FSDP2's time; the bar is {MOST_SHARDED_TIME}")
    return missed


def _offloading(kept: dict[str, Any], out: dict[str, Any], disk: tuple[float, float]) -> list[str]:
    missed = []
    fallen = (sum(kept["peaks"]) - sum(out["peaks"])) / sum(out["offloaded"])
    if fallen < LEAST_OFFLOADED:
        missed.append(f"peaks fall by {fallen:.3f} of the offloaded bytes; the bar is {LEAST_OFFLOADED}")
    time = out["step_seconds"] / kept["step_seconds"]
    moved = sum(out["moved"])
    needs = moved / disk[0] + moved / disk[1]
    if time > MOST_OFFLOADING_TIME and needs < (MOST_OFFLOADING_TIME - 1) * kept["step_seconds"]:
        missed.append(f"offloading takes {time:.3f} of the time without; the bar is {MOST_OFFLOADING_TIME}")
    return missed
