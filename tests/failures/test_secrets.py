"""Secrets that are none are refused at the door, by every rank, in words that say what is allowed."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from shardwright.rendezvous import given_secret

from tests.failures.test_start import ranks_of, refused


def test_a_secret_file_of_another_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may give a file away")
    path = tmp_path / "secret"
    path.write_text("the secret of the test")
    path.chmod(0o600)
    os.chown(path, 65534, 65534)
    text = refused(monkeypatch, ranks_of(2), pipeline_parallel_degree=2, secret_file=str(path))
    assert "belongs to user 65534; it has to belong to user 0" in text


@pytest.mark.parametrize(
    ("mode", "content", "expected"),
    [
        (0o644, "the secret of the test", "0644"),
        (0o600, "", "is blank; a secret has 16 or more bytes"),
        (0o600, " \n\t" * 20, "is blank; a secret has 16 or more bytes"),
        (0o600, "  fifteen bytes..\n", "has 15 bytes; a secret has 16 or more"),
        (0o600, "s" * 70_000, "has more than the 65536 bytes that are allowed"),
    ],
)
def test_a_secret_file_that_cannot_be_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mode: int, content: str, expected: str
) -> None:
    path = tmp_path / "secret"
    path.write_text(content)
    path.chmod(mode)
    text = refused(monkeypatch, ranks_of(2), pipeline_parallel_degree=2, secret_file=str(path))
    assert str(path) in text
    assert expected in text


def test_a_secret_file_that_is_a_pipe_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    text = refused(monkeypatch, ranks_of(2), pipeline_parallel_degree=2, secret_file=str(tmp_path / "pipe"))
    assert "it is no regular file" in text


@pytest.mark.parametrize("secret", ["", " ", "\n", " " * 40, "x", "fifteen bytes..", "  " + "x" * 15 + "  "])
@pytest.mark.parametrize("hosts", [1, 2])
def test_a_secret_that_can_be_guessed_is_refused_by_every_rank(
    monkeypatch: pytest.MonkeyPatch, secret: str, hosts: int
) -> None:
    for rank in range(2):
        given = ranks_of(2, RANK=str(rank), LOCAL_RANK="0", LOCAL_WORLD_SIZE=str(2 // hosts), SHARDWRIGHT_SECRET=secret)
        text = refused(monkeypatch, given, pipeline_parallel_degree=2, allow_insecure_hosts=True)
        why = f"has {len(secret.strip())} bytes; a secret has 16 or more" if secret.strip() else "is blank"
        assert f"rank {rank}: SHARDWRIGHT_SECRET {why}" in text
        assert secret.strip() not in text.replace("SHARDWRIGHT_SECRET", "").split(": ") or not secret.strip()


def test_a_secret_that_is_no_text_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWRIGHT_SECRET", os.fsdecode(b"\xff" * 16))
    assert given_secret(SimpleNamespace(rank=0), SimpleNamespace()) == b"\xff" * 16


def test_a_secret_file_that_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = str(tmp_path / "nowhere")
    assert path in refused(monkeypatch, ranks_of(2), pipeline_parallel_degree=2, secret_file=path)
