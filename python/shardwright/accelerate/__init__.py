"""Hugging Face's accelerate with models that are divided: ``from shardwright.accelerate import Accelerator``."""

try:
    import accelerate  # noqa: F401
except ImportError as error:
    raise ImportError("shardwright.accelerate needs accelerate: pip install 'shardwright[accelerate]'") from error

from shardwright.accelerate.accelerator import Accelerator

__all__ = ["Accelerator"]
