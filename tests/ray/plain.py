"""The model that is trained, its rows, and its training in one plain process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

FEATURES, ROWS, BATCH, EPOCHS = 6, 48, 12, 2
#: The largest difference of losses and weights: float64 rounds by 1e-16, a step adds some hundred products.
BAR = 1e-12


def module() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(FEATURES, 16)]
    layers += [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(*layers, nn.Linear(16, 1)).double()


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def rows(count: int = ROWS) -> torch.Tensor:
    """So many rows, of which each tells its number in its first value."""
    values = torch.randn(count, FEATURES, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    values[:, 0] = torch.arange(count) / count
    return values


def numbers(batch: torch.Tensor, count: int = ROWS) -> list[int]:
    """The numbers of rows."""
    return (batch[:, 0] * count).round().long().tolist()


def loss_of(outputs: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(outputs, batch.sum(1, keepdim=True))


def batches(epochs: int = EPOCHS) -> list[torch.Tensor]:
    """The batches of all replicas together, in the order of the rows."""
    return list(rows().split(BATCH)) * epochs


def train(given: Iterable[torch.Tensor]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train on batches in this process."""
    model = module()
    optimizer = optimizer_of(model)
    losses = []
    for batch in given:
        optimizer.zero_grad()
        loss = loss_of(model(batch), batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


def apart(losses: Sequence[float], weights: dict[str, Any], given: Iterable[torch.Tensor]) -> float:
    """How far a training is from the plain one on these batches."""
    plain_losses, plain_weights = train(given)
    assert len(losses) == len(plain_losses), f"{len(losses)} losses, plain {len(plain_losses)}"
    assert weights.keys() == plain_weights.keys()
    away = [abs(one - other) for one, other in zip(losses, plain_losses, strict=True)]
    away += [
        float((torch.tensor(weights[name], dtype=torch.float64) - value).abs().max())
        for name, value in plain_weights.items()
    ]
    return max(away)
