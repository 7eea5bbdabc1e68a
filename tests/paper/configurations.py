"""What the paper configures its large models with, and how far they are reduced here. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Configuration:
    """A model and the keys that it is trained with.

    Attributes:
        name: The paper's name of it.
        section: Where the paper tells of it.
        architecture: ``roberta``, ``bert`` or ``gpt``.
        width: The hidden size.
        layers: How many.
        heads: Attention heads: the width is reduced by their number and their size.
        sequence: The length of a sample, as in the paper.
        samples: Of each model replica, or of each rank without ``prescaled_batch``, in a step.
        ranks: Processes: one model replica, or two.
        keys: The configuration.
    """

    name: str
    section: str
    architecture: str
    width: int
    layers: int
    heads: int
    sequence: int
    samples: int
    ranks: int
    keys: dict[str, Any]


#: 16 nodes of 8 GPUs, of which 32 replicas of 4 tensor-parallel ranks: here 2 replicas.
_TENSOR_PARALLEL = {
    "tensor_parallel_degree": 4,
    "pipeline_parallel_degree": 1,
    "ddp": True,
    "shard_optimizer_state": True,
}

CONFIGURATIONS = (
    # 48 layers of width 4096, 32 heads; a batch of 1024 samples over 128 GPUs.
    Configuration("RoBERTa-10B", "7.1", "roberta", 128, 4, 8, 512, 8, 8, _TENSOR_PARALLEL),
    # 127 layers of width 2560, 40 heads; a batch of 8192 samples over 128 GPUs, here in microbatches.
    Configuration("BERT-10B", "7.1", "bert", 64, 6, 8, 512, 64, 8, {**_TENSOR_PARALLEL, "microbatches": 8}),
    # 96 layers of width 12288; 2560 samples over 20 replicas, in 64 microbatches; fast mode needs static mode here.
    Configuration(
        "GPT-3 175B",
        "7.2",
        "gpt",
        64,
        6,
        8,
        2048,
        128,
        48,
        {
            "pipeline_parallel_degree": 6,
            "tensor_parallel_degree": 8,
            "ddp": True,
            "microbatches": 64,
            "prescaled_batch": True,
            "static_mode": True,
            "static_steps": 1,
            "fast_mode": True,
            "shard_optimizer_state": True,
            "offload_activations": True,
            "activation_loading_horizon": 4,
        },
    ),
)
