"""``smp.optimizers``."""

from shardwright.optimizers import FusedAdam, FusedLamb, FusedNovoGrad

__all__ = ["FusedAdam", "FusedLamb", "FusedNovoGrad"]
