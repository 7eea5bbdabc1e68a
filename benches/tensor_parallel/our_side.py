"""The library: a ``DistributedTransformer`` as the body of the model, and a step function."""

from __future__ import annotations

from typing import Any

import shardwright as smp
import torch
from shardwright.tensor_parallel.module import named_shardings
from torch import nn

from benches.tensor_parallel.model import (
    EPSILON,
    HEAD_SIZE,
    HEADS,
    INTERMEDIATE,
    MICROBATCHES,
    NUM_LAYERS,
    SEQUENCE,
    WIDTH,
    Model,
    State,
    our_state,
    outer_state,
)


class Body(nn.Module):
    """The layers, divided."""

    def __init__(self) -> None:
        """With fresh weights."""
        super().__init__()
        self.transformer = smp.nn.DistributedTransformer(
            NUM_LAYERS,
            HEADS,
            HEAD_SIZE,
            WIDTH,
            INTERMEDIATE,
            0.0,
            0.0,
            "gelu_new",
            EPSILON,
            causal_mask_size=SEQUENCE,
            pre_layernorm=True,
            post_layernorm=False,
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """From [N, S, WIDTH] the same shape."""
        output: torch.Tensor = self.transformer((hidden,))[0]
        return output


class Ours:
    """See :class:`benches.tensor_parallel.rank.Side`."""

    def __init__(self, weights: State, optimize: str) -> None:
        """Divide for ``speed`` or for ``memory``; both ranks bring the same batch, as the other sides do."""
        smp.init(tensor_parallel_degree=2, ddp=True, prescaled_batch=True, optimize=optimize, microbatches=MICROBATCHES)
        network = Model(Body())
        network.load_state_dict(outer_state(weights), strict=False)
        inner = {
            name.removeprefix("body.transformer."): one
            for name, one in our_state(weights).items()
            if name.startswith("body.")
        }
        network.body.transformer.load_whole_state_dict(inner)  # type: ignore[union-attr, operator]
        self.model: Any = smp.DistributedModel(network)

        @smp.step
        def step(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
            loss = model(ids)
            model.backward(loss)
            return loss

        self._step: Any = step

    def step(self, microbatches: tuple[torch.Tensor, ...]) -> float:
        """Add up the mean gradient over microbatches; the mean loss."""
        return float(self._step(self.model, torch.cat(microbatches)).reduce_mean())

    def gradients(self, expected: State) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
        """Names, gradients and what they have to be, of this rank's parameters."""
        right, module = our_state(expected), self.model.module
        shardings, found = named_shardings(module), []
        for name, parameter in module.named_parameters():
            assert parameter.grad is not None
            like: torch.Tensor | None = right[name]
            if name in shardings:
                like = shardings[name].shard(right[name], smp.tp_rank(), smp.tp_size())
            assert like is not None
            found.append((name, parameter.grad, like))
        return found

    def barrier(self) -> None:
        """Wait for the other rank."""
        smp.barrier()

    def close(self) -> None:
        """Leave."""
        smp.shutdown()
