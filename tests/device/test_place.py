"""Which device a rank has, on fakes of several GPUs."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from shardwright.errors import ConfigError
from shardwright.execution.worker import WorkerPool
from shardwright.process_groups import take_device

from tests.jobs.patience import HANG_SECONDS
from tests.jobs.runtimes import make_runtime


class _Devices:
    """A host's GPUs; each thread begins with the first one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
        self._threads = threading.local()
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: hasattr(self._threads, "current"))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "current_device", self.current)
        monkeypatch.setattr(torch.cuda, "set_device", self.set)

    def current(self) -> int:
        return getattr(self._threads, "current", 0)

    def set(self, device: torch.device | int) -> None:
        self._threads.current = device if isinstance(device, int) else device.index


@pytest.mark.parametrize(
    ("count", "before", "rank", "expected"),
    [(4, None, 3, 3), (4, 2, 3, 2), (4, 0, 3, 0), (1, None, 3, 0), (2, None, 3, 1), (4, None, 0, 0)],
    ids=["by local rank", "as set before", "the first, as set before", "one visible for each", "shared", "the first"],
)
def test_a_rank_has_the_device_that_the_script_has_set_or_one_by_its_local_rank(
    monkeypatch: pytest.MonkeyPatch, count: int, before: int | None, rank: int, expected: int
) -> None:
    devices = _Devices(monkeypatch, count)
    if before is not None:
        devices.set(before)
    place = make_runtime(rank, 4).place
    take_device(place.launch)
    place.make_device_current()
    assert place.device == torch.device("cuda", expected)
    assert devices.current() == expected


def test_the_device_is_the_same_in_all_threads_and_whatever_the_script_sets_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    devices = _Devices(monkeypatch, 4)
    place = make_runtime(2, 4).place
    take_device(place.launch)
    place.make_device_current()
    found: list[torch.device] = []
    thread = threading.Thread(target=lambda: found.append(place.device))
    thread.start()
    thread.join()
    devices.set(1)
    assert [*found, place.device] == [torch.device("cuda", 2)] * 2


def test_threads_that_run_modules_compute_on_the_ranks_device(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = _Devices(monkeypatch, 4)
    found: list[int] = []

    class Server:
        def next_task(self, _: int) -> None:
            found.append(devices.current())

    server: Any = Server()
    runtime = make_runtime(3, 4, server=server)
    take_device(runtime.place.launch)
    runtime.place.make_device_current()
    pool = WorkerPool(runtime)
    pool.start(0)
    pool.join(HANG_SECONDS)
    assert found == [3]


def test_another_device_that_is_current_when_the_model_is_made_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = _Devices(monkeypatch, 4)
    place = make_runtime(2, 4).place
    take_device(place.launch)
    place.make_device_current()
    place.check_device()
    devices.set(1)
    with pytest.raises(ConfigError, match=r"rank 2 is cuda:1, but smp\.init has given it cuda:2: .* before smp\.init"):
        place.check_device()


def test_without_a_gpu_the_device_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    place = make_runtime(1, 4).place
    place.make_device_current()
    place.check_device()
    assert place.device == torch.device("cpu")
