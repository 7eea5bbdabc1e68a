"""Facts about Lightning's strategy that every rank of a job checks; the last line of the output says how many.

usage: python -m tests.trainers.lightning_checks RANKS FOLDER
"""

from __future__ import annotations

import copy
import math
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import shardwright as smp
import torch
import torchmetrics
from lightning.pytorch import callbacks
from lightning.pytorch.loggers import CSVLogger
from shardwright.lightning import ShardwrightStrategy, saving
from torch import nn
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset

from tests.trainers import lightning_refusals  # noqa: F401  # whose checks run after these
from tests.trainers.lightning_modules import (
    CHECKS,
    FOLDER,
    WIDTH,
    Module,
    batches_of,
    check,
    descended,
    loader,
    made,
    same,
    samples,
    trainer_of,
)


@check
def losses_are_those_of_the_global_batch_however_gradients_are_accumulated_and_clipped() -> None:
    clips = {
        "norm": lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.1),
        "value": lambda parameters: nn.utils.clip_grad_value_(parameters, 0.01),
    }
    for kind, clip in clips.items():
        limit = 0.1 if kind == "norm" else 0.01
        expected = descended(made(), batches_of(60, 12), 2, clip, 2)
        module = made()
        trainer = trainer_of(
            accumulate_grad_batches=2, gradient_clip_val=limit, gradient_clip_algorithm=kind, max_epochs=2
        )
        trainer.fit(module, loader(60, 12))
        same(module.seen, expected)
        assert trainer.global_step == 6


@check
def a_last_batch_that_microbatches_do_not_divide_is_trained_on() -> None:
    replicas = smp.dp_size()
    expected = descended(made(), batches_of(7 * replicas, 4 * replicas))
    module = made()
    trainer_of().fit(module, loader(7 * replicas, 4 * replicas))
    same(module.seen, expected)


