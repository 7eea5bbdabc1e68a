"""Loops of Lightning that end on all ranks at once, whichever of them has set ``trainer.should_stop``."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop


def agree(trainer: Trainer) -> None:
    """Stop if any rank wants to: its own loop would end, and the others would wait for it. All ranks call this."""
    trainer.should_stop = trainer.strategy.reduce_boolean_decision(trainer.should_stop, all=False)


class BatchesTogether(_TrainingEpochLoop):
    """Agrees after each batch, and after a validation."""

    def on_advance_end(self, data_fetcher: Any) -> None:
        """End a batch."""
        agree(self.trainer)
        super().on_advance_end(data_fetcher)
        agree(self.trainer)


class EpochsTogether(_FitLoop):
    """Agrees before the first epoch, and after each."""

    def on_run_start(self) -> None:
        """Begin."""
        super().on_run_start()
        agree(self.trainer)

    def on_advance_end(self) -> None:
        """End an epoch."""
        super().on_advance_end()
        agree(self.trainer)


def end_together(trainer: Trainer) -> None:
    """Let the loops of a training end on all ranks at once, where they are Lightning's own."""
    for loop, own, together in (
        (trainer.fit_loop, _FitLoop, EpochsTogether),
        (trainer.fit_loop.epoch_loop, _TrainingEpochLoop, BatchesTogether),
    ):
        if type(loop) is own:
            loop.__class__ = together
