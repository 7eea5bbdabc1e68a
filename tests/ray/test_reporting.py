"""A checkpoint is saved by all ranks, reported once by the first, and found by all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.ranks import outputs_of_ranks


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("storage")
    outputs = outputs_of_ranks(Path(__file__).with_name("reported.py"), str(folder))
    return [json.loads(one.splitlines()[-1]) for one in outputs]


def test_all_ranks_save_under_the_name_of_the_first_which_alone_reports_it(found: list[dict[str, Any]]) -> None:
    assert [one["name"] for one in found] == ["checkpoint_0_1"] * 2
    assert [one["checkpoint"] for one in found] == ["checkpoint_0_1", None]
    assert all(one["is there"] for one in found)
    assert [one["mode"] for one in found] == ["as it is"] * 2
    assert [one["metrics"] for one in found] == [{"loss": 1.0}] * 2


def test_a_report_returns_once_it_is_noted(found: list[dict[str, Any]]) -> None:
    assert [one["then"] for one in found] == [{"consistency_mode": "noted"}] * 2


def test_all_ranks_go_on_from_what_was_reported(found: list[dict[str, Any]]) -> None:
    assert [one["none"] for one in found] == [None] * 2
    assert [one["content"] for one in found] == [{"step": 1}] * 2
    assert all(one["goes on alike"] for one in found)


def test_a_storage_that_is_neither_a_folder_nor_s3_is_refused(found: list[dict[str, Any]]) -> None:
    assert all("a file system of the kind 'gcs'; allowed: a folder" in one["other storage"] for one in found)
