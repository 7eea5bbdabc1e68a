"""One rank that trains a small GPT-2 with dropout, and writes its replica's losses."""

from __future__ import annotations

import json
import sys
import sysconfig
from pathlib import Path
from typing import Any

import shardwright as smp
import torch
from transformers import GPT2Config, GPT2LMHeadModel

SEQUENCES, LENGTH, MICROBATCHES = 16, 64, 4
#: As much text as the curves need.
MAX_BYTES = 1_000_000


def text() -> torch.Tensor:
    """Bytes of the standard library's own source files."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    content = b"".join(file.read_bytes() for file in files)[:MAX_BYTES]
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).long()


@smp.step
def train_step(model: Any, ids: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
    model.backward(loss)
    return loss


def main() -> None:
    pp, replicas, steps, path = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    smp.init(pipeline_parallel_degree=pp, microbatches=MICROBATCHES // replicas, ddp=True, reproducible_rng=True)
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=256, n_positions=LENGTH, n_embd=96, n_layer=4, n_head=4, use_cache=False)
    model = smp.DistributedModel(GPT2LMHeadModel(config))
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    content, order = text(), torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        starts = torch.randint(len(content) - LENGTH, (SEQUENCES,), generator=order)
        batch = torch.stack([content[start : start + LENGTH] for start in starts.tolist()])
        optimizer.zero_grad()
        loss = train_step(model, batch.chunk(replicas)[smp.dp_rank()])
        optimizer.step()
        losses.append(loss.reduce_mean().item())
    held = sum(parameter.numel() for parameter in model.local_parameters())
    (path / f"{smp.rank()}.json").write_text(json.dumps({"replica": smp.dp_rank(), "losses": losses, "held": held}))


if __name__ == "__main__":
    main()
