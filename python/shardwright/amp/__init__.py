"""Mixed precision with ``torch.autocast``, over ranks."""

from shardwright.amp.grad_scaler import GradScaler

__all__ = ["GradScaler"]
