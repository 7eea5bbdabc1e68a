"""Ray Train with models that are divided: ``import shardwright.ray``."""

try:
    import ray.data
    import ray.train  # noqa: F401
except ImportError as error:
    raise ImportError("shardwright.ray needs Ray Train: pip install 'shardwright[ray]'") from error

from shardwright.ray.data import DataConfig
from shardwright.ray.reporting import report, resume

__all__ = ["DataConfig", "report", "resume"]
