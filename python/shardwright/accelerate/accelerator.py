"""``Accelerator`` for models that ``smp.DistributedModel`` divides."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn, Self

import accelerate
import torch
from accelerate.data_loader import get_sampler
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import recursively_apply
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, RandomSampler

from shardwright.accelerate.gathering import gathered, gathered_objects, padded, reduced
from shardwright.accelerate.seat import refuse_other_engines, started, take_seat
from shardwright.accelerate.states import load_state, save_state
from shardwright.accelerate.streams import counted
from shardwright.checkpoints.full import whole_in_one_process
from shardwright.errors import ConfigError
from shardwright.half_precision import half_dtype
from shardwright.job.objects import allgather, barrier
from shardwright.job.ranks import WORLD, local_rank, rank, size
from shardwright.job.runtime import current_runtime
from shardwright.model import DistributedModel
from shardwright.optimizer import DistributedOptimizer, clip_grad_norm_
from shardwright.optimizer.half_precision import HalfPrecision
from shardwright.sharded_data_parallel.parameters import ShardedParameters

#: What accelerate would divide, or dispatch, in its own way.
_OTHER_ENGINES = ("deepspeed_plugin", "deepspeed_plugins", "fsdp_plugin", "megatron_lm_plugin", "parallelism_config")


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """``accelerate.Accelerator`` for a job of this library; call ``smp.init`` first.

    :meth:`prepare` makes a ``smp.DistributedModel`` of a model and a ``smp.DistributedOptimizer`` of an optimizer, and
    lets a data loader give different samples to data-parallel ranks, and the same to the ranks of a pipeline. Call the
    model, and :meth:`backward`, in a function decorated with ``smp.step``. Processes that are counted, such as
    ``num_processes`` and ``process_index``, are ranks with different samples; :attr:`is_main_process` is rank 0.

    Raises:
        ConfigError: ``smp.init`` has not been called; or accelerate is to divide the model in its own way.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Create it, with the arguments of ``accelerate.Accelerator``."""
        runtime = started("shardwright.accelerate.Accelerator")
        refuse_other_engines()
        given = [name for name in _OTHER_ENGINES if kwargs.get(name) is not None]
        if given:
            raise ConfigError(
                f"Accelerator was given {', '.join(given)}, and smp.DistributedModel divides the model: leave it out, "
                "and give degrees to smp.init"
            )
        take_seat(runtime)
        super().__init__(*args, **kwargs)
        self._settle()

    @classmethod
    def taken_over(cls, accelerator: accelerate.Accelerator) -> Self:
        """Make one of what another library has created, in place, which has prepared nothing yet."""
        accelerator.__class__ = cls
        assert isinstance(accelerator, cls), "it was just made one"
        accelerator._settle()
        return accelerator

    def _settle(self) -> None:
        place = current_runtime().place
        loading = self.dataloader_config
        if loading.dispatch_batches:
            raise ConfigError(
                "dispatch_batches=True, by which one process reads batches for all: leave it out; every rank reads its "
                "own samples"
            )
        loading.dispatch_batches = False
        # Ranks draw random numbers in steps, each its own; the order of samples has a seed of its own.
        loading.use_seedable_sampler = True
        if not loading.even_batches and self.num_processes > 1:
            raise ConfigError(
                "even_batches=False, by which ranks would have different numbers of batches: leave it out, or drop the "
                "last samples by drop_last=True"
            )
        if self.mixed_precision == "fp8":
            raise ConfigError('mixed_precision="fp8"; allowed: "no", "fp16", "bf16"')
        if self.mixed_precision != "no" and (dtype := half_dtype(place.cfg)) is not None:
            key = "fp16" if dtype is torch.float16 else "bf16"
            raise ConfigError(
                f'mixed_precision="{self.mixed_precision}" runs a float32 model under autocast, and the configuration '
                f"key {key} casts the model: use one of them"
            )

    # --- which process this is

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0 of the job."""
        return rank() == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first rank of its host."""
        return local_rank() == 0

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last rank of the job."""
        return rank() == size() - 1

    def wait_for_everyone(self) -> None:
        """Wait until all ranks of the job have called this."""
        barrier()

    @contextlib.contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Let rank 0 of the job run the block before the others."""
        with _first(self.is_main_process):
            yield

    @contextlib.contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """Let the first rank of each host run the block before the others."""
        with _first(self.is_local_main_process):
            yield

    # --- preparing

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> DistributedModel:
        """Move a model to the device of this rank, and divide it; an optimizer is created after this.

        With ``mixed_precision``, use ``with accelerator.autocast():`` in the step function.
        """
        if not isinstance(model, DistributedModel):
            if self.device_placement if device_placement is None else device_placement:
                model = model.to(self.device)
            model = DistributedModel(model)
        if not any(one is model for one in self._models):
            self._models.append(model)
        return model

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """Make a ``smp.DistributedOptimizer`` of an optimizer, and let it update in the last step of an accumulation.

        State that is loaded goes to the device of each parameter.
        """
        if isinstance(optimizer, AcceleratedOptimizer):
            if not any(one is optimizer for one in self._optimizers):
                self._optimizers.append(optimizer)
            return optimizer
        if self._models and foreign(optimizer, self._models):
            raise ConfigError(
                "accelerator.prepare was given an optimizer with parameters that no prepared model has, since tensor "
                "parallelism has replaced them or it is of another model: prepare the model first, and create the "
                "optimizer of model.parameters() of what that returns"
            )
        return super().prepare_optimizer(distributed(optimizer), device_placement=False)

    def prepare_scheduler(self, scheduler: LRScheduler) -> AcceleratedScheduler:
        """Let a learning-rate scheduler advance once for each step of every rank with different samples."""
        return super().prepare_scheduler(scheduler)

    def prepare_data_loader(
        self, data_loader: DataLoader[Any], device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """Let a data loader give different samples to data-parallel ranks, and the same to those of a pipeline.

        All ranks call this. Samples are shuffled as rank 0 has seeded it.
        """
        loading = self.dataloader_config
        if loading.data_seed is None:
            loading.data_seed = allgather(torch.initial_seed(), WORLD)[0]
        sampler = get_sampler(data_loader)
        if getattr(sampler, "generator", sampler) is None and not isinstance(sampler, RandomSampler):
            sampler.generator = torch.Generator().manual_seed(loading.data_seed)
        return counted(super().prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch))

    def unwrap_model(self, model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> Any:
        """Return the module that was given to :meth:`prepare`; distributed modules stay in it."""
        model = getattr(model, "divided_model", model)  # of what runs it in steps
        if isinstance(model, DistributedModel):
            return model.module
        return super().unwrap_model(model, keep_fp32_wrapper, keep_torch_compile)

    # --- training

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Run the backward pass from a loss, in a step function, over all ranks of the model.

        The loss is divided by the number of steps that are accumulated, and scaled with ``mixed_precision="fp16"``.

        Args:
            loss: The loss of the microbatch.
            **kwargs: Arguments of :meth:`DistributedModel.backward`.

        Raises:
            ConfigError: No model was prepared.
        """
        if not self._models:
            raise ConfigError("accelerator.backward before accelerator.prepare(model)")
        loss = loss / self.gradient_accumulation_steps
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        self._models[-1].backward(loss, **kwargs)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor | float:
        """Clip gradients by their norm over the whole model, and return the norm. All ranks must call this.

        With the configuration keys ``fp16`` and ``bf16`` these are the gradients of the master weights of the prepared
        optimizers, whatever the parameters, and -1.0 is returned if they overflowed.
        """
        halves = [one.optimizer for one in self._optimizers if isinstance(one.optimizer, HalfPrecision)]
        if halves:
            return max(half.clip_master_grads(max_norm, norm_type) for half in halves)
        self.unscale_gradients()
        return clip_grad_norm_(parameters, max_norm, norm_type)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last update was left out, since gradients overflowed."""
        overflowed = any(getattr(one.optimizer, "overflow", False) for one in self._optimizers)
        return overflowed or bool(super().optimizer_step_was_skipped)

    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> NoReturn:
        """Raise an error: data-parallel ranks train on as many batches as each other here."""
        raise ConfigError("accelerator.join_uneven_inputs: use `with model.join():` of smp.DistributedModel")

    # --- results of all ranks

    def gather(self, tensor: Any) -> Any:
        """Return nested tensors, concatenated over the ranks with different samples."""
        return gathered(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Return values of the ranks with different samples, without those that fill the last batch of an epoch."""
        try:
            recursively_apply(lambda one: one, input_data, error_on_other_type=True)
        except TypeError:
            use_gather_object = True
        state = self.gradient_state
        kept = state.remainder if state.end_of_dataloader and state.remainder > 0 else None
        if use_gather_object:
            return [one for of_rank in gathered_objects(input_data) for one in of_rank][:kept]
        data = self.gather(input_data)
        return data if kept is None else recursively_apply(lambda tensor: tensor[:kept], data)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Return nested tensors, reduced (sum, mean, max) over the ranks with different samples."""
        return reduced(tensor, reduction, scale)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Return nested tensors, padded to the longest of the ranks with different samples."""
        return padded(tensor, dim, pad_index, pad_first)

    # --- saving

    def get_state_dict(self, model: Any, unwrap: bool = True) -> Any:
        """Return the state dict that the model has in one process, on rank 0; {} elsewhere. All ranks call this."""
        if isinstance(model, DistributedModel):
            return whole_in_one_process(current_runtime(), "accelerator.get_state_dict", model)
        return super().get_state_dict(model, unwrap)

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **kwargs: Any) -> str:
        """Save model, optimizer, schedulers and registered objects in a checkpoint. All ranks call this.

        Model and optimizer are saved by ``smp.save_checkpoint``, so that any degrees can go on.
        """
        return save_state(self, output_dir)

    def load_state(self, input_dir: str | None = None, **kwargs: Any) -> None:
        """Load what :meth:`save_state` saved. All ranks call this."""
        load_state(self, input_dir)


def foreign(optimizer: torch.optim.Optimizer, models: Iterable[nn.Module]) -> list[torch.Tensor]:
    """Return the parameters of an optimizer that none of the models has, nor had before it was sharded."""
    registry = current_runtime().find(ShardedParameters)
    known = {id(parameter) for model in models for parameter in model.parameters()}
    given = [one for group in optimizer.param_groups for one in group["params"]]
    return [one for one in given if id(one if registry is None else registry.now(one)) not in known]


def distributed(optimizer: torch.optim.Optimizer) -> Any:
    """Make a ``smp.DistributedOptimizer`` of an optimizer; with ``fp16`` it scales losses as torch's scaler does."""
    wrap: Any = DistributedOptimizer
    scaling = {"init_scale": 2.0**16, "scale_window": 2000}
    if not current_runtime().place.cfg.fp16:
        return wrap(optimizer)
    return wrap(optimizer, dynamic_loss_scale=True, dynamic_loss_args=scaling)


@contextlib.contextmanager
def _first(is_first: bool) -> Iterator[None]:
    if not is_first:
        barrier()
    yield
    if is_first:
        barrier()
