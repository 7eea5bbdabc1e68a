"""Convolutional models: batch normalisation, in-place activations and in-place residuals."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import ResNetConfig, ResNetForImageClassification

from .models_architectures import classify as classify_inside
from .problem import BATCH, Models, Phase, Problem, one

CLASSES = 5
SIDE = 8


class Block(nn.Module):
    def __init__(self, channels_in: int, channels: int) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.Conv2d(channels_in, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU(inplace=True)
        )
        self.second = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels))
        self.shortcut = nn.Conv2d(channels_in, channels, 1) if channels_in != channels else nn.Identity()
        self.activation = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shortcut = self.shortcut(x)
        x = self.second(self.first(x))
        x += shortcut
        result: torch.Tensor = self.activation(x)
        return result


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(inplace=True))
        self.layers = nn.Sequential(Block(6, 6), Block(6, 8), Block(8, 8))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.layers(self.stem(x)).mean((2, 3)))
        return result


def transformers_resnet() -> ResNetForImageClassification:
    return ResNetForImageClassification(
        ResNetConfig(
            num_channels=3,
            embedding_size=8,
            hidden_sizes=[8, 12],
            depths=[1, 2],
            layer_type="basic",
            num_labels=CLASSES,
        )
    )


def images(step: int, random: torch.Generator) -> tuple[torch.Tensor, ...]:
    return torch.randn(BATCH, 3, SIDE, SIDE, generator=random), torch.randint(CLASSES, (BATCH,), generator=random)


def large_images(step: int, random: torch.Generator) -> tuple[torch.Tensor, ...]:
    return (
        torch.randn(BATCH, 3, 4 * SIDE, 4 * SIDE, generator=random),
        torch.randint(CLASSES, (BATCH,), generator=random),
    )


def classify(models: Models, images: torch.Tensor, labels: torch.Tensor) -> Any:
    logits = models["model"](images)
    loss = functional.cross_entropy(logits, labels)
    models["model"].backward(loss)
    return loss, logits


def resnet_pins(pp: int) -> dict[str, int]:
    """The last rank's activation writes in place to what another rank computed."""
    return {"model.layers.1": 1, "model.layers.2": 1, "model.layers.2.second": pp - 1, "model.head": pp - 1}


def resnet_pins_inside_a_block(pp: int) -> dict[str, int]:
    """Cuts inside blocks: the in-place sum and activation of the parent work on remote results."""
    return {"model.layers.0.second": 1, "model.layers.1.first": pp - 1, "model.layers.2.second": 1}


PROBLEMS = {
    "ResNet, in-place": Problem(build=one(ResNet), batch=images, phases=(Phase(body=classify),), pins=resnet_pins),
    "ResNet, cut inside blocks": Problem(
        build=one(ResNet), batch=images, phases=(Phase(body=classify),), pins=resnet_pins_inside_a_block
    ),
    "ResNet of transformers": Problem(
        build=one(transformers_resnet), batch=large_images, phases=(Phase(body=classify_inside),)
    ),
}
