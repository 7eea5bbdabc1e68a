"""Optimizers that update many parameters in few operations (spec, 2.10), also of models that are divided over ranks."""

from shardwright.optimizers.adam import FusedAdam
from shardwright.optimizers.lamb import FusedLamb
from shardwright.optimizers.novograd import FusedNovoGrad

__all__ = ["FusedAdam", "FusedLamb", "FusedNovoGrad"]
