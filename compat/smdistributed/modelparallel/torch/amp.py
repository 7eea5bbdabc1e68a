"""``smp.amp``."""

from shardwright.amp import GradScaler

__all__ = ["GradScaler"]
