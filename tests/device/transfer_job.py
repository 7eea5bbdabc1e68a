"""One of two ranks that send tensors of a device to and fro; on CUDA, or on the stand-in for its driver."""

from __future__ import annotations

import ctypes
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from shardwright import _core
from shardwright.config import load_config
from shardwright.values import pack, registry, unpack

from tests.jobs.patience import HANG_SECONDS

WAIT = HANG_SECONDS
SIZES = (3, 4_000, 300_000)


class Cuda:
    """Tensors of a GPU; the two ranks share one where there is only one."""

    def __init__(self, rank: int) -> None:
        self.options: dict[str, Any] = {}
        torch.cuda.set_device(rank % torch.cuda.device_count())

    def make(self, size: int, value: float) -> torch.Tensor:
        return torch.full((size,), float(value), device="cuda")

    def count(self, what: str) -> int:
        return 0  # the driver does not tell

    def pack(self, tensors: list[torch.Tensor]) -> Any:
        return pack(tensors, [False] * len(tensors))

    def unpack(self, parts: Any) -> list[torch.Tensor]:
        return unpack(parts)


class Rehearsed:
    """Host tensors, whose memory the stand-in takes for a device's."""

    def __init__(self, library: str) -> None:
        self.options = {"cuda_library": library}
        self.library = ctypes.CDLL(library)
        # Copies come late, and nothing may be freed before.
        self.kept: list[torch.Tensor] = []

    def make(self, size: int, value: float) -> torch.Tensor:
        self.kept.append(torch.full((size,), float(value)))
        return self.kept[-1]

    def count(self, what: str) -> int:
        function = getattr(self.library, what)
        function.restype = ctypes.c_uint64
        return int(function())

    def pack(self, tensors: list[torch.Tensor]) -> Any:
        parts = _core.TensorParts()
        for tensor in tensors:
            address, shape, strides = tensor.data_ptr(), tensor.shape, tensor.stride()
            place = {"ordinal": 0, "stream": 0}
            if not parts.append_device(address, tensor.nbytes, "float32", shape, strides, False, **place):
                raise RuntimeError("the device takes no tensors")
        return parts

    def unpack(self, parts: Any) -> list[torch.Tensor]:
        tensors = []
        for index in range(len(parts)):
            _, shape, _, device, _ = parts.meta(index)
            assert device == "cuda"
            tensor = self.make(shape[0], 0.0)
            if not parts.take_into_device(index, tensor.data_ptr(), ordinal=0, stream=0):
                raise RuntimeError("the device takes no tensors")
            tensors.append(tensor)
        # Behind the copies, on their stream: they are done when this can be read.
        behind = self.pack([self.make(1, 7.0)])
        assert behind.take_tensor(0).tolist() == [7.0]
        return tensors


def connect(rank: int, port: int, options: dict[str, Any], tell: Callable[[int], Any]) -> Any:
    if rank == 0:
        place = _core.Rendezvous.listen("127.0.0.1", b"the secret of the test")
        tell(place.port)
    else:
        place = _core.Rendezvous.at("127.0.0.1", port, b"the secret of the test")
    cfg = load_config({"transport": "shared_memory", "comm_spin_microseconds": 50}, {}, {})
    environ = {"SMP_D2D_GPU_BUFFER_SIZE_BYTES": str(32 << 20)}
    return _core.Node.connect(
        rank=rank,
        world=2,
        place=place,
        fingerprint="",
        version="1",
        connect_timeout=WAIT,
        liveness_timeout=WAIT,
        bind_address="127.0.0.1",
        host_name="host",
        buffer_bytes=64 << 20,
        options=_core.CommOptions(cfg, environ, 2, [], one_host=True, **options),
    )


def say(port: int) -> None:
    print(port, flush=True)


def exchange(rank: int, port: int, library: str, rounds: int, tell: Callable[[int], Any] = say) -> dict[str, Any]:
    """Be a rank; what it counted. Rank 0 tells its port, which rank 1 is given."""
    device: Any = Rehearsed(library) if library else Cuda(rank)
    node = connect(rank, port, device.options, tell)
    print("joined", flush=True)
    if rounds == 0 or not library:  # both begin to use their devices, and on GPUs open each other's before they send
        node.use_device(0 if library else torch.cuda.current_device())
        deadline = time.monotonic() + WAIT
        while node.comm_stats()["peers"][1 - rank]["devices"] == "not used" and time.monotonic() < deadline:
            time.sleep(0.01)
        node.barrier([0, 1], "both have tried", WAIT)

    def send(tensors: list[torch.Tensor]) -> None:
        spec, _ = _core.flatten(tensors, registry)
        node.send_object(1 - rank, "c", spec, device.pack(tensors))

    def receive(value: float) -> list[torch.Tensor]:
        received = node.recv_object(1 - rank, "c", WAIT)
        assert received is not None, "nothing came"
        tensors = device.unpack(received[1])
        for tensor, size in zip(tensors, SIZES, strict=True):
            assert tensor.shape == (size,)
            assert bool((tensor == value).all()), f"{tensor} is not {value}"
        return tensors

    for number in range(rounds):
        if rank == 0:
            send([device.make(size, number) for size in SIZES])
            receive(number + 0.5)
        else:
            receive(number)
            send([device.make(size, number + 0.5) for size in SIZES])
    devices = node.comm_stats()["peers"][1 - rank]["devices"]
    locked = device.count("rehearsal_registered_bytes")
    node.barrier([0, 1], "nobody has left before", WAIT)
    # What waits for the device leaves before the end.
    node.close()
    stats = node.comm_stats()
    left = device.count("rehearsal_held")
    said = [text for _, text in _core.take_log()]
    result = {"routes": stats["routes"], "fallbacks": stats["fallbacks"], "devices": devices, "said": said}
    return {**result, "locked": locked, "left": left}


if __name__ == "__main__":
    print(json.dumps(exchange(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))), flush=True)
