"""The back end of collectives is chosen by the devices of all ranks; what cannot work is refused on all of them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from shardwright import process_groups
from shardwright.config import load_config
from shardwright.errors import ConfigError

from tests.jobs.ranks import outputs_of_ranks

PROGRAM = Path(__file__).with_name("back_ends.py")
NCCL = "cpu:gloo,cuda:nccl"


@pytest.fixture(scope="module")
def starts() -> dict[str, list[dict[str, Any]]]:
    """What each of three ranks said of each start."""
    said: dict[str, list[dict[str, Any]]] = {}
    for out in outputs_of_ranks(PROGRAM, ranks=3):
        for line in out.splitlines():
            found = json.loads(line)
            said.setdefault(found.pop("name"), []).append(found)
    return said


@pytest.mark.parametrize(
    ("name", "back_end"),
    [
        ("a device each", NCCL),
        ("a device each, nccl", NCCL),
        ("a device shared", "gloo"),
        ("a device each, gloo", "gloo"),
        ("one without, gloo", "gloo"),
        ("processors", "gloo"),
    ],
)
def test_all_ranks_choose_one_back_end(starts: dict[str, list[dict[str, Any]]], name: str, back_end: str) -> None:
    assert [each["calls"] for each in starts[name]] == [[back_end]] * 3
    if back_end == "gloo":
        assert [each["total"] for each in starts[name]] == [[3, 3]] * 3
    else:
        assert all(each["device_id"] == "cpu" for each in starts[name])  # the device of ranks here


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("one without", "rank 2 has no GPU and ranks 0, 1 have a GPU"),
        ("a device shared, nccl", 'ranks 0, 2 of host "a" share the device GPU-0'),
        ("processors, nccl", "ranks 0, 1, 2 have no GPU"),
    ],
)
def test_what_cannot_work_is_refused_on_all_ranks_alike(
    starts: dict[str, list[dict[str, Any]]], name: str, words: str
) -> None:
    (text,) = {each["refused"] for each in starts[name]}
    assert words in text


class FakeCuda:
    """CUDA with some devices, of which each rank has been given those that it sees."""

    def __init__(self, uuids: list[str], initialized: bool = False, current: int = 0) -> None:
        self._uuids, self._initialized, self._current = uuids, initialized, current

    def is_available(self) -> bool:
        return bool(self._uuids)

    def is_initialized(self) -> bool:
        return self._initialized

    def device_count(self) -> int:
        return len(self._uuids)

    def current_device(self) -> int:
        return self._current

    def set_device(self, device: int) -> None:
        self._initialized, self._current = True, device

    def get_device_properties(self, device: torch.device) -> Any:
        bus = int(self._uuids[device.index].split("-")[1])
        return SimpleNamespace(uuid=self._uuids[device.index], pci_domain_id=0, pci_bus_id=bus, pci_device_id=0)


def told(cuda: FakeCuda, local_rank: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    for name in ("is_available", "is_initialized", "device_count", "current_device", "set_device"):
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    monkeypatch.setattr(torch.cuda, "get_device_properties", cuda.get_device_properties)
    process_groups.take_device(SimpleNamespace(local_rank=local_rank))  # type: ignore[arg-type]
    device = torch.device("cuda", cuda.current_device()) if cuda.is_available() else torch.device("cpu")
    facts: dict[str, Any] = json.loads(process_groups.own_facts(SimpleNamespace(device=device)))  # type: ignore[arg-type]
    return facts


@pytest.mark.parametrize("local_rank", [0, 1])
def test_a_rank_tells_the_uuid_of_its_own_device(local_rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def uuid(cuda: FakeCuda) -> Any:
        return told(cuda, local_rank, monkeypatch)["device"]

    # All devices are visible and the script has chosen none, as in scripts that choose after smp.init.
    assert uuid(FakeCuda(["GPU-3", "GPU-4"])) == ["GPU-3", "GPU-4"][local_rank]
    # One device is visible (CUDA_VISIBLE_DEVICES): both ranks call it device 0.
    assert uuid(FakeCuda([["GPU-3", "GPU-4"][local_rank]])) == ["GPU-3", "GPU-4"][local_rank]
    # The script has chosen.
    assert uuid(FakeCuda(["GPU-3", "GPU-4"], initialized=True, current=0)) == "GPU-3"
    assert uuid(FakeCuda(["GPU-3", "GPU-4"], initialized=True, current=1)) == "GPU-4"
    # More ranks than devices.
    assert uuid(FakeCuda(["GPU-3"])) == "GPU-3"
    assert uuid(FakeCuda([])) is None


def test_what_needs_groups_of_ranks_needs_ddp() -> None:
    with pytest.raises(ConfigError, match='"tensor_parallel_degree" is 2, which needs "ddp" to be true'):
        load_config({"tensor_parallel_degree": 2}, {}, {}, 2)
