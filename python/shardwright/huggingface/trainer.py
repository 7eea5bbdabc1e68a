"""``Trainer`` of ``transformers`` for models that ``smp.DistributedModel`` divides."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
import transformers
from torch.utils._pytree import tree_map
from transformers.utils.import_utils import is_sagemaker_mp_enabled

from shardwright.accelerate.gathering import gathered, gathered_objects
from shardwright.accelerate.seat import started
from shardwright.errors import ConfigError
from shardwright.execution.reproducible import numbers_of_script
from shardwright.huggingface import overrides, saving
from shardwright.huggingface.arguments import TrainingArguments, as_of_rank
from shardwright.huggingface.carried import carried
from shardwright.huggingface.evaluation import ModelInSteps, over_replicas, samples_in
from shardwright.huggingface.last_batch import of_own_rows
from shardwright.huggingface.marking import mark_whole
from shardwright.huggingface.order import ordered
from shardwright.huggingface.reference import AcceleratorOfTrainer
from shardwright.huggingface.rows import by_rows
from shardwright.huggingface.shares import Share, times
from shardwright.huggingface.weighing import Weighing
from shardwright.job.ranks import local_rank, rank
from shardwright.job.runtime import current_runtime
from shardwright.model import DistributedModel
from shardwright.state import state
from shardwright.step import StepFunction, StepOutput, step
from shardwright.tensor_parallel.marking import mark_of
from shardwright.transformers_models.settings import without_gradient_checkpointing


class Trainer(transformers.Trainer):
    """``transformers.Trainer`` over pipeline, tensor and data-parallel ranks; call ``smp.init`` first.

    Give it the model itself: it makes a ``smp.DistributedModel`` of it before the first step (``model_wrapped``), and
    runs every forward and backward in ``smp.step``, a batch of ``per_device_train_batch_size`` in as many microbatches
    as ``smp.init`` was told. Data-parallel ranks get different samples. With ``tensor_parallel_degree``, the whole
    model is marked for tensor parallelism unless the script has marked modules.

    Checkpoints are those of ``smp.save_checkpoint``, which jobs with other degrees resume; :meth:`save_model` writes
    what ``from_pretrained`` reads. All ranks call every method.

    Raises:
        ConfigError: ``smp.init`` has not been called, or the arguments ask for what another library divides.
    """

    model: Any
    optimizer: Any
    model_wrapped: Any
    #: Of how many blocks of rows, one after another, a batch is, whose rows at the same place belong together and go to
    #: one microbatch: 2 for chosen rows followed by rejected ones, as of the collators of TRL, which are known.
    row_blocks: int | None = None

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Let what a subclass overrides run as a divided model needs it."""
        super().__init_subclass__(**keywords)
        overrides.enter(cls)

    def __init__(self, model: Any = None, args: Any = None, *others: Any, **keywords: Any) -> None:
        """Create it, with the arguments of ``transformers.Trainer``."""
        started(f"shardwright.huggingface.{type(self).__name__}")
        if is_sagemaker_mp_enabled():
            raise ConfigError(
                f"shardwright.huggingface.{type(self).__name__} where transformers takes its path for SageMaker's "
                "library, since SM_FRAMEWORK_PARAMS has sagemaker_mpi_enabled: unset it, or use transformers.Trainer"
            )
        if isinstance(model, DistributedModel):
            raise ConfigError(
                "Trainer was given a smp.DistributedModel: give it the model itself, of which it makes one"
            )
        args = as_of_rank(TrainingArguments("tmp_trainer") if args is None else args)
        self._train_steps: dict[int, StepFunction[..., Any]] = {}
        self._in_steps: dict[int, ModelInSteps] = {}
        #: Whether the code of a subclass's ``training_step`` runs, before it has called that of this class.
        self._in_own_step = self._is_evaluating = False
        self._weighing, self._order_of_samples = Weighing(self), None
        super().__init__(model, args, *others, **keywords)
        if self.optimizer is not None and state.cfg.tensor_parallel_degree > 1:
            raise ConfigError(
                "Trainer was given an optimizer, and tensor parallelism replaces parameters after that: give it "
                "optimizer_cls_and_kwargs, or override create_optimizer"
            )

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator."""
        super().create_accelerator_and_postprocess()
        self.accelerator = AcceleratorOfTrainer.taken_over(self.accelerator)

    # --- the model and its optimizer

    @property
    def distributed_model(self) -> DistributedModel:
        """The divided model, which is made when it is first needed."""
        wrapped = self.model_wrapped
        if not isinstance(wrapped, DistributedModel):
            parts = list(self.model.modules())
            if state.cfg.tensor_parallel_degree > 1 and not any(mark_of(part) for part in parts):
                mark_whole(self.model)
            # Losses are divided by what they are the mean of, so that microbatches of any number of labels count right.
            wrapped = self.model_wrapped = DistributedModel(self.model, average_grads_across_microbatches=False)
            self.model = wrapped.module
        return wrapped

    @property
    def model_in_steps(self) -> ModelInSteps:
        """The divided model for code that knows nothing of steps: calls, and ``generate``, are steps."""
        model = self.distributed_model
        if model.model_id not in self._in_steps:
            self._in_steps[model.model_id] = ModelInSteps(model, self._weighing, self.compute_loss_context_manager)
        return self._in_steps[model.model_id]

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> DistributedModel:
        return self.distributed_model

    @property
    def distributed_optimizer(self) -> Any:
        """What ``smp.DistributedOptimizer`` made of the optimizer; None before it is created."""
        return getattr(self.optimizer, "optimizer", self.optimizer)

    def create_optimizer(self, model: Any = None) -> Any:
        """Create the optimizer of the divided model, unless there is one."""
        _ = self.distributed_model
        super().create_optimizer(self.model)
        overrides.distribute_optimizer(self)
        return self.optimizer

    # --- training

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **keywords: Any) -> Any:
        """Train; see ``transformers.Trainer``.

        Args:
            resume_from_checkpoint: The folder to go on from; True for the newest in the output folder that is complete.
            *args: Further arguments.
            **keywords: Further arguments.
        """
        if resume_from_checkpoint is True:
            resume_from_checkpoint = saving.newest(str(self.args.output_dir)) or True
        return super().train(resume_from_checkpoint, *args, **keywords)

    def training_step(
        self, model: Any, inputs: dict[str, Any], num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """Run forward and backward for a batch of this rank, in microbatches over the ranks of the pipeline.

        Returns:
            The loss, which counts for the samples of this rank.
        """
        self._in_own_step = False
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        inputs = dict(self._prepare_inputs(inputs))
        self._weighing.train()
        rows, blocks = samples_in(inputs), self._weighing.blocks
        microbatches = 1 if self._weighing.needs_all_rows else _microbatches(rows // blocks)
        shares = self._weighing.shares(inputs, microbatches, num_items_in_batch)
        if microbatches > 1 and self._weighing.needs_all_rows:  # as was just found
            microbatches, shares = 1, self._weighing.shares(inputs, 1, num_items_in_batch)
        if microbatches not in self._train_steps:
            self._train_steps[microbatches] = step(microbatches=microbatches)(self._forward_and_backward)
        with carried(self) if self._has_own_loss else contextlib.nullcontext():
            losses = self._train_steps[microbatches](model, by_rows(inputs, rows, blocks), shares)
        loss: torch.Tensor = losses.reduce_sum().to(self.args.device)
        return loss

    @property
    def _has_own_loss(self) -> bool:
        """Whether the loss is a script's, or another library's."""
        return self.compute_loss_func is not None or overrides.is_overridden(type(self), "compute_loss")

    def _forward_and_backward(self, model: DistributedModel, inputs: dict[str, Any], share: Share) -> torch.Tensor:
        """Run a microbatch, whose loss counts for this share of the loss."""
        with self.compute_loss_context_manager():
            loss = self.compute_loss(model, share.told(inputs), num_items_in_batch=share.number)
        loss = loss.float() if loss.dtype in (torch.float16, torch.bfloat16) else loss
        loss = loss * (share.weight or 1.0)
        scaler = self.accelerator.scaler
        # A microbatch without labels has no mean: NaN, of which nothing goes on.
        model.backward(loss if scaler is None else scaler.scale(loss), weight=float(share.weight > 0))
        return loss if share.weight else torch.zeros_like(loss)

    @functools.cached_property
    def _number_dtype(self) -> torch.dtype:
        """Of numbers that are not whole, so that a loss is not rounded by more than its model rounds it."""
        doubles = any(one.dtype is torch.float64 for one in self.distributed_model.parameters())
        return torch.float64 if doubles else torch.float32

    def _labels_of_loss(self, inputs: Mapping[str, Any]) -> torch.Tensor | None:
        """Return the labels that the loss of a batch is the mean over."""
        labels = inputs.get("shift_labels")
        if labels is None:
            labels = inputs.get("labels")
            if labels is not None and self._loss_shifts_labels:
                labels = labels[..., 1:]
        return labels if isinstance(labels, torch.Tensor) else None

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Compute the loss of a microbatch or batch.

        Args:
            model: What is called with the inputs.
            inputs: The inputs.
            return_outputs: Whether the model's outputs are returned too.
            num_items_in_batch: The number of labels of the global batch, by which the sum of losses is divided; None
                for the mean over the labels of these inputs.

        Returns:
            The loss, or the loss and the outputs.
        """
        replicas = self.accelerator.num_processes if self.args.average_tokens_across_devices else 1
        is_multiplied = replicas > 1 and (self.model_accepts_loss_kwargs or self.compute_loss_func is not None)
        if num_items_in_batch is None or not is_multiplied:
            loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        else:  # by the number of replicas, with all that is no sum
            number = times(num_items_in_batch, 1 / replicas, self._number_dtype)
            loss, outputs = super().compute_loss(model, inputs, True, number)
            loss = loss / replicas
        return (loss, outputs) if return_outputs else loss

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> Any:
        """Return the context of ``bf16=True`` or ``fp16=True``, in which losses are computed."""
        return self.accelerator.autocast() if self.accelerator.native_amp else contextlib.nullcontext()

    def _clip_grad_norm(self, model: Any) -> Any:
        return self.accelerator.clip_grad_norm_(model.parameters(), self.args.max_grad_norm)

    def _maybe_log_save_evaluate(self, tr_loss: torch.Tensor, *others: Any, **keywords: Any) -> None:
        if self.control.should_log and self.state.global_step > self._globalstep_last_logged:
            self._average_loss(tr_loss)
        super()._maybe_log_save_evaluate(tr_loss, *others, **keywords)

    def _finalize_training(self, *args: Any) -> Any:
        self._average_loss(self._tr_loss)
        return super()._finalize_training(*args)  # type: ignore[no-untyped-call]

    @staticmethod
    def _average_loss(loss: torch.Tensor) -> None:
        """Make the loss of this rank's samples that of all samples."""
        loss.copy_(gathered(loss).mean())

    def store_flos(self) -> None:
        """Add what all samples took to the number of operations."""
        self.current_flos = sum(gathered_objects(self.current_flos))
        super().store_flos()

    # --- evaluation

    def prediction_step(self, model: Any, inputs: Any, *others: Any, **keywords: Any) -> Any:
        """Evaluate a batch of this rank in a step. The loss is that of all replicas' samples, without fillers."""
        if current_runtime().step.running:  # by a class above this one, in a step
            return super().prediction_step(model, inputs, *others, **keywords)
        prediction = super().prediction_step

        def evaluated(own: Any, rows: int) -> tuple[Any, ...]:
            self._weighing.ask(own)
            loss, *outputs = self._predicted_in_steps(prediction, own, *others, **keywords)
            if loss is not None and self.accelerator.num_processes > 1:
                loss = over_replicas(loss, self._weighing.in_evaluation(own, rows), self._weighing.is_sum)
            return (loss, *outputs)

        self._is_evaluating = True
        try:
            return of_own_rows(self.accelerator, evaluated, inputs)
        finally:
            self._is_evaluating = False

    def _predicted_in_steps(self, prediction: Callable[..., Any], inputs: Any, *others: Any, **keywords: Any) -> Any:
        """Evaluate a batch; by a loss that a class computes itself on the first rank of a pipeline, as in training."""
        if not overrides.is_overridden(type(self), "compute_loss"):
            return prediction(self.model_in_steps, inputs, *others, **keywords)
        with carried(self):
            return self.in_one_microbatch(prediction, inputs, *others, **keywords)

    def get_eval_dataloader(self, *args: Any, **keywords: Any) -> Any:
        """Return the loader of an evaluation; see ``transformers.Trainer``."""
        return overrides.of_evaluation(self, super().get_eval_dataloader(*args, **keywords))

    def get_test_dataloader(self, *args: Any, **keywords: Any) -> Any:
        """Return the loader of a prediction; see ``transformers.Trainer``."""
        return overrides.of_evaluation(self, super().get_test_dataloader(*args, **keywords))

    def _get_train_sampler(self, *args: Any) -> Any:
        self._order_of_samples = ordered(super()._get_train_sampler(*args))
        return self._order_of_samples

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> torch.Tensor | int | None:
        """Return the number of labels that a loss is told; in evaluation of this replica's, whose mean it computes."""
        if not self._is_evaluating:
            return super()._get_num_items_in_batch(batch_samples, device)
        over_replicas, self.args.average_tokens_across_devices = self.args.average_tokens_across_devices, False
        try:
            number: torch.Tensor | int | None = super()._get_num_items_in_batch(batch_samples, device)
        finally:
            self.args.average_tokens_across_devices = over_replicas
        if number is None or not over_replicas or (replicas := self.accelerator.num_processes) == 1:
            return number
        if self._weighing.is_unequal:  # replicas count by their rows, so they divide sums over labels by as much
            every = gathered_objects((float(number), own := self._weighing.count(batch_samples[0])))
            share = own / (sum(count for _, count in every) or 1.0)
            number = times(sum(labels for labels, _ in every), share, self._number_dtype)
        # A loss of one of several replicas is multiplied by how many they are.
        return number * replicas  # type: ignore[no-any-return]

    def in_one_microbatch(self, function: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        """Call a function, with the divided model first, in a step of one microbatch without gradients. All ranks do.

        It draws random numbers as the script would, which goes on after them.

        Returns:
            What it returns, on all ranks; the function runs on the first rank of each pipeline.
        """
        self._in_one_microbatch = function
        try:
            with without_gradient_checkpointing(self.model):
                results = self._one_step(self.distributed_model, args, keywords, torch.get_rng_state())
        finally:
            del self._in_one_microbatch
        results, drawn = tree_map(lambda one: one.outputs[0] if isinstance(one, StepOutput) else one, results)
        torch.set_rng_state(drawn)
        return results

    @functools.cached_property
    def _one_step(self) -> StepFunction[..., Any]:
        def called(model: DistributedModel, args: Any, keywords: Any, drawn: torch.Tensor) -> Any:
            with numbers_of_script(drawn):
                return self._in_one_microbatch(model, *args, **keywords), torch.get_rng_state()

        return step(microbatches=1)(called)

    # --- checkpoints

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model so that ``from_pretrained`` reads it. All ranks call this; rank 0 writes."""
        folder = str(self.args.output_dir if output_dir is None else output_dir)
        if _internal_call and not self.args.save_only_model:
            saving.make_folder(folder)
            return
        saving.save_pretrained(self, folder)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        saving.save(self, output_dir)

    def _save_scaler(self, output_dir: str) -> None:
        """Do nothing: it is saved with the optimizer."""

    def _save_rng_state(self, output_dir: str) -> None:
        """Do nothing: it is saved with the optimizer."""

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        saving.check(resume_from_checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            saving.load(self, checkpoint)

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Do nothing: it is loaded with the optimizer."""

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            saving.restore_streams(self)

    def _load_best_model(self) -> None:
        saving.load_best(self)

    # --- the rest

    def is_local_process_zero(self) -> bool:
        """Whether this is the first rank of its host."""
        return local_rank() == 0

    def is_world_process_zero(self) -> bool:
        """Whether this is rank 0 of the job."""
        return rank() == 0

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise an error: trials are not shared with the other ranks."""
        raise ConfigError(
            "Trainer.hyperparameter_search: start a job for each trial, since all ranks have to try the same"
        )


def _microbatches(samples: int) -> int:
    """Return into how many microbatches samples are divided: as many as configured, or as divide them evenly."""
    configured = int(state.cfg.microbatches)
    return max(count for count in range(1, configured + 1) if samples % count == 0)
