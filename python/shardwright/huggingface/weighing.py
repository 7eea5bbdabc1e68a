"""What the losses of a trainer's microbatches count for, and whether they make the loss of the batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from shardwright.accelerate.gathering import gathered_objects
from shardwright.huggingface.asking import Unanswered, ask, uncounted
from shardwright.huggingface.evaluation import samples_in
from shardwright.huggingface.rows import blocks_of, by_rows, first_rows
from shardwright.huggingface.shares import Share, Shares, counts_of, shares_of
from shardwright.job.ranks import rank
from shardwright.logs import logger
from shardwright.model import DistributedModel
from shardwright.step import StepFunction, step

_LABELS, _OTHER, _ROWS = "labels", "other labels", "rows"


class Weighing:
    """Weighs microbatches by their labels, as Trainer counts them, unless another way is seen to be exact.

    Of the first batch it is asked whether the losses of two microbatches make the loss of both, and once more of the
    first in which their numbers of labels differ. All ranks call every method.
    """

    def __init__(self, trainer: Any) -> None:
        """Weigh the microbatches of a trainer."""
        self._trainer = trainer
        self._by = _LABELS
        #: Whether it was asked, and of microbatches that have different numbers of labels.
        self._asked = self._settled = self._said_why = False
        #: Whether it can be asked of this batch on all replicas, and tells more than one with equal numbers.
        self._can_be_asked = self._tells_more = False
        self._losses: dict[int, StepFunction[..., Any]] = {}

    @property
    def blocks(self) -> int:
        """Of how many blocks of rows batches are."""
        given: int | None = self._trainer.row_blocks
        return blocks_of(self._trainer.data_collator) if given is None else given

    def shares(self, inputs: Mapping[str, Any], microbatches: int, number: Any) -> Shares:
        """Return which part of the global batch each microbatch is."""
        trainer, counts = self._trainer, self._counts(inputs, microbatches)[self._by]
        replicas = trainer.accelerator.num_processes
        told = [(sum(counts), *self._look(inputs, microbatches))]
        if replicas > 1:
            told = gathered_objects(told[0])
        self._can_be_asked, self._tells_more = all(can for _, can, _ in told), any(more for _, _, more in told)
        if self._can_be_asked and self._tells_more and self._is_own_loss:
            self.ask(inputs, microbatches, number)
            return self.shares(inputs, microbatches, number)
        is_summed = number is not None or trainer.compute_loss_func is not None
        return shares_of(
            counts,
            number,
            dtype=trainer._number_dtype,
            every_replica=[one for one, *_ in told] if trainer.args.average_tokens_across_devices else [sum(counts)],
            # Those that are told the number of all accumulated batches add up, as in transformers.
            accumulated=1 if is_summed else trainer.current_gradient_accumulation_steps,
        )

    @property
    def _is_own_loss(self) -> bool:
        """Whether the loss is a script's, so that it may be weighed in another way than those of transformers."""
        trainer = self._trainer
        defining = next(kind for kind in type(trainer).__mro__ if "compute_loss" in vars(kind))
        return trainer.compute_loss_func is not None or not defining.__module__.startswith(__package__)

    def _counts(self, inputs: Mapping[str, Any], parts: int) -> dict[str, list[int]]:
        """Return what parts of a batch may count for: labels as Trainer counts them, or the other way, or rows."""
        rows, blocks, labels = samples_in(inputs), self.blocks, inputs.get("labels")
        counts = {_LABELS: counts_of(self._trainer._labels(inputs), rows, parts, blocks)}
        if isinstance(labels, torch.Tensor) and labels.dim() > 1 and "shift_labels" not in inputs:
            other = labels if self._trainer._loss_shifts_labels else labels[:, 1:]
            counts[_OTHER] = counts_of(other, rows, parts, blocks)
        return {**counts, _ROWS: counts_of(None, rows, parts, blocks)}

    def _both(self, inputs: Mapping[str, Any], microbatches: int) -> dict[str, Any] | None:
        """Return the rows of two microbatches; None if there is nothing to ask of them."""
        rows = samples_in(inputs) // self.blocks
        if microbatches == 1 and (self._trainer.accelerator.num_processes == 1 or rows < 4 or rows % 2):
            return None  # parts of replicas' batches tell means over labels from those over rows
        return first_rows(inputs, samples_in(inputs), self.blocks, 2 * rows // max(2, microbatches))

    def _look(self, inputs: Mapping[str, Any], microbatches: int) -> tuple[bool, bool]:
        """Return whether it can be asked of a batch, and whether that tells more than of equal numbers of labels."""
        if self._settled or (both := self._both(inputs, microbatches)) is None:
            return False, False
        counts = self._counts(both, 2).values()
        return all(min(one) > 0 for one in counts), any(one[0] != one[1] for one in counts)

    def ask(self, inputs: Mapping[str, Any], microbatches: int, number: Any) -> None:
        """Ask, if that is to be asked of this batch; warn if losses of microbatches do not make that of the batch."""
        both = None if self._settled or not self._can_be_asked else self._both(inputs, microbatches)
        if both is None or (self._asked and not self._tells_more):
            return
        self._asked, self._settled = True, self._tells_more
        trainer, counts = self._trainer, self._counts(both, 2)
        model: DistributedModel = trainer.distributed_model

        def losses(by: str, parts: int) -> list[float]:
            own = counts[by] if parts == 2 else [sum(counts[by])]
            total = None if number is None else number * 0 + sum(counts[_LABELS]) * trainer.accelerator.num_processes
            shares = shares_of(own, total, dtype=trainer._number_dtype, every_replica=[sum(own)], accumulated=1)
            if parts not in self._losses:
                self._losses[parts] = step(microbatches=parts)(self._loss)
            return [
                float(one)
                for one in self._losses[parts](model, by_rows(both, samples_in(both), self.blocks), shares).outputs
            ]

        precision = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(trainer.accelerator.mixed_precision)
        dtypes = {one.dtype for one in model.parameters() if one.is_floating_point()}
        with uncounted(trainer):
            answer = ask(losses, counts, model, dtypes | ({precision} if precision else set()))
        if isinstance(answer, Unanswered):
            if rank() == 0 and not self._said_why:
                logger.warning("%s", answer.warning())
            self._said_why = True
            return
        self._by = answer.weights or _ROWS
        if answer.weights is None and microbatches > 1 and rank() == 0:
            logger.warning("%s", answer.warning())

    def _loss(self, model: DistributedModel, inputs: dict[str, Any], share: Share) -> torch.Tensor:
        with self._trainer.compute_loss_context_manager():
            loss: torch.Tensor = self._trainer.compute_loss(model, inputs, num_items_in_batch=share.number)
        return loss
