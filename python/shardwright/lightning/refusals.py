"""What cannot be trained over ranks is refused before training begins, in Lightning's own exception."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import callbacks
from lightning.pytorch.core.module import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torchmetrics import Metric

from shardwright.errors import ConfigError
from shardwright.half_precision import half_dtype
from shardwright.job.ranks import local_size, size
from shardwright.job.runtime import Runtime, current_runtime, find_runtime
from shardwright.model import DistributedModel

#: Hooks of a module or a callback that are called between forward and backward, which a step runs at once.
_HOOKS = {
    "on_before_backward": "use `on_after_backward`, or change the loss in `training_step`",
    "backward": "change the loss in `training_step`",
    "configure_sharded_model": "use `configure_model`",
}

#: Callbacks that change or copy the module in training.
_CALLBACKS = {
    "StochasticWeightAveraging": "use `smp.AveragedModel`",
    "WeightAveraging": "use `smp.AveragedModel`",
    "BaseFinetuning": "freeze parameters before training",
    "ModelPruning": "prune the module before training",
    "BatchSizeFinder": "choose the size by `smp.memory_report()`",
    "LearningRateFinder": "start a job for each learning rate",
    "OnExceptionCheckpoint": "use `ModelCheckpoint`: all ranks save together, and an exception may be that of one rank",
}


def started() -> Runtime:
    """Return the runtime of this rank.

    Raises:
        MisconfigurationException: ``smp.init`` has not been called, or with keys that are refused.
    """
    if find_runtime() is None:
        raise MisconfigurationException(
            "`ShardwrightStrategy` before `smp.init`: begin the script with `import shardwright as smp` and "
            '`smp.init({"pipeline_parallel_degree": 2, "microbatches": 4, "ddp": True})`, with the degrees of the job'
        )
    runtime = current_runtime()
    if half_dtype(runtime.place.cfg) is not None:
        raise MisconfigurationException(
            "`ShardwrightStrategy` with the configuration keys `fp16` or `bf16`, which cast the module: leave them "
            "out, and give the Trainer `precision='bf16-mixed'`"
        )
    return runtime


@contextlib.contextmanager
def told_as_misconfiguration() -> Iterator[None]:
    """Raise a :class:`ConfigError` of the block as the exception of Lightning."""
    try:
        yield
    except ConfigError as error:
        raise MisconfigurationException(str(error)) from error


def check_trainer_options(strategy: Any) -> None:
    """Raise if the Trainer, which has just been made, has options that ranks cannot have."""
    hosts = size() // local_size()
    if strategy.num_nodes not in (1, hosts):
        raise MisconfigurationException(
            f"`Trainer(num_nodes={strategy.num_nodes})` with `ShardwrightStrategy`; allowed: 1, or {hosts}, the number "
            "of hosts. The launcher has started the ranks"
        )
    if strategy._layer_sync is not None:
        raise MisconfigurationException(
            "`Trainer(sync_batchnorm=True)` with `ShardwrightStrategy`; allowed: False. Normalize over the samples of "
            "a microbatch, or by layers without statistics of a batch"
        )
    if strategy._checkpoint_io is not None:
        raise MisconfigurationException(
            f"`Trainer(plugins={type(strategy._checkpoint_io).__name__}())` with `ShardwrightStrategy`, whose "
            "checkpoints are those of `smp.save_checkpoint`: leave it out"
        )


def check_module(trainer: Any, module: LightningModule) -> None:
    """Raise if a module, or a callback of its Trainer, does what a step over ranks cannot."""
    devices = trainer._accelerator_connector._devices_flag
    count = devices if isinstance(devices, int) else len(devices)
    if count not in (1, local_size(), trainer.accelerator.auto_device_count()):
        raise MisconfigurationException(
            f"`Trainer(devices={devices})` with `ShardwrightStrategy`; allowed: 1, the device of this rank. The "
            "launcher has started the ranks"
        )
    name = type(module).__name__
    if not module.automatic_optimization:
        raise MisconfigurationException(
            f"`{name}.automatic_optimization` is False, which `ShardwrightStrategy` does not support: forward and "
            "backward run at once, in microbatches. Leave it True, and return the loss from `training_step`; or write "
            "the loop with `smp.step`"
        )
    for owner, hook in [(one, hook) for one in (module, *trainer.callbacks) for hook in _HOOKS]:
        if (owner is module or hook == "on_before_backward") and is_overridden(hook, owner):
            raise MisconfigurationException(
                f"`{type(owner).__name__}.{hook}` is overridden, which `ShardwrightStrategy` does not call: "
                f"{_HOOKS[hook]}"
            )
    if type(module).log is not LightningModule.log:
        raise MisconfigurationException(
            f"`{name}.log` is overridden, which `ShardwrightStrategy` does not call: log under other names in "
            "`training_step`"
        )
    for method in ("training_step", "validation_step", "test_step", "predict_step"):
        if is_param_in_hook_signature(getattr(module, method), "dataloader_iter", explicit=True):
            raise MisconfigurationException(
                f"`{name}.{method}(dataloader_iter)` with `ShardwrightStrategy`, which divides batches: take `batch`"
            )
    if any(isinstance(part, DistributedModel) for part in module.modules()):
        raise MisconfigurationException(
            f"`{name}` has a `smp.DistributedModel`: `ShardwrightStrategy` makes one of the whole module, so give it "
            "plain modules"
        )
    metrics = [path for path, part in module.named_modules() if isinstance(part, Metric)]
    if metrics and current_runtime().place.pp_size > 1:
        raise MisconfigurationException(
            f"`{name}.{metrics[0]}` is a torchmetrics.Metric, and a module that ranks would divide: keep it in a dict, "
            "as by `self.metrics = {'error': MeanSquaredError()}`"
        )
    for callback in trainer.callbacks:
        for kind, instead in _CALLBACKS.items():
            if isinstance(callback, getattr(callbacks, kind, ())):
                raise MisconfigurationException(f"`{kind}` with `ShardwrightStrategy` is not supported: {instead}")
        if getattr(callback, "save_on_exception", False):
            raise MisconfigurationException(
                "`ModelCheckpoint(save_on_exception=True)` with `ShardwrightStrategy`; allowed: False. All ranks save "
                "together, and an exception may be that of one rank"
            )
