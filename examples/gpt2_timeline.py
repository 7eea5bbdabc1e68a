"""Trains a GPT-2 for a few steps over a pipeline and draws the timeline of the last one, as the paper's figure 5 does.

torchrun --nproc-per-node 4 examples/gpt2_timeline.py out/gpt2
shardwright trace draw out/gpt2 > timeline.svg
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import shardwright as smp
import torch
from transformers import GPT2Config, GPT2LMHeadModel


@smp.step
def train_step(model: Any, ids: torch.Tensor) -> torch.Tensor:
    loss = model(input_ids=ids, labels=ids).loss
    model.backward(loss)
    return loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="where trace.json and timeline.html are written")
    parser.add_argument("--steps", type=int, default=4, help="of which the last is traced")
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=256, help="a multiple of 32")
    parser.add_argument("--sequence-length", type=int, default=128)
    parser.add_argument("--pipeline", choices=("interleaved", "simple", "looped", "zero_bubble"), default="interleaved")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    # A stage for every process of the job.
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    smp.init(microbatches=args.microbatches, pipeline=args.pipeline, pipeline_parallel_degree=ranks)
    config = GPT2Config(
        vocab_size=512,
        n_positions=args.sequence_length,
        n_embd=args.width,
        n_layer=args.layers,
        n_head=args.width // 32,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
        loss_type="ForCausalLM",
    )
    model = smp.DistributedModel(GPT2LMHeadModel(config))
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    with smp.trace(args.folder, steps={args.steps - 1}):
        for _ in range(args.steps):
            optimizer.zero_grad()
            loss = train_step(model, torch.randint(512, (2 * args.microbatches, args.sequence_length)))
            optimizer.step()
    report = smp.report()
    if smp.rank() == 0:
        print(f"loss {loss.reduce_mean().item():.3f}; {report}")


if __name__ == "__main__":
    main()
