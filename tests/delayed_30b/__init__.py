"""A GPT-2 of 30 billion parameters that is created, traced and divided on a machine that could not hold it."""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from shardwright.delayed.creation import delay_param_initialization
from shardwright.delayed.materialise import is_delayed
from shardwright.partition.by_shapes import trace_by_shapes
from shardwright.partition.decide import divide
from shardwright.progress import Progress
from torch import nn

NUM_DEVICES = 8
NUM_LAYERS, WIDTH, NUM_HEADS, VOCABULARY = 48, 7168, 56, 50257
BATCH, SEQUENCE = 1, 128
MOST_SECONDS, MOST_BYTES = 60.0, 4 << 30


@dataclass(frozen=True, kw_only=True)
class Rank:
    """What a rank gets.

    Attributes:
        layers: Its blocks.
        parameters: How many numbers.
        forward_seconds: Measured seconds of what it runs in a forward.
        cost: Its share of the cost of the model.
    """

    layers: tuple[int, ...]
    parameters: int
    forward_seconds: float
    cost: float


@dataclass(frozen=True, kw_only=True)
class Divided:
    """The division, and what it took.

    Attributes:
        ranks: A row for each rank.
        parameters: Of the model.
        phases: Seconds of creation, trace and division.
        peak_bytes: The most memory that was resident in this process.
        delayed: Whether no parameter got values.
        measured: Whether every block has measured seconds.
    """

    ranks: tuple[Rank, ...]
    parameters: int
    phases: dict[str, float]
    peak_bytes: int
    delayed: bool
    measured: bool

    def misses(self) -> list[str]:
        """What is not as it should be."""
        seconds = sum(self.phases.values())
        found = []
        if seconds >= MOST_SECONDS:
            found.append(f"it took {seconds:.1f} s, allowed are {MOST_SECONDS:.0f} s")
        if self.peak_bytes >= MOST_BYTES:
            found.append(f"it took {self.peak_bytes / 2**30:.2f} GiB, allowed are {MOST_BYTES / 2**30:.0f} GiB")
        if not self.delayed:
            found.append("parameters got values")
        if not self.measured:
            found.append("modules have no measured times")
        if len(self.ranks) != NUM_DEVICES or any(rank.parameters == 0 for rank in self.ranks):
            found.append("a rank has no parameters")
        return found


def gpt2_30b() -> nn.Module:
    """The model, with delayed parameters."""
    from transformers import GPT2Config, GPT2LMHeadModel

    configuration = GPT2Config(
        n_layer=NUM_LAYERS,
        n_embd=WIDTH,
        n_head=NUM_HEADS,
        vocab_size=VOCABULARY,
        use_cache=False,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    torch.manual_seed(1)
    with delay_param_initialization():
        return GPT2LMHeadModel(configuration)


def divided() -> Divided:
    """Create, trace and divide it."""
    phases: dict[str, float] = {}
    began = time.perf_counter()

    def done(phase: str) -> None:
        phases[phase] = time.perf_counter() - began - sum(phases.values())

    model = gpt2_30b()
    done("creation")
    ids = torch.zeros(BATCH, SEQUENCE, dtype=torch.long)
    trace = trace_by_shapes(
        model,
        model,
        (),
        {"input_ids": ids, "labels": ids},
        device=torch.device("cpu"),
        measure_times=None,
        measure_memory=False,
        progress=Progress(0),
    )
    assert trace is not None, "its course does not depend on values"
    done("trace")
    cfg = SimpleNamespace(
        auto_partition=True,
        default_partition=0,
        skip_tracing=False,
        refine_partition=True,
        memory_weight=0.8,
        pipeline="interleaved",
        active_microbatches=2 * NUM_DEVICES,
        microbatches=32,
    )
    decision = divide(model, trace, cfg, NUM_DEVICES)
    done("division")
    blocks = [f"transformer.h.{layer}" for layer in range(NUM_LAYERS)]
    seconds = dict.fromkeys(range(NUM_DEVICES), 0.0)
    for path, record in trace.modules.items():
        seconds[decision.modules[path]] += record.own_seconds or 0.0
    named = dict(model.named_parameters())
    numbers = dict.fromkeys(range(NUM_DEVICES), 0)
    for name, parameter in named.items():
        numbers[decision.modules[name.rpartition(".")[0]]] += parameter.numel()
    inside = {
        block: sum(record.own_seconds or 0.0 for path, record in trace.modules.items() if path.startswith(f"{block}."))
        for block in blocks
    }
    on = {rank: [layer for layer, block in enumerate(blocks) if decision.modules[block] == rank] for rank in seconds}
    return Divided(
        ranks=tuple(
            Rank(
                layers=tuple(on[rank]),
                parameters=numbers[rank],
                forward_seconds=seconds[rank],
                cost=load["cost"],
            )
            for rank, load in zip(seconds, decision.report["devices"], strict=True)
        ),
        parameters=sum(parameter.numel() for parameter in named.values()),
        phases=phases,
        peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        delayed=all(is_delayed(parameter) for parameter in named.values()),
        measured=all(value > 0 for value in inside.values()),
    )
