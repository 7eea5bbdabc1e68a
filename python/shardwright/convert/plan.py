"""What a job of accelerate or DeepSpeed is, in the words of this library."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any


class Engine(enum.Enum):
    """What divides the model, or does not."""

    PLAIN = "one process, or replicas"
    FSDP = "FSDP"
    DEEPSPEED = "DeepSpeed"
    MEGATRON = "Megatron-LM"


class Sharding(enum.Enum):
    """What replicas divide among them."""

    NOTHING = "nothing"
    STATE = "shard_optimizer_state"
    PARAMETERS = "sharded_data_parallel_degree"


@dataclass(frozen=True)
class LossScale:
    """How float16 scales the loss, by DeepSpeed's names."""

    static: float = 0.0
    power: int = 16
    window: int = 1000
    hysteresis: int = 2
    consecutive: bool = False
    least: float = 1.0


@dataclass(frozen=True)
class Optimizer:
    """A class of optimizers, with its arguments."""

    name: str
    arguments: dict[str, Any]

    @property
    def is_adam(self) -> bool:
        """Whether it stands for one of DeepSpeed's own, which has other arguments."""
        return self.name in ("torch.optim.Adam", "torch.optim.AdamW")


@dataclass
class Plan:
    """A job, and how it trains; each attribute is what keys of a file have said, or what they say by their absence."""

    engine: Engine
    #: Whether the script has an ``Accelerator``; else it is one for DeepSpeed's engine.
    has_accelerator: bool = True
    ranks: int = 1
    hosts: int = 1
    host_rank: int = 0
    #: Of the first host.
    address: str | None = None
    port: int | None = None
    rendezvous: str = "static"
    devices: str | None = None
    is_cpu_only: bool = False

    tensor: int = 1
    pipeline: int = 1
    #: Ranks that have the same samples in a way that is not here.
    others: int = 1
    microbatches: int = 1

    sharding: Sharding = Sharding.NOTHING
    #: What is asked for, of which :attr:`sharding` is what can be had.
    asked_stage: int = 0
    shards: int = 1
    #: Whether the file's numbers of shards and of their groups are not those of the replicas.
    is_uneven: bool = False
    #: "no", "fp16" or "bf16".
    precision: str = "no"
    #: Whether the model is cast, by a key, and not computed under autocast.
    is_cast: bool = False
    loss_scale: LossScale | None = None
    float32_gradients: bool = False
    clipping: float | None = None
    #: Steps of an ``Accelerator``; None where the script says it.
    accumulation: int | None = None
    #: Samples of a rank in a microbatch; None where the script says it.
    micro_batch: int | None = None
    train_batch: int | None = None
    optimizer: Optimizer | None = None

    bucket: int | None = None
    #: Parameters with fewer elements stay whole.
    threshold: int | None = None
    live: int | None = None
    is_hierarchical: bool | None = None
    offload_optimizer: bool | str = False
    offload_directory: str | None = None
    offload_activations: bool = False
    #: Names of classes that are checkpointed; empty for the classes that the model itself names.
    checkpointed: tuple[str, ...] | None = None
    checkpoint_attentions: bool | None = None
    is_delayed: bool = False
    #: What was said by the absence of a key, as its name and what that means.
    unsaid: dict[str, str] = field(default_factory=dict)

    @property
    def replicas(self) -> int:
        """Replicas of the model, which have samples of their own."""
        return max(1, self.ranks // (self.tensor * self.pipeline * self.others))

    @property
    def samples(self) -> int | None:
        """Samples of all replicas for one update, where the file says it."""
        if self.micro_batch is None:
            return None
        return self.micro_batch * (self.accumulation or 1) * self.replicas
