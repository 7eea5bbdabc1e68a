"""``ShardwrightStrategy``: Lightning's Trainer over pipeline, tensor and data-parallel ranks."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.core.optimizer import _MockOptimizer
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_only
from torch.distributed import ReduceOp
from torch.utils.data import DataLoader

from shardwright.checkpoints import random_state
from shardwright.job.objects import allgather, barrier
from shardwright.job.ranks import WORLD, data_group, group_ranks, rank
from shardwright.job.runtime import current_runtime
from shardwright.lightning import saving
from shardwright.lightning.environment import JobEnvironment
from shardwright.lightning.loops import end_together
from shardwright.lightning.optimization import OptimizationInSteps, precision_over_ranks
from shardwright.lightning.refusals import check_module, check_trainer_options, started, told_as_misconfiguration
from shardwright.lightning.samples import divided, share_seeds
from shardwright.lightning.stepping import Stepping, Weight
from shardwright.model import DistributedModel
from shardwright.model.models import Models
from shardwright.optimizer import DistributedOptimizer
from shardwright.tensor_parallel.marking import mark_of, set_tensor_parallelism

_OPERATIONS = {ReduceOp.SUM: "sum", ReduceOp.AVG: "mean", ReduceOp.MAX: "max", ReduceOp.MIN: "min"}
_REDUCTIONS: dict[str, Any] = {
    "sum": torch.sum,
    "mean": torch.mean,
    "avg": torch.mean,
    "max": torch.amax,
    "min": torch.amin,
}


class ShardwrightStrategy(ParallelStrategy):
    """Trains a ``LightningModule`` over the ranks of a job; call ``smp.init`` first.

    The module is given to the Trainer as it is: the strategy makes a ``smp.DistributedModel`` of it, and runs
    ``training_step`` and the other steps in functions like those of ``smp.step``, once for each microbatch.
    Data-parallel ranks get different samples. What steps log are values of the whole batch, the same on every rank.
    With ``tensor_parallel_degree``, the whole module is marked for tensor parallelism unless the script has marked
    modules.

    Checkpoints are those of ``smp.save_checkpoint``, which jobs with other degrees resume. All ranks call every method
    of the Trainer.
    """

    strategy_name = "shardwright"

    def __init__(self, weight: Weight | None = None) -> None:
        """Create it.

        Args:
            weight: Says of a microbatch how much its loss counts, such as the number of labels that it is the mean of;
                by default all count alike. See :meth:`DistributedModel.backward`.

        Raises:
            MisconfigurationException: ``smp.init`` has not been called; or with keys that are refused.
        """
        place = started().place
        super().__init__(parallel_devices=[place.device], cluster_environment=JobEnvironment())
        self.num_nodes = 1
        self._to_predict: float = 0
        self._besides = 0
        #: Random number streams where the checkpoint was saved, until training has gone on.
        self._streams: dict[str, torch.Tensor] | None = None
        self._stepping = Stepping(weight, self._context_of)

    # --- which process this is

    @property
    def is_distributed(self) -> bool:
        """Whether Lightning divides the samples of a loader: not of one for training, which it always shuffles."""
        return self.lightning_module is None or not self.lightning_module.trainer.training

    @property
    def root_device(self) -> torch.device:
        """The device of this rank."""
        return current_runtime().place.device

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The number of ranks with different samples, and which of them this is."""
        ranks = group_ranks(data_group())
        return {"num_replicas": len(ranks), "rank": ranks.index(rank())}

    def set_world_ranks(self) -> None:
        """Let rank 0 of the job be the one that prints and reports."""
        rank_zero_only.rank = rank()  # type: ignore[attr-defined]

    def _configure_launcher(self) -> None:
        """Check the options of the Trainer: the job is running, and nothing is launched."""
        check_trainer_options(self)

    @property
    def precision_plugin(self) -> Precision:
        """What runs updates, and steps in autocast."""
        return precision_over_ranks(Precision() if self._precision_plugin is None else self._precision_plugin)

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        self._precision_plugin = None if precision_plugin is None else precision_over_ranks(precision_plugin)

    # --- the module and its optimizer

    def connect(self, model: LightningModule) -> None:
        """Take a module, and what it and callbacks log from now on."""
        super().connect(model)
        recorder = self._stepping.recorder

        def log(name: str, value: Any, *args: Any, **options: Any) -> None:
            recorder.log(model, name, value, *args, **options)

        vars(model)["log"] = log

    def setup_environment(self) -> None:
        """Check the module and the callbacks, which have been given to the Trainer by now."""
        super().setup_environment()
        assert self.lightning_module is not None, "it is connected"
        check_module(self.lightning_module.trainer, self.lightning_module)

    def setup(self, trainer: Trainer) -> None:
        """Divide the module, and create its optimizer before training."""
        assert self.accelerator is not None, "the Trainer sets it"
        self.accelerator.setup(trainer)
        module = self.lightning_module
        assert module is not None, "it is connected"
        self.model = self._divided(module)
        # What steps log is that of all ranks already.
        warnings.filterwarnings("ignore", message="It is recommended to use `self.log")
        if trainer.state.fn == TrainerFn.FITTING:
            self._reset_optimizers_and_schedulers()
            self.setup_optimizers(trainer)
            optimization: Any = trainer.fit_loop.epoch_loop.automatic_optimization
            optimization.__class__ = OptimizationInSteps
            end_together(trainer)

    def _divided(self, module: LightningModule) -> DistributedModel:
        known: DistributedModel
        for known in current_runtime()[Models].alive:
            if known.module is module:
                return known
        module.to(self.root_device)
        parts = list(module.modules())
        if len(current_runtime().place.tp_ranks) > 1 and not any(mark_of(part) for part in parts):
            set_tensor_parallelism(module)
        with told_as_misconfiguration():
            model = DistributedModel(module)
        # The module needs what divides it, in another Trainer too; as a child it would be a part of itself.
        vars(module)["_distributed_model"] = model
        return model

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Create the optimizer of the divided module, and its schedulers."""
        super().setup_optimizers(trainer)
        wrap: Any = DistributedOptimizer
        for optimizer in self.optimizers:
            if isinstance(optimizer, (_MockOptimizer, torch.optim.LBFGS)):
                given = "None" if isinstance(optimizer, _MockOptimizer) else "LBFGS, which runs steps again"
                raise MisconfigurationException(
                    f"`configure_optimizers` returned {given}, with `ShardwrightStrategy`: return another optimizer"
                )
            with told_as_misconfiguration():
                wrap(optimizer)
        self.optimizers = self.optimizers  # whose classes are others now

    def model_to_device(self) -> None:
        """Do nothing: parts of the module are where their ranks have put them."""

    def teardown(self) -> None:
        """Leave the module where it is, on the devices of its ranks; what is left of gradients goes."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        if self.lightning_module is not None:
            # One that is given up is collected on each rank in its own time, and must not seem to be trained till then.
            self.lightning_module.zero_grad()
            vars(self.lightning_module).pop("log", None)
        assert self.accelerator is not None, "the Trainer sets it"
        self.precision_plugin.teardown()
        self.accelerator.teardown()

    # --- steps

    def _context_of(self, name: str) -> AbstractContextManager[Any]:
        return self.precision_plugin.forward_context()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run forward and backward for a batch of this rank, in microbatches over the ranks of its model."""
        trainer, model = self._running()
        output = self._stepping.train(model, (*args, *kwargs.values()), trainer.accumulate_grad_batches)
        loss = output["loss"] if isinstance(output, Mapping) else output
        self.precision_plugin.post_backward(loss, trainer.lightning_module)
        return output

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """In a training that is resumed in the middle of an epoch, draw as if the loader had not begun anew."""
        if self._streams is not None and batch_idx > 0:
            random_state.restore(self._streams)
        self._streams = None

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate a batch of this rank."""
        return self._stepping.evaluate(self._running()[1], "validation_step", (*args, *kwargs.values()))

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Test a batch of this rank."""
        return self._stepping.evaluate(self._running()[1], "test_step", (*args, *kwargs.values()))

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Predict a batch of this rank; after its last, take part in those steps that other replicas have besides."""
        given = self._running()[1], "predict_step", (*args, *kwargs.values())
        output = self._stepping.evaluate(*given)
        self._to_predict -= 1
        if self._to_predict == 0:
            for _ in range(self._besides):
                self._stepping.evaluate(*given)
        return output

    def on_predict_start(self) -> None:
        """Compare numbers of batches: of predictions, samples are not filled up, so that replicas may have fewer."""
        count = sum(self._running()[0].num_predict_batches)
        every = allgather(count, data_group())
        self._to_predict = count
        self._besides = int(max(every) - count) if math.isfinite(max(every)) else 0

    def _running(self) -> tuple[Trainer, DistributedModel]:
        assert self.lightning_module is not None, "the Trainer connects it before it runs"
        assert isinstance(self.model, DistributedModel), "the Trainer sets up before it runs"
        return self.lightning_module.trainer, self.model

    def backward(self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise an error: steps run their backward themselves."""
        raise MisconfigurationException(
            "`manual_backward` with `ShardwrightStrategy`: return the loss from `training_step`, and the step runs it"
        )

    # --- data

    def process_dataloader(self, dataloader: object) -> object:
        """Divide samples over the ranks that get different ones, and let all ranks shuffle alike."""
        if not isinstance(dataloader, DataLoader):
            return dataloader
        if not self.is_distributed:
            dataloader = divided(dataloader, self._running()[0], **self.distributed_sampler_kwargs)
        share_seeds(dataloader, **self.distributed_sampler_kwargs)
        return dataloader

    # --- all ranks together

    def barrier(self, name: str | None = None) -> None:
        """Wait until all ranks of the job have come here."""
        barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the object of a rank, on all ranks."""
        return allgather(obj if rank() == src else None, WORLD)[src]

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return a tensor, reduced (mean, sum, max, min) over the ranks with different samples."""
        if not isinstance(tensor, torch.Tensor):
            return tensor
        _check_group(group)
        name = str(_OPERATIONS.get(reduce_op, reduce_op)).lower()
        if name not in _REDUCTIONS:
            raise MisconfigurationException(f"reduce_op is {reduce_op!r}; allowed: {', '.join(_REDUCTIONS)}")
        every = self._gathered(tensor)
        if name in ("mean", "avg") and not every.is_floating_point():
            every = every.float()
        return _REDUCTIONS[name](every, dim=0)

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """Return the tensors of the ranks with different samples, stacked; if there is one such rank, its tensor."""
        _check_group(group)
        if sync_grads:
            raise MisconfigurationException(
                "`all_gather(sync_grads=True)` with `ShardwrightStrategy`; allowed: False. Gradients are averaged over "
                "data-parallel ranks by the step"
            )
        return tensor if len(group_ranks(data_group())) == 1 else self._gathered(tensor)

    @staticmethod
    def _gathered(tensor: torch.Tensor) -> torch.Tensor:
        if current_runtime().step.running:
            raise MisconfigurationException(
                "values of other ranks are not to be had in `training_step` and other steps, which run for each "
                "microbatch: return them, and gather in `on_train_batch_end`"
            )
        every = allgather(tensor.detach().contiguous(), data_group())
        return torch.stack([one.to(tensor.device) for one in every])

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether all ranks of the job, or any of them, decide so."""
        every = allgather(bool(decision), WORLD)
        return False not in every if all else True in every

    # --- checkpoints

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Whether checkpoints are loaded into the divided module."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return nothing: each rank writes what it holds of the module."""
        return {}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return nothing: each rank writes what it holds of the optimizer's state."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save a checkpoint, in parts, into a folder. All ranks call this."""
        if storage_options is not None:
            raise MisconfigurationException(
                "`storage_options` with `ShardwrightStrategy`, which writes itself: leave it out"
            )
        if not isinstance(self.model, DistributedModel):
            return  # an exception has come before training, and a callback is to save then
        saving.save(checkpoint, self.broadcast(str(filepath)), self._running()[1], self._optimizer())

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a checkpoint, each rank what it holds. All ranks call this."""
        trainer, model = self._running()
        optimizer = self._optimizer() if trainer.state.fn == TrainerFn.FITTING else None
        content = saving.load(saving.found(self.broadcast(str(checkpoint_path))), model, optimizer)
        self._streams = random_state.streams()
        return content

    def _optimizer(self) -> Any:
        return self.optimizers[0] if self.optimizers else None

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Do nothing: the module is loaded with the checkpoint."""

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Do nothing: the optimizer is loaded with the checkpoint."""


def _check_group(group: Any) -> None:
    if group is not None and group is not torch.distributed.group.WORLD:
        raise MisconfigurationException(
            "a process group was given to `reduce` or `all_gather` with `ShardwrightStrategy`, which take the values "
            "of the ranks with different samples: leave it out"
        )
