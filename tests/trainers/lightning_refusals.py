"""What Lightning's strategy refuses, which every rank of a job checks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning
import shardwright as smp
import torch
import torchmetrics
from lightning.pytorch import callbacks
from lightning.pytorch.plugins import TorchCheckpointIO
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from tests.trainers.lightning_modules import FOLDER, Module, check, loader, made, refused, samples, trainer_of


class Words(Dataset[Any]):
    """Samples with texts, which have no tensors."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        return torch.ones(8, dtype=torch.float64), torch.tensor(1.0, dtype=torch.float64), "word"


@check
def what_ranks_cannot_do_is_refused_by_name() -> None:
    def made_with(**options: Any) -> Callable[[], Any]:
        return lambda: trainer_of(**options)

    def fitted(module: Any, given: Any = None, **options: Any) -> Callable[[], Any]:
        return lambda: trainer_of(**options).fit(module, loader(12, 6) if given is None else given)

    def overriding(**methods: Any) -> Any:
        return made(type("Own", (Module,), methods))

    for precision in ("16-true", "bf16-true", "64-true"):
        refused("allowed: '32-true' and 'bf16-mixed'", made_with(precision=precision))
    refused("num_nodes=5", made_with(num_nodes=5))
    refused("sync_batchnorm=True", made_with(sync_batchnorm=True))
    refused("smp.save_checkpoint", made_with(plugins=[TorchCheckpointIO()]))
    refused("devices=7", fitted(made(), devices=7))
    refused("CPU parallel_devices|accelerator", lambda: trainer_of(accelerator="cuda"))

    manual = made()
    manual.automatic_optimization = False
    refused("automatic_optimization` is False", fitted(manual))
    refused(r"Own.backward` is overridden", fitted(overriding(backward=lambda self, loss: loss.backward())))
    refused(r"Own.on_before_backward", fitted(overriding(on_before_backward=lambda self, loss: None)))
    refused(r"Own.log` is overridden", fitted(overriding(log=lambda self, *args, **kwargs: None)))
    refused("dataloader_iter", fitted(overriding(training_step=lambda self, dataloader_iter: None)))
    refused("returned None", fitted(overriding(configure_optimizers=lambda self: None)))
    lbfgs = overriding(configure_optimizers=lambda self: torch.optim.LBFGS(self.parameters()))
    refused("LBFGS", fitted(lbfgs))

    class Watches(lightning.Callback):
        def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
            """Be refused."""

    if smp.pp_size() > 1:
        counting = made()
        counting.total = torchmetrics.SumMetric()
        refused("total` is a torchmetrics.Metric", fitted(counting))
    for one, text in (
        (Watches(), "Watches.on_before_backward"),
        (callbacks.StochasticWeightAveraging(1e-2), "StochasticWeightAveraging"),
        (callbacks.EMAWeightAveraging(), "WeightAveraging"),
        (callbacks.BatchSizeFinder(), "BatchSizeFinder"),
        (callbacks.LearningRateFinder(), "LearningRateFinder"),
        (callbacks.BackboneFinetuning(), "BaseFinetuning"),
        (callbacks.OnExceptionCheckpoint(str(FOLDER)), "OnExceptionCheckpoint"),
        (callbacks.ModelCheckpoint(str(FOLDER), save_on_exception=True), "save_on_exception=True"),
    ):
        options = {"enable_checkpointing": True} if isinstance(one, callbacks.Checkpoint) else {}
        refused(text, fitted(made(), callbacks=[one], **options))

    refused("not a checkpoint|no checkpoint", lambda: trainer_of().fit(made(), loader(12, 6), ckpt_path=str(FOLDER)))
    unfit = DistributedSampler(samples(12), num_replicas=5, rank=0)
    refused("divides samples by 5", fitted(made(), DataLoader(samples(12), batch_size=2, sampler=unfit)))


@check
def what_a_step_cannot_do_is_refused_on_all_ranks() -> None:
    def fitted(given: Any = None, **methods: Any) -> Callable[[], Any]:
        module = made(type("Own", (Module,), methods))
        return lambda: trainer_of().fit(module, loader(12, 6) if given is None else given)

    def nothing(self: Any, batch: Any, batch_idx: int) -> None:
        self(batch[0])

    def gathers(self: Any, batch: Any, batch_idx: int) -> Any:
        return self.all_gather(self(batch[0])).mean()

    def measures(self: Any, batch: Any, batch_idx: int) -> Any:
        loss = self(batch[0]).mean()
        self.log("metric", torchmetrics.MeanMetric())
        return loss

    here: Any = (MisconfigurationException, smp.RemoteError)  # by who ran it, and by who was told of it
    refused("must return a Tensor", fitted(training_step=nothing), here)
    refused("torchmetrics.Metric", fitted(training_step=measures), here)
    if smp.dp_size() > 1:
        refused("values of other ranks", fitted(training_step=gathers), here)
    refused("without tensors", fitted(DataLoader(Words(), batch_size=12 // smp.dp_size())))
