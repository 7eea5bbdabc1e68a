"""Lightning with models that are divided over ranks: ``Trainer(strategy=ShardwrightStrategy())``."""

try:
    import lightning.pytorch  # noqa: F401
except ImportError as error:
    raise ImportError("shardwright.lightning needs lightning: pip install 'shardwright[lightning]'") from error

from shardwright.lightning.strategy import ShardwrightStrategy

__all__ = ["ShardwrightStrategy"]
