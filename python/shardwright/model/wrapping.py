"""Raises errors for PyTorch wrappers that cannot be inside or around a ``smp.DistributedModel``."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, NoReturn

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from shardwright import quantized
from shardwright.errors import ConfigError, FrameError
from shardwright.frames.guards import divided_modules
from shardwright.job.runtime import find_runtime
from shardwright.patches import original_of
from shardwright.tensor_parallel.group import current_tensor_group
from shardwright.tensor_parallel.module import DistributedModule


def refuse_wrapped(module: nn.Module) -> None:
    """Raise :class:`ConfigError` if the module is, or contains, a wrapper that reduces or shards gradients.

    So does one with weights that cannot be sharded in a job that shards them.
    """
    runtime = find_runtime()
    if runtime is not None and runtime.place.shards_parameters:
        for name, parameter in module.named_parameters():
            if quantized.is_quantized(parameter) or quantized.beside(parameter):
                raise ConfigError(
                    f"the weight {name!r} is quantized, and sharded_data_parallel_degree would shard it: weights of "
                    "few bits are not sharded. Use pipeline_parallel_degree, or weights that are not quantized"
                )
    sharded = vars(sys.modules.get("torch.distributed.fsdp", object))  # not imported for this
    found = (sharded.get(name) for name in ("FullyShardedDataParallel", "FSDPModule"))
    kinds = (DataParallel, DistributedDataParallel, *(kind for kind in found if kind is not None))
    for name, part in module.named_modules():
        if isinstance(part, kinds):
            where = f"module {name!r} of it is" if name else "it is"
            raise ConfigError(
                f"smp.DistributedModel was given a {type(module).__name__}, and {where} a {type(part).__name__}: its "
                "collectives and those of the pipeline would wait for each other. Give smp.DistributedModel the plain "
                'module; with "ddp": True it averages gradients over data-parallel ranks itself'
            )


def refuse_divided(module: nn.Module) -> None:
    """Raise :class:`ConfigError` if an earlier job has divided the module: this process holds a part of its weights."""
    for name, part in module.named_modules():
        of_other_group = isinstance(part, DistributedModule) and part.tp_group is not current_tensor_group()
        if part in divided_modules or (of_other_group and part.tp_group.size > 1):
            where = f"its module {name!r}" if name else "it"
            raise ConfigError(
                f"smp.DistributedModel was given a {type(module).__name__} that is divided already: {where} has parts "
                "on other ranks, of this job or of one that this process has left, and the weights here are not "
                "whole. Make the model anew for each job, and load its weights from a checkpoint or a state dict"
            )


def refuse_compiling(module: nn.Module) -> None:
    """Raise :class:`FrameError` if the module is, or contains, a model with several pipeline ranks."""
    runtime = find_runtime()
    if runtime is not None and runtime.place.pp_size > 1 and _distributed_in(module):
        raise FrameError(
            "torch.compile of a smp.DistributedModel with pipeline_parallel_degree "
            f"{runtime.place.pp_size}: its graph would go past the modules on other ranks. Compile modules that lie "
            "whole on one rank instead, with module.compile(), before smp.DistributedModel wraps them"
        )


def refuse_compiled(values: Iterable[object]) -> None:
    """Raise :class:`FrameError` if ``torch.compile`` has made one of the values from such a module."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # not imported for this
    if dynamo is None:
        return
    for value in values:
        if isinstance(value, dynamo.OptimizedModule):
            refuse_compiling(value)


def _distributed_in(module: Any) -> bool:
    # A late import, because the model imports this module.
    from shardwright.model.distributed import DistributedModel

    return isinstance(module, nn.Module) and any(isinstance(part, DistributedModel) for part in module.modules())


def refuse_around(wrapper: str) -> NoReturn:
    """Raise :class:`ConfigError`: the PyTorch wrapper was applied to a ``smp.DistributedModel``."""
    raise ConfigError(
        f"{wrapper} was given a smp.DistributedModel, which averages gradients over data-parallel ranks "
        'itself: leave the wrapper out, and have "ddp": True in the configuration. accelerate applies it in prepare(): '
        "write `from shardwright.accelerate import Accelerator`"
    )


def refuse_trainer() -> NoReturn:
    """Raise :class:`ConfigError`: transformers' Trainer was given a ``smp.DistributedModel``."""
    raise ConfigError(
        "transformers.Trainer was given a smp.DistributedModel, whose forward and backward run in smp.step: write "
        "`from shardwright.huggingface import Trainer, TrainingArguments`, and give that Trainer the model itself"
    )


def make_parallel(wrapper: DistributedDataParallel, module: Any, *args: Any, **kwargs: Any) -> None:
    """Replace ``DistributedDataParallel.__init__``, which would average what tensor parallelism divides."""
    if _distributed_in(module):
        refuse_around(type(wrapper).__name__)
    original_of(make_parallel)(wrapper, module, *args, **kwargs)
