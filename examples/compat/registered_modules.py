"""Tensor parallelism of a script's own modules, which it registers, by the import path of the original library."""

import argparse
import json

import smdistributed.modelparallel.torch as smp
import torch
import torch.distributed as dist
from smdistributed.modelparallel.torch.nn.utils import (
    fused_allgather_for_tp,
    initialize_with_input_partition,
    initialize_with_output_partition,
    parameter_creation_scope,
    reduce_scatter_for_tp,
)
from torch import nn


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--batch_size", type=int, default=16, help="samples of all ranks together")
    parser.add_argument("--max_steps", type=int, default=6)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--optimize", choices=("memory", "speed"), default="memory")
    parser.add_argument("--pipeline_parallel_degree", type=int, default=1)
    parser.add_argument("--seed", type=int, default=5)
    return parser.parse_args(arguments)


class DistributedMLP(smp.nn.DistributedModule):
    """An MLP whose inner channels are divided over the ranks of TP_GROUP."""

    def __init__(self, width: int, inner: int):
        super().__init__()
        own = inner // smp.tp_size()
        with parameter_creation_scope(self):
            with initialize_with_output_partition(self):
                self.up = nn.Linear(width, own)
            with initialize_with_input_partition(self):
                self.down = nn.Linear(own, width)

    def forward(self, inputs):
        samples = fused_allgather_for_tp(inputs, 0)
        return reduce_scatter_for_tp(self.down(torch.tanh(self.up(samples))), 0)


def mlp_arguments(inner, width):
    return (), {"width": width, "inner": inner}


@smp.tp_register(DistributedMLP, init_hook=mlp_arguments)
class MLP(nn.Module):
    """The same on one rank; its arguments have another order."""

    def __init__(self, inner: int, width: int):
        super().__init__()
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, inputs):
        return self.down(torch.tanh(self.up(inputs)))


class ScaledLinear(nn.Linear):
    """A layer that takes a factor and returns a dictionary, as nn.Linear does not."""

    def forward(self, inputs, factor=1.0):
        return {"output": super().forward(factor * inputs)}


def scaled(inputs, factor=1.0):
    return (factor * inputs,), {}


smp.tp_register_with_module(
    ScaledLinear,
    smp.nn.DistributedLinear,
    forward_hook=scaled,
    return_hook=lambda output: {"output": output},
)


class Model(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.words = nn.Embedding(32, width)
        self.first = MLP(4 * width, width)
        self.norm = nn.LayerNorm(width)
        self.second = MLP(inner=2 * width, width=width)
        self.scaled = ScaledLinear(width, 32)

    def forward(self, ids):
        hidden = self.words(ids)
        hidden = hidden + self.first(hidden)
        hidden = hidden + self.second(self.norm(hidden))
        return self.scaled(hidden, factor=0.5)["output"]


def make_model(args: argparse.Namespace) -> nn.Module:
    return Model(args.width)


def batch_of_step(args: argparse.Namespace, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(1000 * args.seed + step)
    ids = torch.randint(32, (args.batch_size, 6), generator=random)
    return ids, (3 * ids + 1) % 32


@smp.step
def train_step(model, ids, targets):
    loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
    model.backward(loss)
    return loss


def main() -> None:
    args = parse_arguments()
    smp.init(
        {
            "partitions": args.pipeline_parallel_degree,
            "tensor_parallel_degree": 2,
            "ddp": True,
            "microbatches": 2,
            "optimize": args.optimize,
        }
    )
    device = torch.device("cuda", smp.local_rank()) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.manual_seed(args.seed)
    with smp.tensor_parallelism(enabled=True):
        model = make_model(args)
    smp.set_tensor_parallelism(model.words, False)
    model = smp.DistributedModel(model)
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=args.lr))
    losses = []
    for step in range(args.max_steps):
        ids, targets = (each.chunk(smp.dp_size())[smp.dp_rank()].to(device) for each in batch_of_step(args, step))
        optimizer.zero_grad()
        loss = train_step(model, ids, targets).reduce_mean().detach().clone()
        optimizer.step()
        dist.all_reduce(loss, group=smp.get_dp_process_group())
        losses.append((loss / smp.dp_size()).item())
    own = sum(parameter.numel() for parameter in model.local_parameters())
    divided = sum(model.is_distributed_parameter(parameter) for parameter in model.local_parameters())
    report = {
        "losses": losses,
        "parameters_of_ranks": smp.allgather(own, smp.WORLD),
        "distributed_modules": len(list(model.distributed_modules())),
        "divided_parameters": sum(smp.allgather(divided, smp.PP_GROUP)),
    }
    if smp.rank() == 0:
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
