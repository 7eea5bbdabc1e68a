"""``smp.optimizers``."""

from shardwright.optimizers import FusedAdam, FusedLamb, FusedNovoGrad

#: The name that scripts of the time before it was ``FusedLamb`` have for it.
FusedLAMB = FusedLamb

__all__ = ["FusedAdam", "FusedLAMB", "FusedLamb", "FusedNovoGrad"]
