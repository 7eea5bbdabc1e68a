"""Trains a GPT-2 whose parameters, gradients and optimizer state exceed what each rank may have of memory.

torchrun --nproc_per_node 4 examples/larger_than_memory.py               # with what saves memory: trains
torchrun --nproc_per_node 4 examples/larger_than_memory.py --plain       # the pipeline alone: memory runs out
"""

import argparse
import re
import resource
from pathlib import Path

import shardwright as smp
import torch
from transformers import GPT2Config, GPT2LMHeadModel

STEPS, BATCH, SEQUENCE = 2, 8, 128


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--plain", action="store_true", help="without activation checkpointing and sharded optimizer state"
    )
    parser.add_argument("--limit", type=int, default=660, help="MiB that each rank may have beside its libraries")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=384)
    return parser.parse_args()


def limit_memory(mebibytes: int) -> None:
    """Let this process have so much more memory than it has with its libraries."""
    (kibibytes,) = re.findall(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
    limit = (int(kibibytes) << 10) + (mebibytes << 20)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


@smp.step
def train_step(model, ids):
    loss = model(input_ids=ids, labels=ids).loss
    model.backward(loss)
    return loss


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    smp.init(pipeline_parallel_degree=2, microbatches=4, ddp=True, shard_optimizer_state=not arguments.plain)
    limit_memory(arguments.limit)
    config = GPT2Config(
        n_layer=arguments.layers,
        n_embd=arguments.width,
        n_head=8,
        vocab_size=4096,
        n_positions=SEQUENCE,
        use_cache=False,
    )
    with smp.delay_param_initialization():
        network = GPT2LMHeadModel(config)
    if not arguments.plain:
        for block in network.transformer.h:
            smp.set_activation_checkpointing(block)
    model = smp.DistributedModel(network)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-4))
    if smp.rank() == 0:
        needs = 4 * 4 * sum(parameter.numel() for parameter in network.parameters()) // smp.pp_size() >> 20
        print(
            f"a stage's weights, gradients and moments: {needs} MiB; a rank may have {arguments.limit} MiB", flush=True
        )
    generator = torch.Generator().manual_seed(smp.dp_rank())
    for step in range(STEPS):
        ids = torch.randint(config.vocab_size, (BATCH, SEQUENCE), generator=generator)
        optimizer.zero_grad()
        loss = train_step(model, ids).reduce_mean()
        optimizer.step()
        if smp.rank() == 0:
            print(f"step {step + 1}: loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
