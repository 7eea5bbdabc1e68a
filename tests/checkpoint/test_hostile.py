"""Folders of checkpoints that somebody else has written: nothing but regular files is read, and no link is followed."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import shardwright as smp
import torch
from shardwright._core import CheckpointReader, CheckpointWriter, newest_checkpoint
from shardwright.errors import ShardwrightError

from tests.torn.states import commit, write


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _endless(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def _elsewhere(path: Path) -> None:
    moved = path.parents[2] / f"outside-{path.name}"
    path.rename(moved)
    path.symlink_to(moved)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _large(path: Path) -> None:
    os.truncate(path, 3 << 30)


@pytest.mark.parametrize("name", ["newest", "one_partial/manifest.json", "one_partial/part-0.safetensors"])
@pytest.mark.parametrize("change", [_pipe, _endless, _elsewhere, _folder, _large])
def test_nothing_but_regular_files_of_a_size_is_read(name: str, change: Callable[[Path], None], tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    commit(folder, "one", 0, [write(folder, "one", rank, 0) for rank in range(2)])
    change(folder / name)
    raised: list[BaseException] = []

    def read() -> None:
        try:
            CheckpointReader(folder).verify()
        except ShardwrightError as error:
            raised.append(error)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "it waits for ever"
    assert raised, "it was read"
    assert Path(name).name in str(raised[0])


def test_what_a_file_system_leaves_of_removed_files_is_no_damage(tmp_path: Path) -> None:
    commit(tmp_path, "one", 0, [write(tmp_path, "one", rank, 0) for rank in range(2)])
    (tmp_path / "one_partial" / ".nfs0000000012345").write_bytes(b"left")
    assert CheckpointReader(tmp_path).verify() == []


def test_a_folder_that_is_a_link_is_not_read(tmp_path: Path) -> None:
    commit(tmp_path / "b", "one", 0, [write(tmp_path / "b", "one", rank, 0) for rank in range(2)])
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "one_partial").symlink_to(tmp_path / "b" / "one_partial")
    with pytest.raises(ShardwrightError, match="symbolic link"):
        CheckpointReader(tmp_path / "a", "one")
    CheckpointReader(tmp_path / "b" / "one_partial")


def test_nothing_is_written_through_links(tmp_path: Path) -> None:
    outside, folder = tmp_path / "outside", tmp_path / "checkpoints"
    outside.mkdir()
    folder.mkdir()
    (outside / "precious").write_bytes(b"precious")
    (folder / ".one_partial.writing").symlink_to(outside)
    with pytest.raises(ShardwrightError, match="symbolic link"):
        write(folder, "one", 0, 0)
    (folder / ".one_partial.writing").unlink()
    (folder / ".one_partial.writing").mkdir()
    for name in ("part-0.safetensors", "manifest.json"):
        (folder / ".one_partial.writing" / name).symlink_to(outside / "precious")
    (folder / ".newest.writing").symlink_to(outside / "precious")
    os.link(outside / "precious", folder / ".one_partial.writing" / "part-1.safetensors")
    commit(folder, "one", 0, [write(folder, "one", rank, 0) for rank in range(2)])
    assert [path.name for path in outside.iterdir()] == ["precious"]
    assert (outside / "precious").read_bytes() == b"precious"
    assert newest_checkpoint(folder) == "one"
    assert CheckpointReader(folder).verify() == []


def test_many_pieces_of_a_tensor_are_checked_in_linear_time(tmp_path: Path) -> None:
    """Columns: each of them begins before the first one ends."""
    count = 20_000
    whole = torch.zeros(2, 1)
    writer = CheckpointWriter(tmp_path, "one")
    pieces = [("model/x", whole, [2, count], ([0, column], [2, 1], None)) for column in range(count)]
    report = writer.write_part("part-0.safetensors", pieces)
    description = (
        '{"library_version": "0", "step": null, "partition": [], "aliases": [], "user_content": null, "degrees": '
        '{"pipeline": 1, "tensor": 1, "reduced_data": 1, "optimizer_sharding": 1, "sharded_data": 1}}'
    )
    writer.commit(description, [report])
    began = time.process_time()
    CheckpointReader(tmp_path)
    assert time.process_time() - began < 3


@pytest.mark.parametrize("change", [_pipe, _endless, _folder])
def test_a_file_of_a_value_is_a_regular_file(change: Callable[[Path], None], tmp_path: Path) -> None:
    path = tmp_path / "value"
    path.touch()
    change(path)
    raised: list[BaseException] = []

    def read() -> None:
        try:
            smp.load(str(path), partial=False)
        except smp.CheckpointError as error:
            raised.append(error)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(60)
    assert "cannot read" in str(raised)


@pytest.mark.parametrize(
    "about",
    [
        {"dtype": "F32", "shape": [1 << 62], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [0, 1 << 70], "data_offsets": [0, 0]},
        {"dtype": "F32", "shape": "x", "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [0, 1 << 70]},
        {"dtype": [], "shape": [1], "data_offsets": [0, 4]},
    ],
)
@pytest.mark.parametrize("metadata", [{}, {"shardwright": "{"}, {"shardwright": 3}, []])
def test_a_header_that_makes_no_sense_is_refused(about: Any, metadata: Any, tmp_path: Path) -> None:
    text = json.dumps({"__metadata__": metadata, "x": about}).encode()
    (tmp_path / "value").write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
    with pytest.raises(smp.CheckpointError, match="is damaged"):
        smp.load(str(tmp_path / "value"), partial=False)
