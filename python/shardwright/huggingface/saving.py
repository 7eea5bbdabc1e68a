"""Checkpoints of ``Trainer``: those of this library, and folders that ``from_pretrained`` reads."""

from __future__ import annotations

import os
from typing import Any

from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import sort_checkpoints

from shardwright.checkpoints import random_state, resume_from_checkpoint, save_checkpoint
from shardwright.checkpoints.complete import newest_complete
from shardwright.checkpoints.full import whole_in_one_process
from shardwright.checkpoints.together import on_all_ranks
from shardwright.errors import CheckpointError, ConfigError
from shardwright.huggingface.order import go_on_in, order_of
from shardwright.job.objects import allgather, barrier
from shardwright.job.ranks import WORLD, rank, size
from shardwright.job.runtime import current_runtime

#: The name of the checkpoint in each folder that Trainer makes.
TAG = "trainer"


def make_folder(folder: str) -> None:
    """Make a folder, on rank 0. All ranks call this."""
    if rank() == 0:
        os.makedirs(folder, exist_ok=True)
    barrier()


def save_pretrained(trainer: Any, folder: str) -> None:
    """Write the whole model on rank 0. All ranks call this."""
    state = whole_in_one_process(current_runtime(), "Trainer.save_model", trainer.distributed_model)

    def write() -> None:
        if rank() == 0:
            trainer._save(folder, state_dict=state)

    on_all_ranks("Trainer.save_model", write)


def save(trainer: Any, folder: str) -> None:
    """Save all that training goes on from. All ranks call this."""
    scaler = trainer.accelerator.scaler
    content = {
        "scheduler": trainer.lr_scheduler.state_dict(),
        "scaler": None if scaler is None else scaler.state_dict(),
        "degrees": _degrees(),
        "streams": allgather(random_state.streams(), WORLD),
        "order": order_of(trainer),
    }
    save_checkpoint(
        folder,
        TAG,
        model=trainer.distributed_model,
        optimizer=trainer.distributed_optimizer,
        user_content=content,
    )


def _degrees() -> list[int]:
    place = current_runtime().place
    return [place.pp_size, len(place.tp_ranks), size()]


def check(folder: str) -> None:
    """Raise :class:`CheckpointError` if a folder has no checkpoint of this Trainer."""
    if not os.path.isdir(os.path.join(folder, f"{TAG}_partial")):
        raise CheckpointError(
            f"{folder!r} has no checkpoint that shardwright.huggingface.Trainer has saved. Weights that transformers "
            "has saved are read by from_pretrained, with which training begins anew"
        )


def newest(folder: str) -> str | None:
    """Return the newest complete checkpoint in an output folder; None if there is none. All ranks call this."""

    def newest_first() -> list[str]:
        named = sort_checkpoints(folder) if os.path.isdir(folder) else []
        return [os.path.normpath(one) for one in reversed(named)]

    return newest_complete("Trainer.train", newest_first, TAG, [TRAINER_STATE_NAME])


def load(trainer: Any, folder: str) -> None:
    """Load all that training goes on from. All ranks call this, once model, optimizer and scheduler are there."""
    content = resume_from_checkpoint(
        folder, TAG, model=trainer.distributed_model, optimizer=trainer.distributed_optimizer
    )
    trainer.lr_scheduler.load_state_dict(content["scheduler"])
    if trainer.accelerator.scaler is not None and content["scaler"] is not None:
        trainer.accelerator.scaler.load_state_dict(content["scaler"])
    go_on_in(trainer, content.get("order"))
    trainer._streams_of_checkpoint = content["streams"][rank()] if content["degrees"] == _degrees() else None


def restore_streams(trainer: Any) -> None:
    """Draw random numbers from where the checkpoint was saved, in a job of the same degrees."""
    if trainer._streams_of_checkpoint is not None:
        random_state.restore(trainer._streams_of_checkpoint)


def load_best(trainer: Any) -> None:
    """Load the model of the best checkpoint. All ranks call this."""
    folder = trainer.state.best_model_checkpoint
    if trainer.args.save_only_model:
        raise ConfigError("load_best_model_at_end with save_only_model=True: leave save_only_model out")
    streams = random_state.streams()
    resume_from_checkpoint(folder, TAG, model=trainer.distributed_model, load_optimizer=False)
    random_state.restore(streams)
