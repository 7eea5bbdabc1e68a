"""``CheckpointWriter`` and ``CheckpointReader``: tensors' memory into files and back."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from shardwright._core import CheckpointMemory, CheckpointReader, CheckpointWriter, PartInBackground
from shardwright.errors import ConfigError, ShardwrightError

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]

Part = tuple[list[int], list[int], tuple[int, int] | None]


def description(**fields: Any) -> str:
    """What a job says of itself, with one rank."""
    degrees = dict.fromkeys(("pipeline", "tensor", "reduced_data", "optimizer_sharding", "sharded_data"), 1)
    return json.dumps(
        {
            "library_version": "0",
            "step": None,
            "degrees": degrees,
            "partition": [],
            "aliases": [],
            "user_content": None,
            **fields,
        }
    )


def whole(tensor: torch.Tensor) -> Part:
    """The part that is all of a tensor."""
    return [0] * tensor.dim(), list(tensor.shape), None


def save(folder: Path, tag: str, **tensors: torch.Tensor) -> None:
    """Save whole tensors in one part."""
    writer = CheckpointWriter(folder, tag)
    pieces = [(name, tensor, list(tensor.shape), whole(tensor)) for name, tensor in tensors.items()]
    writer.commit(description(), [writer.write_part("part-0.safetensors", pieces)])


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor."""
    return tensor.detach().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back_bit_by_bit_and_is_read_by_others(tmp_path: Path, dtype: torch.dtype) -> None:
    """The bytes are those of the tensor, and the file is an ordinary one of the format."""
    element = torch.empty(0, dtype=dtype).element_size()
    choices = torch.randint(0, 2 if dtype == torch.bool else 256, (6 * element,), dtype=torch.uint8)
    tensor = choices.view(dtype).reshape(2, 3)
    save(tmp_path, "t", weight=tensor)
    reader = CheckpointReader(tmp_path)
    into = torch.empty(2, 3, dtype=dtype)
    reader.read([("weight", into, whole(into))])
    assert torch.equal(bits(into), choices)
    others = load_file(tmp_path / "t_partial" / "part-0.safetensors")["weight"]
    assert others.dtype == dtype
    assert torch.equal(bits(others), choices)


def test_columns_and_shares_are_read_out_of_rows(tmp_path: Path) -> None:
    """Two ranks' rows and the share of a flat state are read under another division."""
    weight = torch.nn.Parameter(torch.arange(4 * 2048, dtype=torch.float32).reshape(4, 2048))
    state = torch.randn(4 * 2048)
    writer = CheckpointWriter(tmp_path, "t")
    reports = []
    for rank, cut in enumerate((slice(0, 3000), slice(3000, 8192))):
        run = (cut.start, cut.stop - cut.start)
        rows = weight.detach()[2 * rank : 2 * rank + 2]
        pieces = [
            ("weight", rows, [4, 2048], ([2 * rank, 0], [2, 2048], None)),
            ("state", state[cut], [4, 2048], ([0, 0], [4, 2048], run)),
        ]
        reports.append(writer.write_part(f"part-{rank}.safetensors", pieces))
    assert writer.commit(description(user_content={"a": [1, None]}), reports, keep=1) == []
    reader = CheckpointReader(tmp_path, "t")
    columns, share = torch.nn.Parameter(torch.empty(4, 5)), torch.empty(700)
    files, chunks, _ = reader.read(
        [
            ("weight", columns, ([0, 100], [4, 5], None)),
            ("state", share, ([0, 0], [4, 2048], (2900, 700))),
        ]
    )
    assert (files, chunks) == (2, 2)
    assert torch.equal(columns, weight[:, 100:105])
    assert torch.equal(share, state[2900:3600])
    assert json.loads(reader.manifest)["user_content"] == {"a": [1, None]}
    assert reader.verify() == []


def test_other_threads_run_while_a_part_is_written_and_read(tmp_path: Path) -> None:
    """Neither holds the interpreter: another thread counts on within a single call, if not in the first then later."""
    tensor = torch.zeros(32 << 20, dtype=torch.uint8)
    save(tmp_path, "t", weight=tensor)
    reader, writer = CheckpointReader(tmp_path), CheckpointWriter(tmp_path, "u")
    counts, ended = [0], threading.Event()

    def count() -> None:
        while not ended.wait(0.0005):
            counts[0] += 1

    def counted(call: Callable[[], object]) -> int:
        before = counts[0]
        call()
        return counts[0] - before

    calls: list[Callable[[], object]] = [
        lambda: writer.write_part("part-0.safetensors", [("weight", tensor, list(tensor.shape), whole(tensor))]),
        lambda: reader.read([("weight", tensor, whole(tensor))]),
    ]
    thread = threading.Thread(target=count)
    thread.start()
    try:
        for call in calls:
            assert any(counted(call) >= 2 for _ in range(20))
    finally:
        ended.set()
        thread.join()


