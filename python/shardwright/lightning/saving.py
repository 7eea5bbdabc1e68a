"""Checkpoints of Lightning by those of this library."""

from __future__ import annotations

import os
import re
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException

from shardwright.checkpoints import random_state, resume_from_checkpoint, save_checkpoint
from shardwright.checkpoints.complete import newest_complete
from shardwright.model import DistributedModel

#: The name of the checkpoint in each folder that Lightning names.
TAG = "lightning"
_MODEL, _OPTIMIZERS = "state_dict", "optimizer_states"


def save(checkpoint: dict[str, Any], folder: str, model: DistributedModel, optimizer: Any) -> None:
    """Save what Lightning has collected, the model and its optimizer. All ranks call this."""
    content = {key: _plain(value) for key, value in checkpoint.items() if key != _MODEL}
    save_checkpoint(folder, TAG, model=model, optimizer=optimizer, user_content=content)


def found(folder: str) -> str:
    """Return the folder to load from: for that of ``ckpt_path="last"``, if it is incomplete, the newest that is not.

    All ranks call this.
    """
    beside, name = os.path.split(os.path.normpath(folder))
    if not re.fullmatch(r"last(-v\d+)?\.ckpt", name):
        return folder

    def newest_first() -> list[str]:
        if not os.path.isdir(folder):
            return []
        named = [os.path.join(beside, one) for one in os.listdir(beside) if one.endswith(".ckpt") and one != name]
        return [folder, *sorted(filter(os.path.isdir, named), key=os.path.getmtime, reverse=True)]

    return newest_complete('Trainer(ckpt_path="last")', newest_first, TAG) or folder


def load(folder: str, model: DistributedModel, optimizer: Any) -> dict[str, Any]:
    """Load a model, and its optimizer if training goes on; return what Lightning restores. All ranks call this.

    Raises:
        MisconfigurationException: The folder is none that :func:`save` has written.
    """
    if not os.path.isdir(os.path.join(folder, f"{TAG}_partial")):
        raise MisconfigurationException(
            f"`ckpt_path={folder!r}` is no checkpoint that `ShardwrightStrategy` has saved. Weights of a checkpoint of "
            "another strategy are loaded into the module before training, by `LightningModule.load_from_checkpoint`"
        )
    streams = random_state.streams()
    content: dict[str, Any] = resume_from_checkpoint(
        folder, TAG, model=model, optimizer=optimizer, load_optimizer=optimizer is not None
    )
    if optimizer is None:  # an evaluation draws on as if it had not loaded
        random_state.restore(streams)
    return {_MODEL: {}, **content}


def _plain(value: Any) -> Any:
    """Return nested dicts of any class as dicts, as what Lightning keeps of hyperparameters and loaders."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if type(value) is list else value
