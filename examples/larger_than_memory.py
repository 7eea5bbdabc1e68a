"""Trains a GPT-2 whose parameters and optimizer state exceed what each rank may have of memory.

torchrun --nproc_per_node 4 examples/larger_than_memory.py               # with what saves memory: trains
torchrun --nproc_per_node 4 examples/larger_than_memory.py --plain       # the pipeline alone: memory runs out
"""

import argparse
import resource

import shardwright as smp
import torch
from transformers import GPT2Config, GPT2LMHeadModel

STEPS, BATCH, SEQUENCE = 3, 16, 64


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--plain", action="store_true", help="without activation checkpointing and sharded optimizer state"
    )
    parser.add_argument("--limit-gib", type=float, default=2.0, help="what each rank may have of memory")
    parser.add_argument("--layers", type=int, default=14)
    parser.add_argument("--width", type=int, default=1024)
    return parser.parse_args()


@smp.step
def train_step(model, ids):
    loss = model(input_ids=ids, labels=ids).loss
    model.backward(loss)
    return loss


def main() -> None:
    arguments = parse_arguments()
    limit = int(arguments.limit_gib * 2**30)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    smp.init(
        pipeline_parallel_degree=2,
        microbatches=4,
        ddp=True,
        shard_optimizer_state=not arguments.plain,
        optimize="memory",
    )
    config = GPT2Config(
        n_layer=arguments.layers,
        n_embd=arguments.width,
        n_head=16,
        vocab_size=16384,
        n_positions=SEQUENCE,
        use_cache=False,
    )
    network = GPT2LMHeadModel(config)
    whole = sum(parameter.numel() for parameter in network.parameters()) * 4
    if not arguments.plain:
        for block in network.transformer.h:
            smp.set_activation_checkpointing(block)
    model = smp.DistributedModel(network)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-4))
    if smp.rank() == 0:
        print(
            f"parameters and optimizer state: {3 * whole / 2**30:.2f} GiB; a rank may have {arguments.limit_gib:g} GiB",
            flush=True,
        )
    generator = torch.Generator().manual_seed(smp.dp_rank())
    for step in range(STEPS):
        ids = torch.randint(config.vocab_size, (BATCH, SEQUENCE), generator=generator)
        optimizer.zero_grad()
        loss = train_step(model, ids).reduce_mean()
        optimizer.step()
        if smp.rank() == 0:
            print(f"step {step + 1}: loss {loss.item():.4f}", flush=True)
    for account in smp.memory_report():
        if smp.rank() == 0:
            print(f"rank {account['rank']}: {account['peak'] / 2**30:.2f} GiB of host memory at most")


if __name__ == "__main__":
    main()
