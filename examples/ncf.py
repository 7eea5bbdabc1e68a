"""Trains neural collaborative filtering (He et al., 2017) on generated ratings, its tables divided over ranks."""

import argparse
import json
import time

import shardwright as smp
import torch
from torch import nn


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--users", type=int, default=318133)
    parser.add_argument("--items", type=int, default=1792)
    parser.add_argument("--gmf-width", type=int, default=64, help="channels of generalized matrix factorization")
    parser.add_argument("--mlp-width", type=int, default=512, help="channels of users and of items for the perceptron")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=256, help="pairs of each data-parallel rank")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--tensor-parallel-degree", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


class NeuralCollaborativeFiltering(nn.Module):
    """A matrix factorization and a perceptron, each with tables of its own, that score a pair together."""

    def __init__(
        self, users: int, items: int, gmf_width: int, mlp_width: int, embedding=smp.nn.DistributedEmbedding
    ) -> None:
        super().__init__()
        self.gmf_users = embedding(users, gmf_width, sparse=True)
        self.gmf_items = embedding(items, gmf_width, sparse=True)
        self.mlp_users = embedding(users, mlp_width, sparse=True)
        self.mlp_items = embedding(items, mlp_width, sparse=True)
        self.mlp = nn.Sequential(
            nn.Linear(2 * mlp_width, mlp_width),
            nn.ReLU(),
            nn.Linear(mlp_width, mlp_width // 2),
            nn.ReLU(),
            nn.Linear(mlp_width // 2, mlp_width // 4),
            nn.ReLU(),
        )
        self.score = nn.Linear(gmf_width + mlp_width // 4, 1)

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        """Logits [batch] that users [batch] like items [batch]."""
        factors = self.gmf_users(users) * self.gmf_items(items)
        hidden = self.mlp(torch.cat([self.mlp_users(users), self.mlp_items(items)], -1))
        return self.score(torch.cat([factors, hidden], -1)).squeeze(-1)


class Ratings:
    """Pairs of users and items that are as popular as a power law says; users like the items of their own taste."""

    TASTES = 8

    def __init__(self, users: int, items: int, seed: int) -> None:
        self.users, self.items = users, items
        self.generator = torch.Generator().manual_seed(seed)

    def popular(self, count: int, batch: int) -> torch.Tensor:
        """Ids of which number k is as frequent as 1 / (k + 1)."""
        uniform = torch.rand(batch, generator=self.generator, dtype=torch.float64)
        return ((count + 1) ** uniform - 1).long().clamp(max=count - 1)

    def batch(self, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Users, items and whether they like them, each [size]; one half does."""
        users, items = self.popular(self.users, size), self.popular(self.items, size)
        likes = torch.arange(size) % 2
        taste = users % self.TASTES
        other = (taste + torch.randint(1, self.TASTES, (size,), generator=self.generator)) % self.TASTES
        items = items - items % self.TASTES + torch.where(likes.bool(), taste, other)
        return users, items.clamp(max=self.items - 1), likes.float()


@smp.step
def train_step(model, users, items, likes):
    loss = nn.functional.binary_cross_entropy_with_logits(model(users, items), likes)
    model.backward(loss)
    return loss


def main() -> None:
    args = parse_arguments()
    smp.init({"tensor_parallel_degree": args.tensor_parallel_degree, "ddp": True})
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = NeuralCollaborativeFiltering(args.users, args.items, args.gmf_width, args.mlp_width).to(device)
    model = smp.DistributedModel(model)
    tables = [one for name, one in model.named_parameters() if "users" in name or "items" in name]
    others = [one for name, one in model.named_parameters() if not ("users" in name or "items" in name)]
    optimizers = [
        smp.DistributedOptimizer(torch.optim.SparseAdam(tables, lr=args.learning_rate)),
        smp.DistributedOptimizer(torch.optim.Adam(others, lr=args.learning_rate)),
    ]
    ratings = Ratings(args.users, args.items, args.seed + 1 + smp.dp_rank())

    losses = []
    start = time.perf_counter()
    for _ in range(args.steps):
        batch = [one.to(device) for one in ratings.batch(args.batch_size)]
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = train_step(model, *batch)
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.reduce_mean().item())
    seconds = time.perf_counter() - start
    last = losses[-20:]
    if smp.rank() == 0:
        samples = args.steps * args.batch_size * smp.dp_size()
        result = {
            "loss_first": losses[0],
            "loss_last": sum(last) / len(last),
            "samples_per_s": samples / seconds,
            "seconds": seconds,
        }
        print(json.dumps({**result, "table_bytes": sum(one.nbytes for one in tables)}), flush=True)


if __name__ == "__main__":
    main()
