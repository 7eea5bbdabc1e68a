"""Checkpoints of ``torch.distributed.checkpoint``, imported and exported in one process.

What does it is imported by the first call: ``torch.distributed.checkpoint`` takes longer to import than the library.
"""

from __future__ import annotations

import os


def export_torch_checkpoint(
    path: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    tag: str | None = None,
    *,
    model_key: str = "model",
    optimizer_key: str = "optim",
    flatten_optimizer_state_dict: bool = False,
    replace: bool = False,
) -> None:
    """Write a checkpoint so that ``torch.distributed.checkpoint.load`` reads it, in one process or many.

    It runs in one process, without a job, and has one tensor in memory at a time. What is written is the state dict
    ``{"model": ..., "optim": ...}`` that ``torch.distributed.checkpoint.state_dict.get_state_dict`` would return for
    the model in one process, so that its ``set_state_dict`` takes it. Besides these there are ``master_weights`` and
    ``loss_scaler`` of half precision, and ``user_content``, if they were saved. Random number streams are left out.

    Args:
        path: The directory of checkpoints.
        folder: The folder to write, which need not exist.
        tag: The checkpoint; by default the newest.
        model_key: What the model is called in the state dict.
        optimizer_key: What the optimizer is called there.
        flatten_optimizer_state_dict: Write options of parameter groups by parameters, as torch does with the option of
            this name.
        replace: Whether a checkpoint of ``torch.distributed.checkpoint`` in the folder is replaced.

    Raises:
        CheckpointError: There is no such checkpoint, it is damaged, the folder has one already, or cannot be written.
    """
    from shardwright.checkpoints.torch_distributed.exporting import export_checkpoint

    export_checkpoint(
        path,
        folder,
        tag,
        model_key=model_key,
        optimizer_key=optimizer_key,
        flatten_optimizer_state_dict=flatten_optimizer_state_dict,
        replace=replace,
    )


def import_torch_checkpoint(
    folder: str | os.PathLike[str],
    path: str | os.PathLike[str],
    tag: str = "imported",
    *,
    model_key: str = "model",
    optimizer_key: str | None = None,
    replace: bool = False,
) -> None:
    """Turn a checkpoint of ``torch.distributed.checkpoint`` into one that ``smp.resume_from_checkpoint`` loads.

    It runs in one process, without a job, and has about 1 GiB of tensors in memory at once, or the largest tensor.
    Nothing in the checkpoint is run: metadata and values are pickles, of which only plain values are read.

    The state dict that was saved is ``{"model": ..., "optim": ...}`` with names of parameters in both, as
    ``torch.distributed.checkpoint.state_dict.get_state_dict`` returns them, or the state dict of a model alone.
    Everything else in it becomes user content.

    Args:
        folder: The folder with ``.metadata``.
        path: The directory of checkpoints to write into, which need not exist.
        tag: The name of the new checkpoint.
        model_key: What the model is called in the state dict.
        optimizer_key: What the optimizer is called there; by default ``optim`` or ``optimizer``.
        replace: Whether a checkpoint with this tag is replaced.

    Raises:
        CheckpointError: There is no such checkpoint, it is damaged or would run code, the optimizer's state is not by
            names of parameters, or the directory cannot be written.
    """
    from shardwright.checkpoints.torch_distributed.importing import import_checkpoint

    import_checkpoint(folder, path, tag, model_key=model_key, optimizer_key=optimizer_key, replace=replace)
