"""Errors quote files, stores and arguments, of any length."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from shardwright._core import CheckpointReader, Timeline, newest_checkpoint
from shardwright.checkpoints.file import read_value
from shardwright.command import main
from shardwright.errors import ConfigError, RemoteError, ShardwrightError, UnsupportedValueError
from shardwright.half_precision.loss_scaler import scaler_of
from shardwright.safe_repr import bounded

LONG = "x" * 100_000
#: Two lines of quotes, and what stands around them.
MOST = 4100


def test_a_long_line_keeps_its_beginning_and_its_end() -> None:
    told = bounded(f"cannot read {LONG}: it is gone\nand {LONG}!\nthe end")
    first, second, third = told.split("\n")
    assert first.startswith("cannot read xxx")
    assert first.endswith("xxx: it is gone")
    assert "... (100024 characters) ..." in first
    assert max(len(first), len(second)) < MOST
    assert (second[0], second[-1], third) == ("a", "!", "the end")
    for text in ("", "x" * 4000, f"{'y' * 3000}\n" * 3):
        assert bounded(text) == text


def test_every_error_is_bounded() -> None:
    for kind in (ShardwrightError, ConfigError, UnsupportedValueError):
        assert len(str(kind(LONG))) < MOST
    assert len(str(RemoteError(0, "host", LONG, None, None, "KeyError", LONG, "a traceback"))) < 2 * MOST


def test_what_files_and_arguments_hold_is_bounded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    header = b'{"a": {"dtype": "%s", "shape": [1], "data_offsets": [0, 4]}}' % LONG.encode()
    (tmp_path / "a").write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 4)
    (tmp_path / "newest").write_text(LONG)
    trace = json.dumps({"records": [{"rank": 0, "step": 0, "kind": LONG, "start_ns": 0, "end_ns": 0}], "lost": 0})
    for ask in (
        lambda: read_value("smp.load", str(tmp_path / "a")),
        lambda: CheckpointReader(LONG),
        lambda: CheckpointReader(tmp_path, LONG),
        lambda: newest_checkpoint(f"s3://{LONG}/a b"),
        lambda: Timeline.from_json(trace),
    ):
        with pytest.raises((ShardwrightError, ValueError)) as caught:
            ask()
        assert len(str(caught.value)) < MOST
        assert "\n" not in str(caught.value)
    for arguments in [[LONG], ["checkpoint", "show", LONG], ["simulate", "--program", LONG], ["trace", "show", LONG]]:
        assert main(arguments) == 2
        assert len(capsys.readouterr().err) < MOST


@pytest.mark.parametrize("name", ["scale_window", "delayed_shift", "init_scale"])
@pytest.mark.parametrize("value", [-1, 2**64, 10**400, 10**6000], ids=lambda value: f"{value.bit_length()} bits")
def test_integers_of_any_size_are_named(name: str, value: int) -> None:
    if name == "init_scale" and value == 2**64:
        assert scaler_of(None, True, {name: value}, is_float16=True).loss_scale == 2**64
        return
    with pytest.raises(ConfigError, match=f"{name}.*allowed|init_scale"):
        scaler_of(None, True, {name: value}, is_float16=True)
