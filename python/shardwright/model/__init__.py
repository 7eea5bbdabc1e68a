"""The distributed model: what this rank owns of it, how it runs, its state dicts and averages of its weights."""

from shardwright.model.averaged import AveragedModel
from shardwright.model.distributed import DistributedModel

__all__ = ["AveragedModel", "DistributedModel"]
