"""Which modules of a model tensor parallelism divides where a script has marked none."""

from __future__ import annotations

from typing import Any

from torch import nn

from shardwright.tensor_parallel.marking import set_tensor_parallelism


def mark_whole(model: nn.Module) -> None:
    """Mark a whole model, but for the head of one whose forward a library has replaced.

    That, as of TRL, computes a loss with the weight of the head, which would be a part of it.
    """
    set_tensor_parallelism(model)
    for part in model.modules():
        head: Any = getattr(part, "get_output_embeddings", lambda: None)() if "forward" in vars(part) else None
        if head is not None:
            set_tensor_parallelism(head, False)