def test_differences_are_listed_by_name(tmp_path: Path) -> None:
    """Shapes, types, and what only one of both has."""
    save(tmp_path, "t", a=torch.zeros(2, 3), b=torch.zeros(2))
    reader = CheckpointReader(tmp_path)
    assert reader.differences([("a", "float32", [2, 3]), ("b", "float32", [2])]) == []
    found = reader.differences([("b", "bfloat16", [3]), ("c", "float32", [])])
    assert found == ["unexpected: a", "shape: b is [2], wanted [3]", "dtype: b is F32, wanted BF16", "missing: c"]


def test_what_cannot_be_written_or_read_is_refused_by_name(tmp_path: Path) -> None:
    """Memory that is not what it has to be, dtypes, and what is not there."""
    writer = CheckpointWriter(tmp_path, "t")
    columns = torch.zeros(4, 4)[:, :2]
    with pytest.raises(ConfigError, match='tensor "w" is not an ordinary, contiguous tensor in host memory'):
        writer.write_part("part", [("w", columns, [4, 2], whole(columns))])
    with pytest.raises(ConfigError, match="complex128, which safetensors cannot hold"):
        writer.write_part("part", [("w", torch.zeros(1, dtype=torch.complex128), [1], ([0], [1], None))])
    with pytest.raises(ShardwrightError, match=r"16 bytes were given for \[0:5\], which has 20"):
        writer.write_part("part", [("w", torch.zeros(4), [5], ([0], [5], None))])
    with pytest.raises(ShardwrightError, match="names no newest checkpoint"):
        CheckpointReader(tmp_path)
    save(tmp_path, "t", w=torch.zeros(8))
    reader = CheckpointReader(tmp_path)
    memory = torch.zeros(8)
    with pytest.raises(ConfigError, match="would go into the same memory"):
        reader.read([("w", memory, ([0], [8], None)), ("w", memory[4:], ([4], [4], None))])
    with pytest.raises(ConfigError, match='tensor "w" was saved as F32 and is wanted as F64'):
        reader.read([("w", torch.zeros(8, dtype=torch.float64), ([0], [8], None))])
    path = tmp_path / "t_partial" / "part-0.safetensors"
    changed = bytearray(path.read_bytes())
    changed[-1] ^= 1
    path.write_bytes(changed)
    with pytest.raises(ShardwrightError, match=r"bytes 0 to \d+ of part-0.safetensors have changed"):
        reader.read([("w", memory, ([0], [8], None))])
    assert len(reader.verify()) == 1


def test_a_part_is_written_in_the_background_out_of_a_copy(tmp_path: Path) -> None:
    """What the tensors held at the call is saved, though they change meanwhile, and the memory serves again."""
    memory = CheckpointMemory()
    tensor = torch.zeros(1 << 20)
    for step in range(3):
        tensor.fill_(step)
        writer = CheckpointWriter(tmp_path, f"step{step}")
        pieces = [("weight", tensor, list(tensor.shape), whole(tensor))]
        part = writer.write_part_in_background("part-0.safetensors", pieces, memory)
        tensor.fill_(-1)
        report = part.wait()
        assert part.is_done
        assert part.wait() == report
        writer.commit(description(), [report])
        into = torch.empty(1 << 20)
        CheckpointReader(tmp_path).read([("weight", into, whole(into))])
        assert torch.equal(into, torch.full_like(into, step))
    memory.free()


def test_a_failure_in_the_background_is_told_by_wait_or_by_the_next_call(tmp_path: Path) -> None:
    """Not lost, and not told twice."""
    memory = CheckpointMemory()
    (tmp_path / "file").write_text("no folder")
    writer = CheckpointWriter(tmp_path / "file", "t")
    tensor = torch.zeros(3)

    def write() -> PartInBackground:
        return writer.write_part_in_background("part", [("weight", tensor, [3], whole(tensor))], memory)

    with pytest.raises(ShardwrightError, match="cannot create"):
        write().wait()
    unheard = write()
    while not unheard.is_done:
        time.sleep(0.001)
    with pytest.raises(ShardwrightError, match="an earlier part of a checkpoint could not be written: cannot create"):
        write()
    (tmp_path / "file").unlink()
    assert json.loads(write().wait())["file"]["name"] == "part"
    with pytest.raises(ShardwrightError, match=r"12 bytes were given for \[0:4\]"):
        writer.write_part_in_background("part", [("weight", tensor, [4], ([0], [4], None))], memory)
