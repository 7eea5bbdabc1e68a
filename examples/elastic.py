"""Trains on with the ranks that are left, after some were lost.

Start one on each host; with fewer than four, down to two, the job goes on from its newest checkpoint:

    torchrun --nnodes 2:4 --nproc-per-node 1 --max-restarts 3 --rdzv-backend c10d --rdzv-endpoint HOST:PORT \\
        examples/elastic.py --folder SHARED_FOLDER
"""

import argparse
import json
from pathlib import Path

import shardwright as smp
import torch
from torch import nn

SAMPLES, FEATURES, CLASSES = 1000, 32, 10


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--folder", type=Path, required=True, help="of checkpoints and losses.jsonl; the same on all ranks"
    )
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-every", type=int, default=8, help="steps")
    parser.add_argument("--batch-size", type=int, default=24, help="samples of all replicas together")
    parser.add_argument("--pipeline-parallel-degree", type=int, default=2, help="with enough ranks")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=6)
    return parser.parse_args()


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner, self.outer = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(torch.tanh(self.inner(self.norm(x))))


def data_set() -> tuple[torch.Tensor, torch.Tensor]:
    """Points, and the nearest of ten others."""
    generator = torch.Generator().manual_seed(1)
    points = torch.randn(SAMPLES, FEATURES, generator=generator, dtype=torch.float64)
    others = torch.randn(CLASSES, FEATURES, generator=generator, dtype=torch.float64)
    return points, torch.cdist(points, others).argmin(1)


def samples_from(position: int, count: int) -> list[int]:
    """The samples at so many places of an endless order: each epoch all of them, shuffled."""
    found = []
    for epoch in range(position // SAMPLES, (position + count - 1) // SAMPLES + 1):
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch)).tolist()
        found += order[max(position - epoch * SAMPLES, 0) : position + count - epoch * SAMPLES]
    return found


@smp.step
def train_step(model, points, classes):
    loss = nn.functional.cross_entropy(model(points), classes)
    model.backward(loss)
    return loss


def main() -> None:
    args = parse_arguments()
    # With three ranks, this becomes one stage and three replicas.
    smp.init(
        pipeline_parallel_degree=args.pipeline_parallel_degree,
        elastic_degrees="pipeline_parallel_degree",
        microbatches=2,
        ddp=True,
    )
    torch.manual_seed(0)
    blocks = (Block(args.width) for _ in range(args.layers))
    module = nn.Sequential(nn.Linear(FEATURES, args.width), *blocks, nn.Linear(args.width, CLASSES))
    model = smp.DistributedModel(module.double())
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    position = 0  # in the order of samples: with it, none is left out or taken twice
    if (args.folder / "newest").exists():
        content = smp.resume_from_checkpoint(args.folder)
        position = content["position"]
        scheduler.load_state_dict(content["scheduler"])
    points, classes = data_set()
    args.folder.mkdir(exist_ok=True)
    with open(args.folder / "losses.jsonl" if smp.rank() == 0 else "/dev/null", "a", buffering=1) as log:
        degrees = {"ranks": smp.size(), "stages": smp.pp_size(), "replicas": smp.dp_size()}
        print(json.dumps({"from_step": position // args.batch_size, **degrees}), file=log)
        for step in range(position // args.batch_size, args.steps):
            # The batch is that of all replicas, so that it is the same for any number of them.
            own = samples_from(position, args.batch_size)[smp.dp_rank() :: smp.dp_size()]
            optimizer.zero_grad()
            loss = train_step(model, points[own], classes[own]).reduce_mean().item()
            optimizer.step()
            scheduler.step()
            position += args.batch_size
            replicas = dict(smp.allgather((smp.dp_rank(), (own, loss)), smp.WORLD)).values()
            mean = sum(loss for _, loss in replicas) / smp.dp_size()
            print(
                json.dumps({"step": step, "loss": mean, "samples": [one for own, _ in replicas for one in own]}),
                file=log,
            )
            if (step + 1) % args.save_every == 0 or step + 1 == args.steps:
                content = {"position": position, "scheduler": scheduler.state_dict()}
                smp.save_checkpoint(
                    args.folder,
                    f"step{step + 1}",
                    user_content=content,
                    num_kept_partial_checkpoints=3,
                    asynchronous=True,
                )


if __name__ == "__main__":
    main()
