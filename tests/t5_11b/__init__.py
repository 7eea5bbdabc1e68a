"""The example of the paper's appendix D: T5-11B divided over 8 ranks."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from shardwright.partition.decide import divide
from shardwright.partition.decision import Decision
from shardwright.partition.trace import trace_forward
from torch import nn

NUM_DEVICES = 8
NUM_LAYERS = 24
BATCH, ENCODER_LENGTH, DECODER_LENGTH = 1, 512, 114


@dataclass(frozen=True, kw_only=True)
class Example:
    """A figure of the paper.

    Attributes:
        alpha: The weight of memory against computation, which is `memory_weight`.
        split: Ranks of the encoder and of the decoder, as in the paper.
        paper: The smallest and the largest cost of a rank in the paper.
        allowed: Between which costs ours have to lie. The paper's times and lengths are not known, ours has none.
    """

    alpha: float
    split: tuple[int, int]
    paper: tuple[float, float]
    allowed: tuple[float, float]


EXAMPLES = (
    Example(alpha=1.0, split=(4, 4), paper=(0.114, 0.134), allowed=(0.114, 0.134)),
    Example(alpha=0.2, split=(3, 5), paper=(0.107, 0.131), allowed=(0.094, 0.147)),
)


@dataclass(frozen=True, kw_only=True)
class Division:
    """A division of T5-11B.

    Attributes:
        rows: Modules as the paper's figures show them, with their cost and the rank they are on.
        costs: The cost of each rank.
        split: Ranks of the encoder's layers and of the decoder's.
    """

    rows: tuple[tuple[str, float, int], ...]
    costs: tuple[float, ...]
    split: tuple[int, int]

    def misses(self, example: Example) -> list[str]:
        """What is not as in the paper."""
        low, high = example.allowed
        found = []
        if self.split != example.split:
            found.append(f"encoder and decoder have {self.split} ranks, not {example.split}")
        if len(self.costs) != NUM_DEVICES or not math.isclose(sum(self.costs), 1.0):
            found.append(f"the costs of {NUM_DEVICES} ranks do not make up 1: {self.costs}")
        found += [
            f"pp_rank {rank} costs {cost:.3f}, allowed are {low} to {high}"
            for rank, cost in enumerate(self.costs)
            if not low <= round(cost, 3) <= high
        ]
        return found


def t5_11b() -> nn.Module:
    """The model, on the meta device."""
    from transformers import T5Config, T5ForConditionalGeneration

    configuration = T5Config(
        d_model=1024,
        d_ff=65536,
        d_kv=128,
        num_heads=128,
        num_layers=NUM_LAYERS,
        num_decoder_layers=NUM_LAYERS,
        vocab_size=32128,
        feed_forward_proj="relu",
    )
    with torch.device("meta"):
        return T5ForConditionalGeneration(configuration)


def divided(decoder_length: int = DECODER_LENGTH) -> list[Division]:
    """T5-11B divided as in each of the `EXAMPLES`, by one trace on the meta device.

    There no times can be measured, and as in the paper the number of modules stands for computation.
    """
    model = t5_11b()
    with torch.device("meta"):
        ids = {
            "input_ids": torch.zeros(BATCH, ENCODER_LENGTH, dtype=torch.long),
            "decoder_input_ids": torch.zeros(BATCH, decoder_length, dtype=torch.long),
        }
    trace = trace_forward(model, functools.partial(model, use_cache=False), kwargs=ids)
    settings = {"auto_partition": True, "default_partition": 0, "skip_tracing": False, "refine_partition": False}
    schedule = {"pipeline": "interleaved", "active_microbatches": NUM_DEVICES, "microbatches": NUM_DEVICES}
    found = []
    for example in EXAMPLES:
        cfg = SimpleNamespace(memory_weight=example.alpha, **settings, **schedule)
        found.append(_division(divide(model, trace, cfg, NUM_DEVICES)))  # type: ignore[arg-type]
    return found


def _division(decision: Decision) -> Division:
    ranks = decision.modules
    layers = {half: [ranks[f"{half}.block.{layer}"] for layer in range(NUM_LAYERS)] for half in ("encoder", "decoder")}
    return Division(
        rows=tuple(_rows(decision)),
        costs=tuple(load["cost"] for load in decision.report["devices"]),
        split=(len(set(layers["encoder"])), len(set(layers["decoder"]))),
    )


def _rows(decision: Decision) -> list[tuple[str, float, int]]:
    paths = list(decision.modules)
    nodes = {paths[node["modules"][0]]: node for node in decision.report["nodes"]}
    rows = [("the model itself", nodes[""]["own_cost"], nodes[""]["pp_rank"])]
    for top in ("shared", "encoder", "decoder"):
        node = nodes[top]
        if top == "shared":
            rows.append(("embeddings and lm_head", node["cost"], node["pp_rank"]))
            continue
        layers = [nodes[f"{top}.block.{layer}"] for layer in range(NUM_LAYERS)]
        norm = nodes[f"{top}.final_layer_norm"]
        rest = node["cost"] - norm["cost"] - sum(layer["cost"] for layer in layers)
        rows.append((f"{top} itself, its dropout", rest, node["pp_rank"]))
        first = 0
        for rank, run in itertools.groupby(layers, operator.itemgetter("pp_rank")):
            costs = [layer["cost"] for layer in run]
            rows.append((f"{top}.layers[{first}:{first + len(costs)}]", sum(costs), rank))
            first += len(costs)
        rows.append((f"{top}.final_layer_norm", norm["cost"], norm["pp_rank"]))
    return rows
