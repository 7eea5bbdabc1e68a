"""What the driver does between two processes on one device, on which the library's transfers rely."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore

from tools.gpu_day.driver import Driver, DriverError
from tools.gpu_day.options import Options
from tools.gpu_day.ranks import results_of_ranks

_WAIT = timedelta(seconds=30)
_QUERIES = 10_000
_SUCCESS = "CUDA_SUCCESS"
_OFFSET = 4096


def _store() -> TCPStore:
    """Where both processes tell one another things."""
    rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
    return TCPStore("127.0.0.1", port, 2, is_master=rank == 0, timeout=_WAIT)


def _rate(driver: Driver, to: int, source: int, size: int, times: int = 8) -> float:
    """The rate of copies, in GB/s."""
    stream, event = driver.stream(), driver.event()
    driver.copy(to, source, size, stream)
    driver.wait(event, stream)
    began = time.perf_counter()
    for _ in range(times):
        driver.copy(to, source, size, stream)
    driver.wait(event, stream)
    rate = times * size / (time.perf_counter() - began) / 1e9
    driver.check("cuEventDestroy_v2", event)
    driver.check("cuStreamDestroy_v2", stream)
    return rate


def _registered(driver: Driver, path: str, size: int, device: int) -> dict[str, Any]:
    """Map a memory file, lock the mapping, and copy from it to a device."""
    with Path(path).open("r+b") as file:
        mapped = mmap.mmap(file.fileno(), size)
    start = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
    found: dict[str, Any] = {"register": driver.register(start, size)}
    found["register_again"] = driver.register(start, size)
    found["to_device_gb_s"] = _rate(driver, device, start, size)
    found["to_host_gb_s"] = _rate(driver, start, device, size)
    found["unregister"] = driver.unregister(start)
    found["register_half"] = driver.register(start + size // 2, size // 2)
    found["unregister_half"] = driver.unregister(start + size // 2)
    return found


def between_two(options: Options) -> dict[str, Any]:
    """One of two processes: rank 0 has memory that rank 1 opens."""
    driver, store = Driver(options.rehearsal), _store()
    size = 1 << 20 if options.tiny else 256 << 20
    own, scratch = driver.allocate(size), driver.allocate(size)  # the other reads what is in the first
    host = (ctypes.c_char * size)()
    rank = int(os.environ["RANK"])
    found: dict[str, Any] = {}
    stream, event = driver.stream(), driver.event()
    if rank == 0:
        ctypes.memset(host, 7, size)
        driver.copy(own, ctypes.addressof(host), size, stream)
        driver.wait(event, stream)
        found["range_of_own"] = driver.range(own + _OFFSET) == (own, size)
        found["handle_of_a_part_is_that_of_the_whole"] = _outcome(
            lambda: driver.share(own + _OFFSET) == driver.share(own)
        )
        shared = os.memfd_create("gpu-day")
        os.ftruncate(shared, size)
        store.set("file", f"/proc/{os.getpid()}/fd/{shared}")
        store.set("handle", driver.share(own).hex())
        found["opened_by_its_owner"] = _outcome(lambda: driver.close(driver.open(driver.share(own))))
    else:
        opened = driver.open(bytes.fromhex(store.get("handle").decode()))
        found["range_of_opened"] = driver.range(opened + _OFFSET) == (opened, size)
        found["range_of_opened_size"] = driver.range(opened + _OFFSET)[1]
        found["read_gb_s"] = _rate(driver, own, opened, size)
        driver.copy(ctypes.addressof(host), own, size, stream)
        driver.wait(event, stream)
        found["bytes_arrived"] = host.raw == b"\7" * size
        found["opened_twice_is_at_one_address"] = _outcome(lambda: _open_again(driver, store) == opened)
        found["closed"] = _outcome(lambda: driver.close(opened))
        found["closed_once_more"] = _outcome(lambda: driver.close(opened))
    found |= {
        f"memfd_{name}": value for name, value in _registered(driver, store.get("file").decode(), size, scratch).items()
    }
    found |= _polling(driver, scratch, size // 2)
    store.set(f"done {rank}", "")
    store.wait([f"done {1 - rank}"])  # nobody frees what the other has open, and nobody leaves before the store's owner
    driver.free(own)
    driver.free(scratch)
    store.set(f"freed {rank}", "")
    if rank == 0:
        store.wait(["freed 1"])
    return found


def _open_again(driver: Driver, store: TCPStore) -> int:
    """Open the other's memory, which is open, and close it; where it was."""
    address = driver.open(bytes.fromhex(store.get("handle").decode()))
    driver.close(address)
    return address


def _outcome(work: Any) -> str:
    """What comes of something that may fail, in words."""
    try:
        return str(work())
    except DriverError as error:
        return str(error)


def _polling(driver: Driver, device: int, size: int) -> dict[str, float]:
    """What one question to an event costs, in microseconds: before it is reached, and after."""
    stream, event = driver.stream(), driver.event()
    for _ in range(4):
        driver.copy(device + size, device, size, stream)
    began = time.perf_counter()
    asked = driver.wait(event, stream)
    waiting = time.perf_counter() - began
    began = time.perf_counter()
    for _ in range(_QUERIES):
        driver.call("cuEventQuery", event)
    reached = time.perf_counter() - began
    return {"query_waiting_us": 1e6 * waiting / asked, "query_reached_us": 1e6 * reached / _QUERIES}


def of_torch(options: Options) -> dict[str, Any]:
    """What the driver says of memory of torch's allocator, of which every tensor is a part."""
    tensor = torch.ones(1 << 20, device=options.device)
    if options.device == "cuda":
        torch.cuda.synchronize()
    driver, address = Driver(options.rehearsal), tensor.data_ptr()
    into = driver.allocate(tensor.nbytes)
    found = {
        "range": _outcome(lambda: driver.range(address)[1]),
        "share": _outcome(lambda: len(driver.share(driver.range(address)[0]))),
        "copy_gb_s": _rate(driver, into, address, tensor.nbytes),
    }
    driver.free(into)
    return found


def run(options: Options) -> dict[str, Any]:
    """Find out; it passes if what the library relies on is so."""
    first, second = results_of_ranks(between_two, options, seconds=30)
    found: dict[str, Any] = {f"owner_{name}": value for name, value in first.items()}
    found |= {f"other_{name}": value for name, value in second.items()}
    for name, setting in (("torch", "expandable_segments:False"), ("expandable", "expandable_segments:True")):
        (said,) = results_of_ranks(
            of_torch,
            options,
            1,
            seconds=20,
            environment={"PYTORCH_CUDA_ALLOC_CONF": setting, "PYTORCH_ALLOC_CONF": setting},
        )
        found |= {f"{name}_{key}": value for key, value in said.items()}
    relied_on = [found["owner_range_of_own"], found["other_range_of_opened"], found["other_bytes_arrived"]]
    for side in ("owner", "other"):
        relied_on += [found[f"{side}_memfd_{call}"] == _SUCCESS for call in ("register", "unregister", "register_half")]
    return {"passed": all(relied_on), **found}
