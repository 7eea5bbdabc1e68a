"""Tensors of devices come out of checkpoints by way of two buffers.

Streams that run late stand for a device's; ``tests/device`` runs CUDA's.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from shardwright.checkpoints import staging
from shardwright.checkpoints.staging import Staging, boxes_within, within

from tests.offloading.late_streams import LateStreams

BUFFER = 4096


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> LateStreams:
    made = LateStreams()
    monkeypatch.setattr(staging, "CudaStreams", lambda: made)
    monkeypatch.setattr(staging, "BUFFER_BYTES", BUFFER)
    return made


def tensors() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    whole = torch.randn(70, 90, generator=generator)
    return [
        whole,
        whole.t(),
        whole[5:31, 7:60],
        torch.tensor(3.5),
        torch.randn(3, 5, 7, 11, generator=generator),
        torch.randn(2, 3000, generator=generator, dtype=torch.float64),
        torch.empty(0, 4),
        torch.arange(5000) % 3 == 0,
    ]


@pytest.mark.parametrize("shape", [(), (1,), (5000,), (3, 2000), (7, 3, 700), (2, 0, 3), (9, 9, 9, 9)])
@pytest.mark.parametrize("nbytes", [8, 100, 4096, 1 << 20])
def test_boxes_are_a_tensor_in_order_and_none_is_too_large(shape: tuple[int, ...], nbytes: int) -> None:
    tensor = torch.arange(math.prod(shape)).view(shape)
    boxes = [within(tensor, box) for box in boxes_within(shape, 8, nbytes)]
    assert all(0 < 8 * box.numel() <= nbytes for box in boxes)
    assert torch.equal(torch.cat([tensor.new_empty(0), *(box.reshape(-1) for box in boxes)]), tensor.reshape(-1))


def test_blocks_are_the_elements_in_order_and_at_most_two_copies_are_under_way(streams: LateStreams) -> None:
    made, given = Staging(), tensors()
    blocks = []
    for block in made.blocks(given):
        assert block.is_contiguous()
        assert block.numel() * block.element_size() <= BUFFER
        assert streams.under_way <= 1, "one block is looked at, and one is on its way"
        blocks.append(block.reshape(-1).view(torch.uint8).clone())
    expected = torch.cat([one.contiguous().reshape(-1).view(torch.uint8) for one in given])
    assert torch.equal(torch.cat(blocks), expected)
    assert streams.locked_bytes == made.locked_bytes == 2 * BUFFER
    assert streams.under_way == 0


def test_loaded_tensors_have_their_values_and_two_buffers_are_all(streams: LateStreams) -> None:
    made, expected = Staging(), tensors()
    targets = [torch.empty_like(one) for one in expected]

    def reader(source: torch.Tensor) -> Any:
        def read(boxes: Any) -> None:
            assert streams.under_way <= 1
            for into, box in boxes:
                assert into.is_contiguous()
                into.copy_(within(source, box))

        return read

    made.load((target, reader(source)) for target, source in zip(targets, expected, strict=True))
    assert all(torch.equal(one, other) for one, other in zip(targets, expected, strict=True))
    assert streams.locked_bytes == 2 * BUFFER
    assert streams.under_way == 0
