"""What the losses of a trainer's microbatches count for, and whether they make the loss of the batch."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from shardwright.accelerate.gathering import gathered_objects
from shardwright.huggingface.asking import Unanswered, ask, uncounted
from shardwright.huggingface.evaluation import samples_in
from shardwright.huggingface.rows import blocks_of, by_rows, chosen_rows, is_flat, is_of_all_rows
from shardwright.huggingface.shares import Share, Shares, counts_of, shares_of
from shardwright.job.ranks import rank
from shardwright.logs import logger
from shardwright.model import DistributedModel
from shardwright.state import state
from shardwright.step import StepFunction, step

_KNOWN = (
    "Trainer: the loss of KTO depends on the mean divergence of all rows of a batch. So each batch runs in one "
    "microbatch, as exact as in one process, in which the ranks of a pipeline take turns"
)
_FLAT = (
    "Trainer: batches are of one row, in which samples stand one after another without padding (packing, "
    "padding_free). So each runs in one microbatch, in which the ranks of a pipeline take turns; padded batches let "
    "them run at once"
)
_LABELS, _OTHER, _ROWS, _SUM = "labels", "other labels", "rows", "sum"


class _Two(NamedTuple):
    """Two microbatches to ask of.

    Attributes:
        begins: Where the rows of each begin in a block.
        rows: How many each has of a block.
        differ: Whether they differ in anything that they may count for.
    """

    begins: list[int]
    rows: int
    differ: bool


class Weighing:
    """Weighs microbatches by their labels, as Trainer counts them, unless another way is seen to be exact.

    Before the first batch counts, it is asked whether the losses of two microbatches make the loss of both, and again
    before the first in which their numbers of labels differ, and the second, fourth, eighth and so on. All ranks call
    every method.
    """

    def __init__(self, trainer: Any) -> None:
        """Weigh the microbatches of a trainer."""
        self._trainer = trainer
        self._by = _LABELS
        #: Whether it was asked, and of microbatches that have different numbers of labels.
        self._asked = self._settled = self._said = self._said_why = self._is_training = False
        self._found_to_need_all_rows = self._fits_not = self._said_flat = False
        self._losses: dict[int, StepFunction[..., Any]] = {}
        self._batches = 0

    @property
    def blocks(self) -> int:
        """Of how many blocks of rows batches are."""
        given: int | None = self._trainer.row_blocks
        return blocks_of(self._trainer.data_collator) if given is None else given

    def microbatches_of(self, inputs: Mapping[str, Any]) -> int:
        """Return into how many microbatches a batch of an evaluation is divided: on all replicas into as many."""
        fewest = rows = samples_in(inputs)
        if self._trainer.accelerator.num_processes > 1 and self._trainer.accelerator.gradient_state.end_of_dataloader:
            fewest = min(gathered_objects(rows))
        return 1 if self.needs_all_rows else min(int(state.cfg.microbatches), fewest)

    @property
    def is_sum(self) -> bool:
        """Whether losses of microbatches add up to that of the batch."""
        return self._by == _SUM

    @functools.cached_property
    def _is_known_to_need_all_rows(self) -> bool:
        is_known = is_of_all_rows(self._trainer)
        if is_known and state.cfg.microbatches > 1 and rank() == 0:
            logger.warning("%s", _KNOWN)
        return is_known

    @property
    def is_unequal(self) -> bool:
        """Whether nothing makes losses of parts of a batch that of the batch, so that they count by their rows."""
        return self._fits_not

    @property
    def needs_all_rows(self) -> bool:
        """Whether the loss of a row depends on other rows, so that a batch is not divided."""
        return self._found_to_need_all_rows or self._is_known_to_need_all_rows

    def count(self, inputs: Mapping[str, Any]) -> float:
        """Return how much the loss of a batch, or of a part of it, counts for beside others; 0 if it has no labels."""
        labels, counts = self._trainer._labels_of_loss(inputs), self._counts(inputs, 1)
        if labels is not None and (self._by == _ROWS or not counts[_LABELS][0]):  # rows that fill up have no labels
            return float(labels.ne(-100).reshape(len(labels), -1).any(1).sum())
        return float(counts.get(self._by, counts[_LABELS])[0])

    def train(self) -> None:
        """Ask anew, once: evaluation may have asked, which is told another number of labels."""
        if not self._is_training:
            self._is_training, self._asked, self._settled, self._found_to_need_all_rows = True, False, False, False

    def in_evaluation(self, inputs: Any, rows: int) -> float:
        """Return how much the loss of an evaluated batch of so many samples counts beside those of other replicas."""
        if not rows or not isinstance(inputs, Mapping):
            return float(rows)
        is_of_labels = self._trainer._labels_of_loss(inputs) is not None
        return self.count(inputs) * (1 if is_of_labels else rows / samples_in(inputs))  # of several in one row

    def shares(self, inputs: Mapping[str, Any], microbatches: int, number: Any) -> Shares:
        """Return which part of the global batch each microbatch is."""
        trainer, counts = self._trainer, self._counts(inputs, microbatches)
        self._batches += 1
        if self._batches & (self._batches - 1) == 0 and not self._found_to_need_all_rows:
            self._settled = False  # a term of a loss may begin, or grow, while it is trained
        every = self._ask_of(inputs, microbatches, number, {by: sum(own) for by, own in counts.items()})
        own = counts.get(self._by, counts[_LABELS])
        over_replicas = trainer.args.average_tokens_across_devices
        is_told = number is not None or trainer.compute_loss_func is not None
        return shares_of(
            own,
            number,
            dtype=trainer._number_dtype,
            every_replica=[one.get(self._by, one[_LABELS]) for one in every] if over_replicas else [sum(own)],
            # Those that are told the number of all accumulated batches add up, as in transformers.
            accumulated=1 if is_told else trainer.current_gradient_accumulation_steps,
            is_sum=self.is_sum,
        )

    def _counts(self, inputs: Mapping[str, Any], parts: int) -> dict[str, list[int]]:
        """Return what parts of a batch may count for: labels as Trainer counts them, or the other way, or rows."""
        rows, blocks, labels = samples_in(inputs), self.blocks, inputs.get("labels")
        counts = {_LABELS: counts_of(self._trainer._labels_of_loss(inputs), rows, parts, blocks)}
        if isinstance(labels, torch.Tensor) and labels.dim() > 1 and "shift_labels" not in inputs:
            other = labels if self._trainer._loss_shifts_labels else labels[:, 1:]
            counts[_OTHER] = counts_of(other, rows, parts, blocks)
        return {**counts, _ROWS: counts_of(None, rows, parts, blocks), _SUM: [1] * parts}

    def _two(self, inputs: Mapping[str, Any], microbatches: int) -> _Two | None:
        """Return which two microbatches to ask of; None if there is nothing to ask of them."""
        rows, blocks = samples_in(inputs), self.blocks
        if is_flat(inputs, rows):
            if state.cfg.microbatches > 1 and rank() == 0 and not self._said_flat:
                logger.warning("%s", _FLAT)
            self._said_flat = True
            return None
        whole = rows // blocks
        if not whole or (microbatches == 1 and self._trainer.accelerator.num_processes == 1):
            return None
        parts = min(whole, max(2, microbatches))
        own = whole // parts
        even = inputs if whole == parts * own else chosen_rows(inputs, rows, blocks, [0], parts * own)
        counts = self._counts(even, parts)
        labels = [(count, part) for part, count in enumerate(counts[_LABELS]) if count]
        if not labels:
            return None
        # Those that have fewest and most labels tell most; of one, twice the same still tells sums from means.
        few, many = min(labels), max(labels, key=lambda one: one[0])
        first, second = sorted((few[1], many[1])) if few[0] < many[0] else (labels[0][1], labels[-1][1])
        return _Two([first * own, second * own], own, any(one[first] != one[second] for one in counts.values()))

    def ask(self, inputs: Any) -> None:
        """Ask of a batch that is evaluated, unless it was asked; what training has found holds."""
        trainer = self._trainer
        if trainer._labels_of_loss(inputs) is None or (self._is_training and self._asked):
            return
        prepared = trainer._prepare_inputs(inputs)
        number = trainer._get_num_items_in_batch([prepared], trainer.args.device)
        self._ask_of(prepared, self.microbatches_of(prepared), number, {})

    def _ask_of(
        self, inputs: Mapping[str, Any], microbatches: int, number: Any, counts: dict[str, int]
    ) -> list[dict[str, int]]:
        """Ask, if that is to be asked of this batch, and return what all replicas count."""
        two = None if self._settled else self._two(inputs, microbatches)
        every = [(counts, two is not None, two is not None and two.differ)]
        if self._trainer.accelerator.num_processes > 1 and (counts or not self._settled):
            every = gathered_objects(every[0])
        tells_more = any(more for *_, more in every)
        if two is not None and all(can for _, can, _ in every) and (tells_more or not self._asked):
            self._asked, self._settled = True, tells_more
            self._ask(chosen_rows(inputs, samples_in(inputs), self.blocks, two.begins, two.rows), number)
        return [one for one, *_ in every]

    def _ask(self, both: dict[str, Any], number: Any) -> None:
        """Ask of two microbatches; warn if their losses do not make that of both."""
        trainer, counts = self._trainer, self._counts(both, 2)
        model: DistributedModel = trainer.distributed_model

        def losses(by: str, parts: int) -> list[float]:
            own = counts[by] if parts == 2 else [1 if by == _SUM else sum(counts[by])]
            total = None if number is None else number * 0 + sum(counts[_LABELS]) * trainer.accelerator.num_processes
            shares = shares_of(
                own,
                total,
                dtype=trainer._number_dtype,
                every_replica=[sum(own)],
                accumulated=1,
                is_sum=by == _SUM,
            )
            if parts not in self._losses:
                self._losses[parts] = step(microbatches=parts)(self._loss)
            return [
                float(one)
                for one in self._losses[parts](model, by_rows(both, samples_in(both), self.blocks), shares).outputs
            ]

        precision = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(trainer.accelerator.mixed_precision)
        dtypes = {one.dtype for one in model.parameters() if one.is_floating_point()}
        with uncounted(trainer):
            counted = {by: own for by, own in counts.items() if sum(own)}  # of one label a row, none is left if shifted
            weights = {by: [one / (1 if by == _SUM else sum(own)) for one in own] for by, own in counted.items()}
            weights = {self._by: weights[self._by], **weights} if self._by in weights else weights
            answer = ask(losses, weights, model, dtypes | ({precision} if precision else set()))
        if isinstance(answer, Unanswered):
            if rank() == 0 and not self._said_why:
                logger.warning("%s", answer.warning())
            self._said_why = True
            self._found_to_need_all_rows = self._fits_not and int(state.cfg.microbatches) > 1  # as evaluation found
            return
        self._by, self._fits_not = answer.weights or _ROWS, answer.weights is None
        # This batch may run in one microbatch where others do not.
        self._found_to_need_all_rows = answer.weights is None and int(state.cfg.microbatches) > 1
        if self._found_to_need_all_rows and not self._said and rank() == 0:
            logger.warning("%s", answer.warning())
        self._said = self._said or self._found_to_need_all_rows

    def _loss(self, model: DistributedModel, inputs: dict[str, Any], share: Share) -> torch.Tensor:
        with self._trainer.compute_loss_context_manager():
            loss: torch.Tensor = self._trainer.compute_loss(model, share.told(inputs), num_items_in_batch=share.number)
        return loss
