"""Training arguments of a process that is a rank of a job."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
import transformers

from shardwright.accelerate.seat import refuse_other_engines, started, take_seat
from shardwright.errors import ConfigError
from shardwright.job.objects import barrier
from shardwright.job.ranks import rank

#: What the arguments of transformers have that divides the model, or the batch, in another way.
_REFUSED = {
    "deepspeed": "leave it out; smp.init has keys for what it does",
    "fsdp": "leave it out, and give sharded_data_parallel_degree to smp.init",
    "parallelism_config": "leave it out, and give degrees to smp.init",
    "auto_find_batch_size": "choose the size by smp.memory_report()",
    "torch_compile": "call compile() on modules that lie on one rank, before the Trainer is made",
    "fp16_full_eval": "use fp16=True, or the configuration key fp16",
    "bf16_full_eval": "use bf16=True, or the configuration key bf16",
}


class OfRank:
    """What arguments of ``transformers`` say in a rank of a job: counts are of ranks with different samples."""

    distributed_state: Any

    @functools.cached_property
    def _setup_devices(self) -> torch.device:
        runtime = started("TrainingArguments were read")
        refuse_other_engines()
        for name, instead in _REFUSED.items():
            if getattr(self, name, None):
                raise ConfigError(f"TrainingArguments have {name}={getattr(self, name)!r}: {instead}")
        device = runtime.place.device
        if getattr(self, "use_cpu", False) and device.type != "cpu":
            raise ConfigError('TrainingArguments have use_cpu=True: start the job with CUDA_VISIBLE_DEVICES=""')
        self.distributed_state = take_seat(runtime)
        self._n_gpu = 0 if device.type == "cpu" else 1
        return device

    @property
    def should_save(self) -> bool:
        """Whether this rank writes what one process writes: the first of its host, or of the job."""
        return self._is_first(getattr(self, "save_on_each_node", False))

    @property
    def should_log(self) -> bool:
        """Whether this rank logs: the first of its host, or of the job."""
        return self._is_first(getattr(self, "log_on_each_node", False))

    def _is_first(self, on_each_node: bool) -> bool:
        return bool(getattr(self, "local_process_index") == 0 if on_each_node else rank() == 0)  # noqa: B009

    @contextlib.contextmanager
    def main_process_first(self, local: bool = True, desc: str = "work") -> Iterator[None]:
        """Let the first rank of each host, or of the job, run the block before the others."""
        is_first = self._is_first(local)
        if not is_first:
            barrier()
        yield
        if is_first:
            barrier()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Save the arguments as those of transformers, which a process without this library reads."""
        return object.__reduce_ex__(self, 1)[0], (_plain(type(self)), object, None), self.__dict__


class TrainingArguments(OfRank, transformers.TrainingArguments):
    """``transformers.TrainingArguments`` in a rank of a job; call ``smp.init`` first."""


class Seq2SeqTrainingArguments(OfRank, transformers.Seq2SeqTrainingArguments):
    """``transformers.Seq2SeqTrainingArguments`` in a rank of a job; call ``smp.init`` first."""


_OWN = {
    TrainingArguments: transformers.TrainingArguments,
    Seq2SeqTrainingArguments: transformers.Seq2SeqTrainingArguments,
}
#: Of arguments that a script has made without this library.
_MADE: dict[type, type] = {}


def _plain(kind: type) -> type:
    for plain, made in [*_MADE.items(), *((plain, own) for own, plain in _OWN.items())]:
        if made is kind:
            return plain
    return kind


def kind_of_rank(kind: type) -> Any:
    """Return the class of arguments that is one of ``transformers``, or of another library, in a rank of a job."""
    if kind not in _MADE:
        own = next((own for own, plain in _OWN.items() if plain is kind), None)
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
        _MADE[kind] = own or type(kind.__name__, (OfRank, kind), names)
    return _MADE[kind]


def as_of_rank(arguments: Any) -> Any:
    """Let arguments of ``transformers`` say, from now on, what those of a rank say.

    Raises:
        ConfigError: They have computed with the number of processes while it was not that of a rank.
    """
    if not isinstance(arguments, OfRank):
        kind, counted = type(arguments), arguments.world_size
        arguments.__class__ = kind_of_rank(kind)
        arguments.__dict__.pop("_setup_devices", None)
        assert arguments._setup_devices is not None, "it sets the device, and the number"
        replicas = arguments.world_size
        if counted != replicas and _computes_with_processes(kind):
            raise ConfigError(
                f"{kind.__name__} computes with the number of processes, which was {counted} where it was made, and "
                f"{replicas} ranks have different samples: make it by over_ranks({kind.__name__}) of "
                "shardwright.huggingface"
            )
    assert arguments._setup_devices is not None, "it sets the device"
    return arguments


def _computes_with_processes(kind: type) -> bool:
    """Return whether a class reads their number at the end of its ``__init__``, as none of transformers does."""
    made = [vars(one)["__post_init__"] for one in kind.__mro__ if "__post_init__" in vars(one)]
    own = [one.__code__ for one in made if not one.__module__.startswith("transformers.")]
    return any({"world_size", "num_processes"} & set(code.co_names) for code in own)
