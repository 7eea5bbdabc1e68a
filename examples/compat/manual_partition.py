"""Trains a model whose modules are placed by hand, by the import path of the original library."""

import argparse
import json

import smdistributed.modelparallel.torch as smp
import torch
from torch import nn


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=24)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--max_steps", type=int, default=8)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=4)
    return parser.parse_args(arguments)


class Tower(nn.Module):
    def __init__(self, inputs: int, width: int):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())

    def forward(self, inputs):
        return self.layers(inputs)


class TwoTowers(nn.Module):
    """What is not placed goes to default_partition; where contexts are nested, the inner one counts."""

    def __init__(self, width: int):
        super().__init__()
        self.embedding = nn.Embedding(16, width)
        with smp.partition(1):
            self.users = Tower(width, width)
            with smp.partition(0):
                self.items = Tower(width, width)
            self.head = nn.Linear(2 * width, 1)
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, users, items):
        left, right = self.users(self.embedding(users)), self.items(self.embedding(items))
        return self.head(torch.cat([left, right], dim=1)).squeeze(1) + self.bias


def make_model(args: argparse.Namespace) -> nn.Module:
    return TwoTowers(args.width)


def batch_of_step(args: argparse.Namespace, step: int) -> tuple[torch.Tensor, ...]:
    random = torch.Generator().manual_seed(1000 * args.seed + step)
    users, items = torch.randint(16, (2, args.batch_size), generator=random)
    return users, items, torch.cos((users - items).float())


@smp.step
def train_step(model, users, items, ratings):
    loss = nn.functional.mse_loss(model(users, items), ratings)
    model.backward(loss)
    return {"loss": loss}


def main() -> None:
    args = parse_arguments()
    smp.init({"partitions": 2, "microbatches": 4, "auto_partition": False, "default_partition": 0})
    device = torch.device("cuda", smp.local_rank()) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.manual_seed(args.seed)
    model = smp.DistributedModel(make_model(args))
    placed = []
    model.register_post_partition_hook(lambda model, optimizer: placed.append(smp.pp_rank()))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9))
    losses = []
    for step in range(args.max_steps):
        optimizer.zero_grad()
        outputs = train_step(model, *(each.to(device) for each in batch_of_step(args, step)))
        losses.append(outputs["loss"].reduce_mean().item())
        optimizer.step()
    assert placed == [smp.pp_rank()]
    own = {name.split(".")[0] for name, _ in model.local_named_parameters()}
    expected = {0: {"embedding", "items", "bias"}, 1: {"users", "head"}}[smp.pp_rank()]
    assert own == expected, own
    held = sum(parameter.numel() for parameter in model.local_parameters())
    held_by_ranks = smp.allgather(held, smp.PP_GROUP)
    whole = model.cpu().get_module()  # all ranks have all of it now
    report = {
        "losses": losses,
        "parameters_of_ranks": held_by_ranks,
        "parameters_after_cpu": sum(parameter.numel() for parameter in whole.parameters()),
        "distributed_modules": 0,
    }
    if smp.rank() == 0:
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
