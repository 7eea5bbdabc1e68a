"""Trains a mixture of experts on generated sequences, its experts spread over tensor-parallel ranks."""

import argparse
import json

import shardwright as smp
import torch
from shardwright.nn import utils
from torch import nn


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tensor-parallel-degree", type=int, default=2)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--top", type=int, default=2, help="experts of each token")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=16, help="sequences of each data-parallel rank")
    parser.add_argument("--sequence-length", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    return parser.parse_args()


class MixtureOfExperts(smp.nn.DistributedModule):
    """Feed-forward networks of which each token goes to the best ``top``; every tp rank has some of them.

    No token is dropped: every rank sends its tokens to all and computes what its experts make of those that chose them.
    """

    def __init__(self, width: int, inner: int, experts: int, top: int) -> None:
        super().__init__()
        mine = experts // smp.tp_size()
        self.top, self.own = top, range(smp.tp_rank() * mine, (smp.tp_rank() + 1) * mine)
        self.gate = nn.Linear(width, experts, bias=False)  # each rank's own tokens only: like any other module
        scope = utils.parameter_creation_scope(self, use_normal=True, initializer_range=0.02)
        with scope, utils.initialize_with_output_partition(self):  # the first dim is divided: experts
            self.up = nn.Parameter(torch.empty(mine, inner, width))
            self.down = nn.Parameter(torch.empty(mine, width, inner))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """From [batch, sequence, width] the same; batches may be of different sizes on tp ranks."""
        tokens = x.flatten(0, -2)
        weights, chosen = self.gate(tokens).softmax(-1).topk(self.top)
        weights = weights / weights.sum(-1, keepdim=True)
        sizes = utils.fused_allgather_for_tp(torch.tensor([len(tokens)], device=x.device), 0).tolist()
        tokens, weights, chosen = utils.fused_allgather_for_tp([tokens, weights, chosen], 0, sizes=sizes)
        output = torch.zeros_like(tokens)
        for expert, up, down in zip(self.own, self.up, self.down, strict=True):
            token, place = (chosen == expert).nonzero(as_tuple=True)
            result = nn.functional.gelu(tokens[token] @ up.t()) @ down.t()
            output = output.index_add(0, token, weights[token, place, None] * result)
        return utils.reduce_scatter_for_tp(output, 0, sizes=sizes).view_as(x)


class LanguageModel(nn.Module):
    """Predicts a token from the two before it."""

    def __init__(self, tokens: int, args: argparse.Namespace) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, args.width)
        self.pairs = nn.Linear(2 * args.width, args.width)
        self.norms = nn.ModuleList(nn.LayerNorm(args.width) for _ in range(args.layers))
        self.mixtures = nn.ModuleList(
            MixtureOfExperts(args.width, 2 * args.width, args.experts, args.top) for _ in range(args.layers)
        )
        self.head = nn.Linear(args.width, tokens)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits [batch, sequence - 2, tokens] for what follows the pairs in ids [batch, sequence - 1]."""
        embedded = self.embedding(ids)
        x = self.pairs(torch.cat([embedded[:, :-1], embedded[:, 1:]], -1))
        for norm, mixture in zip(self.norms, self.mixtures, strict=True):
            x = x + mixture(norm(x))
        return self.head(x)


class Sequences:
    """Each in one of several languages, in which the next token follows from the last one."""

    LANGUAGES, TOKENS = 8, 32

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        fixed = torch.Generator().manual_seed(0)
        self.following = torch.stack([torch.randperm(self.TOKENS, generator=fixed) for _ in range(self.LANGUAGES)])

    def batch(self, size: int, length: int) -> torch.Tensor:
        """Ids [size, length]."""
        language = torch.randint(self.LANGUAGES, (size,), generator=self.generator)
        ids = [torch.randint(self.TOKENS, (size,), generator=self.generator)]
        while len(ids) < length:
            ids.append(self.following[language, ids[-1]])
        return torch.stack(ids, 1)


@smp.step
def train_step(model, ids):
    loss = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 2:].flatten())
    model.backward(loss)
    return loss


def main() -> None:
    args = parse_arguments()
    smp.init({"tensor_parallel_degree": args.tensor_parallel_degree, "ddp": True})
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = smp.DistributedModel(LanguageModel(Sequences.TOKENS, args).to(device))
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=args.learning_rate))
    sequences = Sequences(1 + smp.dp_rank())
    losses = []
    for _ in range(args.steps):
        optimizer.zero_grad()
        loss = train_step(model, sequences.batch(args.batch_size, args.sequence_length).to(device))
        optimizer.step()
        losses.append(loss.reduce_mean().item())
    if smp.rank() == 0:
        experts = [tuple(mixture.up.shape) for mixture in model.module.mixtures]
        print(json.dumps({"losses": losses, "experts": experts}), flush=True)


if __name__ == "__main__":
    main()
