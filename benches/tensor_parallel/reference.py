"""What every side has to compute: the first step of the model of ``transformers``, whole, in one process.

usage: python -m benches.tensor_parallel.reference FILE
"""

from __future__ import annotations

import sys

import torch

from benches.gpt2.model import make_batch, make_model
from benches.tensor_parallel.model import MICROBATCHES


def main() -> None:
    """Write weights, batch, and the first step's loss and gradients."""
    model, ids = make_model(), make_batch()
    losses = []
    for part in ids.chunk(MICROBATCHES):
        loss = model(input_ids=part, labels=part).loss
        (loss / MICROBATCHES).backward()
        losses.append(float(loss.detach()))
    named = dict(model.transformer.named_parameters())
    torch.save(
        {
            "weights": {name: one.detach() for name, one in named.items()},
            "gradients": {name: one.grad for name, one in named.items()},
            "ids": ids,
            "loss": sum(losses) / len(losses),
        },
        sys.argv[1],
    )


if __name__ == "__main__":
    main()
