"""What leaves memory comes back as it was: every dtype and layout, shared masks, arguments that are written to."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import shardwright as smp
import torch
from shardwright import _core
from shardwright.errors import ConfigError, OffloadError
from shardwright.job.runtime import current_runtime
from shardwright.offloading import Kept, OffloadedActivations, activations
from shardwright.offloading.device import DeviceTransfers
from shardwright.offloading.streams import CudaStreams
from shardwright.offloading.tensors import MIN_BYTES, may_be_offloaded
from torch import nn

from tests.jobs.patience import HANG_SECONDS

WIDTH = 96
ROWS = 64


@pytest.fixture(autouse=True)
def nothing_is_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "MOST_OUTGOING_BYTES", 0)


@pytest.fixture(params=[True, "disk"], ids=["host", "disk"])
def job(request: pytest.FixtureRequest) -> Iterator[OffloadedActivations]:
    smp.init({"microbatches": 2, "offload_activations": request.param, "activation_loading_horizon": 1})
    yield current_runtime()[OffloadedActivations]
    smp.shutdown()


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    base = torch.randn(WIDTH, WIDTH, generator=generator)
    numbers = torch.randint(0, 100, (WIDTH, WIDTH), generator=generator)
    found = {str(dtype): base.to(dtype) for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16)}
    found |= {
        str(dtype): numbers.to(dtype) for dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
    }
    found |= {"bool": numbers > 50, "complex": torch.complex(base, base.t().contiguous())}
    return found | {
        "transposed": base.t(),
        "permuted": torch.randn(4, 20, 30, generator=generator).permute(2, 0, 1),
        "channels last": torch.randn(2, 8, 12, 12, generator=generator).contiguous(memory_format=torch.channels_last),
        "expanded": base[:, None, :].expand(WIDTH, 7, WIDTH),
        "sliced": torch.randn(WIDTH, 3 * WIDTH, generator=generator)[:, ::3],
        "offset": torch.randn(2 * WIDTH, WIDTH, generator=generator)[5:70],
        "one row": torch.randn(1, 2000, generator=generator),
        "not numbers": torch.full((WIDTH, WIDTH), float("nan")).fill_diagonal_(-0.0),
    }


@pytest.mark.parametrize("directory", [None, tempfile.gettempdir()], ids=["host", "disk"])
@pytest.mark.parametrize("name", tensors())
def test_a_tensor_comes_back_bit_for_bit_in_its_layout(name: str, directory: str | None) -> None:
    tensor = tensors()[name]
    once = tensor[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())]
    offload = _core.Offload(rank=0, horizon=1, directory=directory, most_outgoing=0, timeout_seconds=HANG_SECONDS)
    try:
        transfers = DeviceTransfers(offload, CudaStreams())
        kept = [Kept(offload.add_call(0, "a Linear"), transfers) for _ in range(3)]
        made = [one.add(once, tensor) for one in kept]
        found = kept[0].take()[made[0].number]
        assert offload.counts()["loaded"] == 1
        assert (found.dtype, found.shape, found.device) == (tensor.dtype, tensor.shape, tensor.device)
        bits, expected = (one.contiguous().view(torch.uint8) for one in (found, tensor))
        assert torch.equal(bits, expected)
        if name != "sliced":  # its gaps are not kept
            assert found.stride() == tensor.stride()
    finally:
        offload.close()


def test_only_large_plain_tensors_leave() -> None:
    large = torch.ones(MIN_BYTES // 4)
    assert may_be_offloaded(large)
    refused = [large[1:], nn.Parameter(large), large.to_sparse(), torch.complex(large, large).conj(), large.to("meta")]
    refused += [torch.quantize_per_tensor(large, 0.1, 0, torch.quint8).expand(8, -1), large.as_subclass(Subclass)]
    assert [may_be_offloaded(tensor) for tensor in refused] == [False] * len(refused)
    inside: list[bool] = []
    torch.func.grad(lambda x: inside.append(may_be_offloaded(x)) or x.sum())(large)  # type: ignore[func-returns-value]
    assert inside == [False]


class Subclass(torch.Tensor):
    """A tensor whose bytes are not all of it."""


class Block(nn.Module):
    """A layer with a mask, which writes to its argument."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x.mul_(0.5)
        return torch.tanh(self.dense(x)) * mask + x


