"""``nn.TransformerEncoder`` with a padding mask, whose fast path leaves the padded positions out."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import shardwright as smp
import torch
from shardwright.job.runtime import Runtime
from torch import nn

from tests.frames.comparing import Part, assert_exact
from tests.frames.job import Job, in_process_ranks

#: By the first part of a layer's name: the first layers here, or elsewhere, or on three ranks.
PLACES: dict[str, dict[str, int]] = {
    "first here": {"encoder.layers.1": 1},
    "first elsewhere": {"encoder.layers.0": 1},
    "three ranks": {"encoder.layers.0": 1, "encoder.layers.1": 2},
    "whole elsewhere": {"encoder": 1, "encoder.layers.1": 0},
}
#: Rows, length and width: small, and over the size that a message takes along.
SIZES = [(3, 4, 4), (8, 20, 32)]
MASKS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "at the end": lambda places: places >= torch.arange(1, len(places) + 1).clamp(max=places.shape[1]).unsqueeze(1),
    "at the beginning": lambda places: places < 1,
    "as numbers": lambda places: torch.zeros(places.shape, dtype=torch.float64).masked_fill(places >= 2, -torch.inf),
    "none": lambda places: places < 0,
}


def owner(place: str) -> Callable[[str], int]:
    def owns(name: str) -> int:
        prefixes = [prefix for prefix in PLACES[place] if name == prefix or name.startswith(prefix + ".")]
        return PLACES[place][max(prefixes, key=len)] if prefixes else 0

    return owns


def evaluated(mode: Callable[[], Any]) -> Callable[..., Any]:
    def step(model: nn.Module, backward: Callable[..., None], inputs: list[torch.Tensor]) -> Any:
        with mode():
            return model(*inputs)

    return step


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("place", PLACES)
def test_padded_positions_are_what_they_are_in_one_process(place: str, mask: str, size: tuple[int, int, int]) -> None:
    rows, length, width = size
    padding = MASKS[mask](torch.arange(length).expand(rows, length))
    layer = nn.TransformerEncoderLayer(width, 2, 2 * width, batch_first=True, dtype=torch.float64)
    encoder = nn.TransformerEncoder(layer, 3, norm=nn.LayerNorm(width, dtype=torch.float64))
    nn.init.normal_(encoder.norm.bias)  # type: ignore[union-attr]
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        model = Part(lambda m, x: m.encoder(x, src_key_padding_mask=padding), encoder=copy.deepcopy(encoder)).eval()
        x = torch.randn(size, dtype=torch.float64)
        assert_exact(model, x, step=evaluated(mode), owners=owner(place))


@pytest.mark.parametrize("place", ["layers.0", "layers.1", "layers.0.linear1"])
def test_an_encoder_over_real_ranks_trains_and_then_evaluates(place: str) -> None:
    """Torch sees stand-ins for the weights of other ranks here, and decides otherwise by them."""
    rows, length, width = 8, 10, 32
    layer = nn.TransformerEncoderLayer(width, 2, width, 0.0, batch_first=True, dtype=torch.float64)
    encoder = nn.TransformerEncoder(layer, 2)
    x = torch.randn(rows, length, width, dtype=torch.float64)
    padding = MASKS["at the end"](torch.arange(length).expand(rows, length))
    with torch.no_grad():
        expected = copy.deepcopy(encoder).eval()(x, src_key_padding_mask=padding)

    def main(_: Runtime) -> torch.Tensor:
        module = copy.deepcopy(encoder)
        smp.set_partition(module.get_submodule(place), 1)
        model = smp.DistributedModel(module)

        @smp.step
        def train(x: torch.Tensor, padding: torch.Tensor) -> None:
            model.backward(model(x, src_key_padding_mask=padding).square().mean())

        @smp.step
        def evaluate(x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                output: torch.Tensor = model(x, src_key_padding_mask=padding)
            return output

        train(x, padding)
        model.eval()
        found: torch.Tensor = evaluate(x, padding).concat()
        return found

    job = Job(2)
    try:
        with in_process_ranks():
            results = job.run(main, {"microbatches": 2, "auto_partition": False, "default_partition": 0})
    finally:
        job.close()
    for found in results:
        if isinstance(found, BaseException):
            raise found
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
