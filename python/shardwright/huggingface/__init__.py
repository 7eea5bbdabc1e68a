"""What models of ``transformers`` need before they are split."""

from shardwright.huggingface.adapter import prepare

__all__ = ["prepare"]
