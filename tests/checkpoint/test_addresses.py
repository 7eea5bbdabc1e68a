"""Addresses of other stores: none is taken as a folder."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import shardwright as smp
from shardwright import _core, command
from shardwright.errors import ShardwrightError

from tests.checkpoint.test_bindings import save

ADDRESSES = ["S3://b/x", "s3a://b/x", "gs://b/x", "http://127.0.0.1:9/x", "file:///x", Path("gs://b/x"), ""]


def asks(path: Any) -> list[Callable[[], Any]]:
    """All that take the place of a checkpoint, beside what needs a job."""
    return [
        lambda: _core.CheckpointWriter(path, "t"),
        lambda: _core.CheckpointReader(path, "t"),
        lambda: _core.newest_checkpoint(path),
        lambda: _core.set_newest_checkpoint(path, "t"),
        lambda: _core.is_in_store(path),
        lambda: smp.import_torch_checkpoint(path, "there", "t"),
        lambda: smp.import_torch_checkpoint("here", path, "t"),
        lambda: smp.export_torch_checkpoint(path, "there", tag="t"),
        lambda: smp.export_torch_checkpoint("here", path, tag="t"),
        lambda: smp.trace(path).__enter__(),
    ]


@pytest.mark.parametrize("path", ADDRESSES, ids=str)
def test_no_address_of_another_kind_is_taken_as_a_folder(
    path: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for ask in asks(path):
        with pytest.raises(ShardwrightError, match=r"is not taken as a folder: .* and s3://BUCKET/PREFIX") as caught:
            ask()
        assert json.dumps(str(path)) in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", ADDRESSES[:-1], ids=str)
def test_no_verb_takes_one_either(
    path: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "here", "t")
    text = os.fspath(path)
    for arguments in [
        ["ls", text],
        ["show", text],
        ["verify", text],
        ["diff", text, "here"],
        ["diff", "here", text],
        ["export", text, "--full", "out"],
        ["reshard", text, "out", "--ranks", "2"],
        ["reshard", "here", text, "--ranks", "2"],
        ["import", text, "out"],
    ]:
        status = command.main(["checkpoint", *arguments])
        output, complaint = capsys.readouterr()
        assert (status, output) == (2, ""), arguments
        assert "is not taken as a folder" in complaint
        assert complaint.count("\n") == 1
    assert [one.name for one in tmp_path.iterdir()] == ["here"]


def test_a_folder_whose_name_has_a_colon_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path in ("./gs:/x", "at 12:30", "c:/x", tmp_path / "gs:"):
        save(Path(path) if isinstance(path, Path) else path, "t")  # type: ignore[arg-type]
        assert _core.newest_checkpoint(path) == "t"
