"""Tensors of devices go to checkpoints and back by way of two buffers; those in host memory are not copied.

Streams that run late stand for a device's; ``tests/device`` runs CUDA's.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import shardwright as smp
import torch
from shardwright._core import CheckpointWriter
from shardwright.checkpoints import staging, streamed
from shardwright.checkpoints.staging import Staging, boxes_within, within
from torch import nn

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


class Job:
    """A model with an optimizer that has been trained a little."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.module = nn.Sequential(nn.Linear(60, 90), nn.Tanh(), nn.Linear(90, 5))
        self.model: Any = smp.DistributedModel(self.module)
        wrap: Any = smp.DistributedOptimizer
        self.optimizer = wrap(torch.optim.AdamW(self.model.parameters(), lr=0.1))
        for _ in range(2):
            self.optimizer.zero_grad()
            self.module(torch.randn(4, 60)).square().sum().backward()
            self.optimizer.step()

    def tensors(self) -> list[torch.Tensor]:
        state = [entry[name] for entry in self.optimizer.state.values() for name in sorted(entry)]
        return [*self.module.state_dict().values(), *state]


@pytest.mark.parametrize("asynchronous", [False, True], ids=["at once", "in the background"])
def test_a_checkpoint_of_a_device_is_that_of_host_memory_byte_for_byte(
    asynchronous: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smp.init()
    try:
        job = Job(1)
        smp.save_checkpoint(tmp_path / "host", "a", model=job.model, optimizer=job.optimizer)
        made = LateStreams()
        with monkeypatch.context() as patched:
            patched.setattr(staging, "CudaStreams", lambda: made)
            patched.setattr(staging, "BUFFER_BYTES", BUFFER)
            more = {"model": job.model, "optimizer": job.optimizer, "asynchronous": asynchronous}
            smp.save_checkpoint(tmp_path / "device", "a", **more)
            expected = [one.clone() for one in job.tensors()]
            for one in job.tensors():
                one.detach().zero_()  # training goes on: the copy is complete
            assert made.log.count("out") > 10
            assert made.locked_bytes == 2 * BUFFER
            smp.resume_from_checkpoint(tmp_path / "device", "a", model=job.model, optimizer=job.optimizer)
            assert made.log.count("in") > 10
            assert made.under_way == 0
        assert all(torch.equal(one, other) for one, other in zip(job.tensors(), expected, strict=True))
    finally:
        smp.shutdown()
    files = [sorted((tmp_path / where).rglob("*.safetensors")) for where in ("host", "device")]
    assert [path.read_bytes() for path in files[0]] == [path.read_bytes() for path in files[1]]


def test_what_is_in_host_memory_is_written_from_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Writer:
        """Sees what is given to the core."""

        addresses: list[int]

        def write_part(self, name: str, given: Any) -> str:
            self.addresses = [view.data_ptr() for _, view, _, _ in given]
            return name

    monkeypatch.setattr(Staging, "blocks", lambda *_: pytest.fail("nothing is staged"))
    values = torch.arange(6.0)
    writer: Any = Writer()
    assert streamed.write_part(writer, "part", [("a", values, [6], ([0], [6], None))]) == "part"
    assert writer.addresses == [values.data_ptr()]


def test_a_part_that_does_not_end_leaves_no_file(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, "a")
    part = writer.begin_part("part-00000.safetensors", [("a", "float32", [6], ([0], [6], None))])
    assert part.order() == [0]
    part.write(torch.arange(3.0))
    assert list(tmp_path.rglob("part-*"))
    with pytest.raises(ValueError, match="16 bytes were given, and 12 are left"):
        part.write(torch.arange(4.0))
    with pytest.raises(ValueError, match="12 bytes of the part are missing"):
        part.finish()
    del part
    assert not list(tmp_path.rglob("part-*"))