@check
def samples_that_replicas_do_not_divide_are_filled_up_as_by_other_strategies() -> None:
    module = made()
    trainer = trainer_of()
    trainer.fit(module, loader(13, 6))
    mine = math.ceil(13 / smp.dp_size())
    assert len(module.seen) == math.ceil(mine / (6 // smp.dp_size()))
    every = smp.allgather(module.seen, smp.WORLD)
    assert all(one == every[0] for one in every)


@check
def values_of_evaluations_are_those_of_all_samples() -> None:
    count = 10 * smp.dp_size()
    module = made()
    plain = copy.deepcopy(module)
    trainer = trainer_of()
    trainer.fit(module, loader(12, 6), DataLoader(samples(count), batch_size=4))
    descended(plain, batches_of(12, 6))
    with torch.no_grad():
        inputs, wanted = samples(count).tensors
        expected = float(nn.functional.mse_loss(plain(inputs), wanted))
    same(float(trainer.callback_metrics["val_loss"]), expected, 1e-6)  # which Lightning adds up in float32
    for run in (trainer.validate, trainer.test):
        (found,) = run(module, DataLoader(samples(count), batch_size=4), verbose=False)
        same(found["val_loss"], expected, 1e-6)


@check
def predictions_are_those_of_this_replica_each_once() -> None:
    for count in (13, 9, 1 + 4 * smp.dp_size()):
        module = made()
        predicted = trainer_of().predict(module, DataLoader(samples(count), batch_size=4))
        assert predicted is not None
        mine = torch.cat(list(predicted)) if predicted else torch.empty(0, dtype=torch.float64)  # type: ignore[arg-type]
        with torch.no_grad():
            expected = made()(samples(count).tensors[0])[smp.dp_rank() :: smp.dp_size()]
        assert mine.shape == expected.shape
        assert torch.allclose(mine, expected)


@check
def reductions_of_what_is_logged_are_of_all_microbatches_and_ranks() -> None:
    class Logs(Module):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            for name in ("mean", "sum", "max", "min"):
                value = batch[1].sum() if name == "sum" else getattr(batch[1], name)()
                self.log(name, value, reduce_fx=name)
            self.log("number", batch[1].shape[0], reduce_fx=sum)
            if float(batch[1].max()) == float(samples(12).tensors[1].max()):
                self.log("seldom", 3.0, prog_bar=True)
            self.log("again", 1.0, batch_size=len(batch[1]), add_dataloader_idx=False, rank_zero_only=True)

    trainer = trainer_of()
    (found,) = trainer.validate(made(Logs), loader(12, 6), verbose=False)
    wanted = samples(12).tensors[1]
    for name in ("mean", "sum", "max", "min"):
        same(found[name], float(getattr(wanted, name)()), 1e-6)
    assert (found["number"], found["seldom"], found["again"]) == (12, 3.0, 1.0)


@check
def the_weight_of_a_microbatch_counts_in_gradients_and_values() -> None:
    class Labelled(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = nn.functional.mse_loss(self(batch[0])[batch[2]], batch[1][batch[2]])
            self.log("loss", loss)
            return loss

    def few(count: int) -> TensorDataset:
        inputs, wanted = samples(count).tensors
        return TensorDataset(inputs, wanted, torch.arange(count) % 5 != 1)

    module, plain = made(Labelled), made(Labelled)
    optimizer, expected = plain.configure_optimizers(), []
    for inputs, wanted, counted in DataLoader(few(36), batch_size=12):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(plain(inputs)[counted], wanted[counted])
        loss.backward()
        optimizer.step()
        expected.append(float(loss.detach()))
    trainer = trainer_of(ShardwrightStrategy(weight=lambda batch: batch[2].sum()))
    trainer.fit(module, DataLoader(few(36), batch_size=12 // smp.dp_size()))
    same(module.seen, expected)


@check
def hooks_see_gradients_and_outputs_of_the_whole_batch() -> None:
    seen = []

    class Hooked(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            outputs = self(batch[0])
            loss = nn.functional.mse_loss(outputs, batch[1])
            self.log("loss", loss)
            return {"loss": loss, "outputs": outputs, "name": "one"}

        def on_after_backward(self) -> None:
            seen.append(any(one.grad is not None for one in self.trainer.model.local_parameters()))

        def on_before_zero_grad(self, optimizer: Any) -> None:
            seen.append("cleared")

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            assert outputs["outputs"].shape == batch[1].shape
            assert outputs["name"] == "one"
            loss = nn.functional.mse_loss(outputs["outputs"], batch[1])
            assert torch.allclose(outputs["loss"], loss)

        def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            assert outputs["outputs"].shape == batch[1].shape

    trainer = trainer_of()
    trainer.fit(made(Hooked), loader(12, 6), loader(12, 6))
    assert seen == ["cleared", True] * 2
    assert (trainer.world_size, trainer.global_rank) == (smp.size(), smp.rank())
    assert trainer.is_global_zero == (smp.rank() == 0)
    assert trainer.distributed_sampler_kwargs == {"num_replicas": smp.dp_size(), "rank": smp.dp_rank()}


@check
def ranks_agree_on_values_and_decisions() -> None:
    strategy = ShardwrightStrategy()
    trainer_of(strategy)
    mine = torch.tensor([float(smp.dp_rank()), 1.0])
    replicas = smp.dp_size()
    total = float(sum(range(replicas)))
    assert strategy.reduce(mine, reduce_op="sum").tolist() == [total, replicas]
    assert strategy.reduce(mine).tolist() == pytest.approx([total / replicas, 1.0])
    assert strategy.reduce(mine, reduce_op=torch.distributed.ReduceOp.MAX).tolist() == [replicas - 1.0, 1.0]
    gathered = strategy.all_gather(mine)
    assert gathered.shape == ((replicas, 2) if replicas > 1 else (2,))
    assert strategy.broadcast({"rank": smp.rank()}) == {"rank": 0}
    assert strategy.broadcast(smp.rank(), src=smp.size() - 1) == smp.size() - 1
    last = smp.rank() == smp.size() - 1
    assert strategy.reduce_boolean_decision(last, all=False)
    assert strategy.reduce_boolean_decision(last) == (smp.size() == 1)
    strategy.barrier()


@check
def a_rank_that_stops_stops_all_after_the_same_batch() -> None:
    class Stops(callbacks.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            trainer.should_stop = batch_idx == 1 and smp.rank() == smp.size() - 1

        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            assert trainer.should_stop, "another rank has stopped"

    trainer = trainer_of(callbacks=[Stops()], max_epochs=3)
    trainer.fit(made(), loader(24, 6), DataLoader(samples(4 * smp.dp_size()), batch_size=4))
    assert trainer.global_step == 2


@check
def the_last_checkpoint_that_is_complete_is_gone_on_from() -> None:
    folder, kept = FOLDER / "last", {"max_epochs": 3, "enable_checkpointing": True}
    first, second = (callbacks.ModelCheckpoint(folder, "{epoch}", save_top_k=-1, save_last=True) for _ in range(2))
    trainer_of(callbacks=[first], **kept).fit(made(), loader(12, 6))
    smp.barrier()
    if smp.rank() == 0:  # as a rank that is killed in a save leaves it
        (folder / "last.ckpt" / "lightning_partial" / "manifest.json").unlink()
        (folder / "epoch=2.ckpt" / "lightning_partial" / "manifest.json").unlink()
    with mock.patch("os.path.isdir", return_value=smp.rank() == 0):  # others may not see the folder
        assert saving.found(str(folder / "last.ckpt")) == str(folder / "epoch=1.ckpt")
    trainer, module = trainer_of(callbacks=[second], **kept), made()
    trainer.fit(module, loader(12, 6), ckpt_path="last")
    assert (trainer.global_step, len(module.seen)) == (6, 2)


@check
def the_best_checkpoint_is_found_and_loaded_and_any_resumed_exactly() -> None:
    folder = FOLDER / "kept"

    def trained(resumed_from: str | None = None) -> tuple[Any, Any]:
        kept = [
            callbacks.ModelCheckpoint(
                str(folder / "best"), "{epoch}", monitor="val_loss", save_top_k=2, save_last=True
            ),
            callbacks.ModelCheckpoint(str(folder / "all"), "{epoch}", save_top_k=-1),
            callbacks.EarlyStopping("val_loss", patience=20),
        ]
        logger = CSVLogger(str(FOLDER), version=smp.size())
        trainer = trainer_of(callbacks=kept, enable_checkpointing=True, max_epochs=6, logger=logger)
        module = made(Module, 0.2)
        module.save_hyperparameters({"width": WIDTH, "nested": {"list": [1, 2.5, "x"]}})
        trainer.fit(module, loader(24, 12, shuffle=True), loader(12, 6), ckpt_path=resumed_from)
        return trainer, module

    trainer, module = trained()
    best: Any = trainer.checkpoint_callback
    assert len(best.best_k_models) == 2
    assert all(Path(path).is_dir() for path in (*best.best_k_models, best.last_model_path))
    assert len(list((folder / "best").iterdir())) == 3, "others were removed"
    (found,) = trainer.validate(ckpt_path="best", dataloaders=loader(12, 6), verbose=False)
    same(found["val_loss"], float(best.best_model_score), 1e-6)
    (found,) = trainer_of().validate(made(), loader(12, 6), ckpt_path=best.best_model_path, verbose=False)
    same(found["val_loss"], float(best.best_model_score), 1e-6)

    resumed, again = trained(str(folder / "all" / "epoch=3.ckpt"))
    assert (resumed.current_epoch, resumed.global_step) == (6, 12)
    assert len(again.seen) == 4
    assert again.seen == module.seen[-4:]
    last: Any = resumed.checkpoint_callback
    assert float(last.best_model_score) == float(best.best_model_score)
    assert sorted(map(float, last.best_k_models.values())) == sorted(map(float, best.best_k_models.values()))


@check
def a_module_goes_on_in_another_trainer() -> None:
    expected = descended(made(), batches_of(24, 12), epochs=1)
    module = made()
    trainer_of().fit(module, loader(24, 12))
    trainer_of().validate(module, loader(12, 6), verbose=False)
    trainer_of(max_epochs=1).fit(module, loader(24, 12))
    same(module.seen[:2], expected)
    assert module.seen[2] < module.seen[0]
    assert "log" not in vars(module)


@check
def schedulers_of_steps_and_epochs_and_the_plateau_are_the_same_on_all_ranks() -> None:
    rates = []

    class Scheduled(Module):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            schedulers = [
                {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9), "interval": "step"},
                {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), "interval": "epoch"},
                {"scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0), "monitor": "val_loss"},
            ]
            return [optimizer], schedulers

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    trainer_of(max_epochs=2, callbacks=[callbacks.LearningRateMonitor()], logger=CSVLogger(str(FOLDER))).fit(
        made(Scheduled), loader(24, 12), loader(12, 6)
    )
    assert rates[:2] == pytest.approx([0.05 * 0.9, 0.05 * 0.81 * 0.5]), rates
    assert all(one == rates for one in smp.allgather(rates, smp.WORLD))


@check
def shuffled_samples_are_the_same_on_the_ranks_of_a_model_and_different_on_others() -> None:
    seen: list[list[float]] = []

    class Sees(Module):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            torch.randn(smp.rank() + 1)  # ranks draw different numbers
            seen.append(batch[1].tolist())

    for options in ({"shuffle": True}, {"sampler": SubsetRandomSampler(range(24))}):
        seen.clear()
        trainer_of(max_epochs=2).fit(made(Sees), loader(24, 12, **options))
        one, two = seen[: len(seen) // 2], seen[len(seen) // 2 :]
        assert one != two
        for epoch in (one, two):
            everyone = smp.allgather([value for batch in epoch for value in batch], smp.WORLD)
            places = smp.allgather(smp.dp_rank(), smp.WORLD)
            by_place = {place: values for place, values in zip(places, everyone, strict=True)}
            assert all(by_place[place] == values for place, values in zip(places, everyone, strict=True))
            assert sorted(value for values in by_place.values() for value in values) == sorted(
                samples(24).tensors[1].tolist()
            )


@check
def metrics_of_torchmetrics_are_of_all_samples() -> None:
    class Measured(Module):
        def __init__(self) -> None:
            super().__init__()
            group = smp.get_dp_process_group() if smp.size() > 1 else None
            self.metrics = {
                "error": torchmetrics.MeanSquaredError(process_group=group),
                "total": torchmetrics.SumMetric(process_group=group),
            }

        def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.metrics["error"].update(outputs["outputs"], batch[1])
            self.metrics["total"].update(batch[1])

        def on_validation_epoch_end(self) -> None:
            self.log_dict({name: metric.compute() for name, metric in self.metrics.items()})

    (found,) = trainer_of().validate(made(Measured), loader(12, 6), verbose=False)
    same(found["error"], found["val_loss"], 1e-5)
    same(found["total"], float(samples(12).tensors[1].sum()), 1e-5)


@check
def autocast_is_that_of_one_process() -> None:
    def cast(module: Any) -> list[float]:
        optimizer, losses = module.configure_optimizers(), []
        for inputs, wanted in batches_of(24, 12):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = nn.functional.mse_loss(module(inputs.float()), wanted.float())
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        return losses

    class Single(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            outputs = self(batch[0].float())
            assert torch.is_autocast_enabled("cpu")
            loss = nn.functional.mse_loss(outputs, batch[1].float())
            self.log("loss", loss)
            return loss

    module = made(Single).float()
    trainer_of(precision="bf16-mixed").fit(module, loader(24, 12))
    same(module.seen, cast(made(Single).float()), 2e-2)


def main() -> None:
    """Run all checks."""
    warnings.filterwarnings("ignore", module="lightning")
    ranks = int(sys.argv[1])
    pipeline = 1 if ranks in (1, 3) else 2
    smp.init(
        {"pipeline_parallel_degree": pipeline, "microbatches": 2, "ddp": True, "deterministic_server": pipeline > 1}
    )
    CHECKS.run(smp.rank())
    smp.shutdown()


if __name__ == "__main__":
    main()
