"""Checkpoints: saved in parts by all ranks, and loaded under any division of the model."""

from shardwright.checkpoints.partial import load, save
from shardwright.checkpoints.resuming import resume_from_checkpoint
from shardwright.checkpoints.saving import save_checkpoint
from shardwright.checkpoints.torch_distributed import export_torch_checkpoint, import_torch_checkpoint

__all__ = [
    "export_torch_checkpoint",
    "import_torch_checkpoint",
    "load",
    "resume_from_checkpoint",
    "save",
    "save_checkpoint",
]
