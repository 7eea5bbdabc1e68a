"""Functions of PyTorch that a divided model has its own of."""

from smdistributed.modelparallel.torch.patches import checkpoint

__all__ = ["checkpoint"]
