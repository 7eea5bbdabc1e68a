"""Checkpoints of ``torch.distributed.checkpoint``, imported and exported in one process."""

from shardwright.checkpoints.torch_distributed.exporting import export_torch_checkpoint
from shardwright.checkpoints.torch_distributed.importing import import_torch_checkpoint

__all__ = ["export_torch_checkpoint", "import_torch_checkpoint"]
