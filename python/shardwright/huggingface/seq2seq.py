"""``Seq2SeqTrainer``: predictions by ``generate``."""

from __future__ import annotations

from typing import Any

import transformers

from shardwright.huggingface.overrides import is_overridden
from shardwright.huggingface.trainer import Trainer


class Seq2SeqTrainer(Trainer, transformers.Seq2SeqTrainer):
    """``transformers.Seq2SeqTrainer`` over ranks; see :class:`Trainer`.

    ``generate`` runs in microbatches, with key/value caches whose layers are on the ranks of the model's.
    """

    def evaluation_loop(self, *args: Any, **keywords: Any) -> Any:
        """Evaluate without the samples that fill up the last batch; see ``transformers.Trainer``."""
        if self.accelerator.num_processes > 1:  # else none are there
            self.gather_function = self.accelerator.gather_for_metrics
        return super().evaluation_loop(*args, **keywords)

    def prediction_step(self, model: Any, inputs: Any, *others: Any, **keywords: Any) -> Any:
        """Evaluate a batch of this rank, by ``generate`` if the arguments say so."""
        if is_overridden(type(self), "compute_loss"):  # which runs in a step, with all besides
            return super().prediction_step(model, inputs, *others, **keywords)
        in_steps, whole = self.model_in_steps, self.model
        self.model = in_steps  # what generates
        try:
            return super().prediction_step(model, inputs, *others, **keywords)
        finally:
            self.model = whole
