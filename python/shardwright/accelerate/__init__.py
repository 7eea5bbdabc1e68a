"""Hugging Face's accelerate with models that are divided: ``from shardwright.accelerate import Accelerator``."""

from shardwright.accelerate.accelerator import Accelerator

__all__ = ["Accelerator"]