class Model(nn.Module):
    """Blocks that are checkpointed by calls, after which their arguments are written to, or not."""

    def __init__(self, number: int = 6) -> None:
        super().__init__()
        self.call: Any = lambda block, *args: block(*args)
        self.blocks = nn.ModuleList(Block() for _ in range(number))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = (torch.arange(ROWS * WIDTH).view(ROWS, WIDTH) % 3 != 0).double()
        for block in self.blocks:
            given = x * 1
            x = self.call(block, given, mask)
            if self.call is smp.checkpoint:
                given.detach().zero_()
        return x


def gradients(model: nn.Module, losses: list[torch.Tensor]) -> list[torch.Tensor]:
    return [*(parameter.grad for parameter in model.parameters() if parameter.grad is not None), *losses]


def step_of(model: Any, twice: bool = False) -> Any:
    @smp.step
    def train(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        if twice:
            torch.autograd.backward(loss, retain_graph=True)
        model.backward(loss)
        return loss.detach()

    return train


def trained(checkpointed: bool, twice: bool = False) -> list[torch.Tensor]:
    torch.manual_seed(4)
    module = Model().double()
    if checkpointed:
        module.call = smp.checkpoint
    model: Any = smp.DistributedModel(module)
    train = step_of(model, twice)
    outputs = [train(torch.randn(2 * ROWS, WIDTH, dtype=torch.float64)) for _ in range(2)]
    return gradients(module, [output.stack() for output in outputs])


@pytest.mark.parametrize("twice", [False, True], ids=["one backward", "two backwards"])
def test_gradients_are_those_without_checkpoints(job: OffloadedActivations, twice: bool) -> None:
    expected, found = trained(False, twice), trained(True, twice)
    assert all(torch.equal(left, right) for left, right in zip(expected, found, strict=True))
    counts = job.counts()
    # Two steps of two microbatches: all but the last block's argument goes out.
    assert counts["computed_again"] == 2 * 2 * 6 * (2 if twice else 1)
    assert counts["stored"] >= 2 * 2 * 5
    assert counts["loaded"] >= 2 * 2 * 5
    assert counts["bytes"] == 0


def test_a_mask_that_every_layer_gets_is_kept_once(job: OffloadedActivations) -> None:
    trained(True)
    counts, nbytes = job.counts(), ROWS * WIDTH * 8
    # Of each microbatch the arguments of all blocks but the last, and the mask.
    assert counts["stored_bytes"] == 2 * 2 * 6 * nbytes
    assert counts["most_bytes"] == 6 * nbytes


@pytest.mark.parametrize("where", ["/no/such/directory", __file__])
def test_a_directory_in_which_no_file_can_be_made_is_an_error_at_the_start(where: str) -> None:
    with pytest.raises(OffloadError, match=rf'rank 0 .*{Path(where).name}.*"offload_directory"'):
        smp.init({"offload_activations": "disk", "offload_directory": where})
    assert not smp.is_initialized()


def test_a_directory_without_files_is_refused() -> None:
    with pytest.raises(ConfigError, match='"offload_directory" has an effect only with'):
        smp.init({"offload_activations": True, "offload_directory": tempfile.gettempdir()})


def test_the_file_is_in_the_directory_and_has_no_name(tmp_path: Path) -> None:
    smp.init({"microbatches": 2, "offload_activations": "disk", "offload_directory": str(tmp_path)})
    try:
        trained(True)
        counts = current_runtime()[OffloadedActivations].counts()
        assert counts["stored_bytes"] > 0
        assert counts["file_bytes"] == counts["most_bytes"]
        assert not list(tmp_path.iterdir())
        opened = [path.readlink() for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
        assert [path for path in opened if str(path).startswith(str(tmp_path))]
    finally:
        smp.shutdown()


def test_ranks_on_processors_are_told_once_that_a_pool_saves_nothing(caplog: pytest.LogCaptureFixture) -> None:
    smp.init({"microbatches": 2, "offload_activations": True})
    try:
        trained(True)
    finally:
        smp.shutdown()
    told = [record.getMessage() for record in caplog.records if "offloads activations" in record.getMessage()]
    assert told == [
        "rank 0 computes in host memory and offloads activations to a pool of the same memory, which saves nothing: "
        'set "offload_activations" to "disk"'
    ]


def test_it_does_nothing_outside_steps_and_without_checkpoints(job: OffloadedActivations) -> None:
    block = Block().double()
    x, mask = torch.randn(ROWS, WIDTH, dtype=torch.float64), torch.ones(ROWS, WIDTH, dtype=torch.float64)
    smp.checkpoint(block, x, mask).sum().backward()
    trained(False)
    assert job.counts()["computed_again"] == job.counts()["stored"] == 0
