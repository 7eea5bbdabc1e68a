"""What models of ``transformers`` need before they are split."""

from shardwright.transformers_models.adapter import prepare

__all__ = ["prepare"]
