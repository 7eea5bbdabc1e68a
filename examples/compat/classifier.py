"""Trains a classifier of pictures with mixed precision and a gradient scaler, by the old import path."""

import argparse
import json

import smdistributed.modelparallel.torch as smp
import torch
from torch import nn
from torch.nn import functional

CLASSES = 10


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batches", type=int, default=4, help="batches of an epoch")
    parser.add_argument("--lr", type=float, default=0.5)
    parser.add_argument("--amp", choices=("no", "bfloat16", "float16"), default="no", help="the dtype of autocast")
    parser.add_argument("--seed", type=int, default=3)
    return parser.parse_args(arguments)


class Net1(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, 1)
        self.conv2 = nn.Conv2d(8, 16, 3, 1)

    def forward(self, pictures):
        hidden = functional.relu(self.conv1(pictures))
        hidden = functional.relu(self.conv2(hidden))
        return torch.flatten(functional.max_pool2d(hidden, 2), 1)


class Net2(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(16 * 4 * 4, 64)
        self.fc2 = nn.Linear(64, CLASSES)

    def forward(self, features):
        return functional.log_softmax(self.fc2(functional.relu(self.fc1(features))), 1)


class GroupedNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.net1 = Net1()
        self.net2 = Net2()

    def forward(self, pictures):
        return self.net2(self.net1(pictures))


def make_model(args: argparse.Namespace) -> nn.Module:
    return GroupedNet()


def batch_of_step(args: argparse.Namespace, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Noise, with a bright bar whose place is the class."""
    random = torch.Generator().manual_seed(1000 * args.seed + step)
    targets = torch.randint(CLASSES, (args.batch_size,), generator=random)
    pictures = 0.3 * torch.randn(args.batch_size, 1, 12, 12, generator=random)
    pictures[torch.arange(args.batch_size), 0, targets + 1] += 1.0
    return pictures, targets


def autocast(args: argparse.Namespace, device: str):
    dtype = torch.bfloat16 if args.amp == "no" else getattr(torch, args.amp)
    return torch.autocast(device, dtype=dtype, enabled=args.amp != "no")


@smp.step
def train_step(model, scaler, args, pictures, targets):
    with autocast(args, pictures.device.type):
        output = model(pictures)
        loss = functional.nll_loss(output.float(), targets, reduction="mean")
    model.backward(scaler.scale(loss))
    return output, loss


@smp.step
def test_step(model, pictures, targets):
    output = model(pictures)
    loss = functional.nll_loss(output, targets, reduction="sum")
    correct = output.argmax(1).eq(targets).sum()
    return loss, correct


def main() -> None:
    args = parse_arguments()
    smp.init()
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(smp.local_rank())
    device = torch.device("cuda" if cuda else "cpu")
    torch.manual_seed(args.seed)
    model = smp.DistributedModel(make_model(args))
    scaler = smp.amp.GradScaler()
    optimizer = smp.DistributedOptimizer(torch.optim.Adadelta(model.parameters(), lr=args.lr))

    losses, accuracies = [], []
    for epoch in range(args.epochs):
        model.train()
        for number in range(args.batches):
            pictures, targets = (each.to(device) for each in batch_of_step(args, epoch * args.batches + number))
            optimizer.zero_grad()
            _, loss_mb = train_step(model, scaler, args, pictures, targets)
            losses.append(loss_mb.reduce_mean().item())
            scaler.step(optimizer)
            scaler.update()
        model.eval()
        with torch.no_grad():
            pictures, targets = (each.to(device) for each in batch_of_step(args, -1 - epoch))
            loss, correct = test_step(model, pictures, targets)
        losses.append(loss.reduce_sum().item() / args.batch_size)
        accuracies.append(correct.reduce_sum().item() / args.batch_size)

    smp.barrier()
    own = sum(parameter.numel() for parameter in model.local_parameters())
    report = {
        "losses": losses,
        "accuracies": accuracies,
        "parameters_of_ranks": smp.allgather(own, smp.WORLD),
        "distributed_modules": len(list(model.distributed_modules())),
    }
    if smp.rank() == 0:
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
