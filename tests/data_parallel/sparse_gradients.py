"""A rank of a job of replicas whose embeddings have sparse gradients: they are the mean, and stay sparse."""

from __future__ import annotations

import shardwright as smp
import torch
from torch import nn


class Model(nn.Module):
    """An embedding for each kind of gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.sparse = nn.Embedding(20, 3, sparse=True)
        self.on_one_rank = nn.Embedding(5, 3, sparse=True)
        self.tied = nn.Embedding(6, 3, sparse=True)
        self.unused = nn.Embedding(4, 3, sparse=True)
        self.linear = nn.Linear(3, 3)

    def forward(self, ids: torch.Tensor, replica: int) -> torch.Tensor:
        hidden = self.linear(self.sparse(ids))
        hidden = hidden + self.on_one_rank(ids % 5) if replica == 0 else hidden
        hidden = hidden + self.tied(ids % 6)
        return (hidden @ self.tied.weight.t() if replica == 1 else hidden).square().mean()


def ids_of(replica: int) -> torch.Tensor:
    return torch.randint(20, (4 + 3 * replica,), generator=torch.Generator().manual_seed(replica))


def main() -> None:
    torch.set_default_dtype(torch.float64)
    smp.init({"ddp": True})
    torch.manual_seed(0)
    model = smp.DistributedModel(Model())
    torch.manual_seed(0)
    whole = Model()

    @smp.step
    def train(ids: torch.Tensor) -> torch.Tensor:
        loss = model(ids, smp.dp_rank())
        model.backward(loss)
        return loss

    for _ in range(2):
        train(ids_of(smp.dp_rank()))
        for replica in range(2):
            (whole(ids_of(replica), replica) / 2).backward()
        expected = dict(whole.named_parameters())
        for name, parameter in model.module.named_parameters():
            right = expected[name].grad
            assert (parameter.grad is None) == (right is None) == name.startswith("unused"), name
            if right is not None:
                assert parameter.grad.is_sparse == name.startswith(("sparse", "on_one_rank")), name
                found = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
                right = right.to_dense() if right.is_sparse else right
                assert (found - right).abs().max() <= 1e-10 * right.abs().max(), name
    print("exact")


if __name__ == "__main__":
    main()
