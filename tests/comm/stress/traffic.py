"""What one rank of the stress test does: several threads send to all others, one for each other rank receives.

Every message says which thread sent it, its number among those of that thread to this receiver, and a checksum. So
the receiver sees what was lost, came twice, was damaged or was overtaken. At most ``WINDOW`` messages of a pair are on
their way; receivers acknowledge, so that memory has a bound although sending never waits.
"""

from __future__ import annotations

import math
import random
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import shardwright as smp
import torch
from shardwright.errors import PeerLostError, ShardwrightError
from shardwright.job.ranks import RankType

from tests.jobs.patience import HANG_SECONDS

WORLD_RANK = RankType.WORLD_RANK
THREADS = 3
WINDOW = 128
ACKNOWLEDGED = 32
#: Sizes in bytes, with the share of messages that are at most so large.
SIZES = ((1 << 10, 0.7), (32 << 10, 0.25), (256 << 10, 0.0495), (4 << 20, 0.0005))
MAX = 4 << 20


class Window:
    """How many messages to one receiver are on their way."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._open = WINDOW

    def take(self, goes_on: Callable[[], bool]) -> bool:
        """Wait for a place; false when there is none any more."""
        deadline = time.monotonic() + HANG_SECONDS
        with self._changed:
            while self._open == 0:
                if not goes_on() or time.monotonic() > deadline:
                    return False
                self._changed.wait(0.2)
            self._open -= 1
        return goes_on()

    def give(self, places: int) -> None:
        with self._changed:
            self._open += places
            self._changed.notify_all()


class Traffic:
    """The threads of one rank, and what they counted."""

    def __init__(self, seed: int, messages: int, until: float) -> None:
        self._others = [rank for rank in range(smp.size()) if rank != smp.rank()]
        self._seed = seed
        self._quota = math.ceil(messages / (smp.size() * THREADS))
        self._until = until
        self._material = random.Random(7).randbytes(2 * MAX)
        self._windows = {rank: Window() for rank in self._others}
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()
        #: The first rank that was found lost, and the words.
        self.loss: tuple[int, str, float] | None = None
        self._failed = threading.Event()
        self._threads = [
            threading.Thread(target=self._guarded, args=(work, argument), daemon=True)
            for work, arguments in ((self._send_all, range(THREADS)), (self._receive_all, self._others))
            for argument in arguments
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def join(self, sample: Callable[[], None]) -> bool:
        """Wait until all threads have ended, looking at something every second; false when one failed or hangs."""
        progress, deadline = -1, 0.0
        while any(thread.is_alive() for thread in self._threads) and not self._failed.is_set():
            for thread in self._threads:
                thread.join(1.0 / len(self._threads))
            sample()
            if progress != (progress := sum(self.counts.values())):
                deadline = time.monotonic() + 2 * HANG_SECONDS
            elif time.monotonic() > deadline:
                return False
        return not self._failed.is_set()

    def await_loss(self, seconds: float) -> None:
        """Wait until a thread has found a rank lost."""
        self._failed.wait(seconds)

    def _guarded(self, work: Callable[[int], None], argument: int) -> None:
        try:
            work(argument)
        except PeerLostError as error:
            with self._lock:
                if self.loss is None:
                    self.loss = (error.rank if error.rank is not None else -1, str(error), time.monotonic())
            self._failed.set()
        except BaseException as error:
            if self._failed.is_set() and isinstance(error, ShardwrightError):
                return  # this rank leaves the job
            self._failed.set()
            raise

    def _goes_on(self) -> bool:
        return not self._failed.is_set()

    def _count(self, **changes: int) -> None:
        with self._lock:
            self.counts.update(changes)

    def _send_all(self, thread: int) -> None:
        draw = random.Random(f"{self._seed} {smp.rank()} {thread}")
        numbers = dict.fromkeys(self._others, 0)
        sent = 0
        while sent < self._quota or time.monotonic() < self._until:
            receiver = draw.choice(self._others)
            if not self._windows[receiver].take(self._goes_on):
                self._failed.set()
                return
            message = {"thread": thread, "number": numbers[receiver], **self._payload(draw)}
            smp.send(message, receiver, WORLD_RANK)
            numbers[receiver] += 1
            sent += 1
            self._count(sent=1)
        for receiver in self._others:
            smp.send({"thread": thread, "end": numbers[receiver]}, receiver, WORLD_RANK)

    def _payload(self, draw: random.Random) -> dict[str, Any]:
        (largest,) = draw.choices([size for size, _ in SIZES], [share for _, share in SIZES])
        size = largest if largest == MAX else draw.randint(0, largest)
        begin = draw.randint(0, MAX)
        content = self._material[begin : begin + size]
        checksum = zlib.crc32(content)
        if draw.random() < 0.5:
            return {"checksum": checksum, "bytes": content}
        tensor = torch.frombuffer(bytearray(content), dtype=torch.uint8) if size else torch.empty(0, dtype=torch.uint8)
        return {"checksum": checksum, "tensors": [tensor[: size // 2], (tensor[size // 2 :],)]}

    def _receive_all(self, source: int) -> None:
        expected = [0] * THREADS
        ends: dict[int, int] = {}
        unacknowledged = 0
        all_sent = False
        while len(ends) < THREADS or not all_sent:
            message = smp.recv_from(source, WORLD_RANK)
            if "acknowledged" in message:
                self._windows[source].give(message["acknowledged"])
                all_sent = message["all"]
                continue
            thread = message["thread"]
            if "end" in message:
                ends[thread] = message["end"]
                if len(ends) == THREADS:
                    self._acknowledge(source, unacknowledged, last=True)
                continue
            self._check(message, expected)
            unacknowledged += 1
            if unacknowledged == ACKNOWLEDGED:
                self._acknowledge(source, unacknowledged, last=False)
                unacknowledged = 0
        self._count(lost=sum(max(0, end - expected[thread]) for thread, end in ends.items()))

    def _acknowledge(self, source: int, number: int, last: bool) -> None:
        smp.send({"acknowledged": number, "all": last}, source, WORLD_RANK)

    def _check(self, message: dict[str, Any], expected: list[int]) -> None:
        thread, number = message["thread"], message["number"]
        if "bytes" in message:
            content = message["bytes"]
        else:
            first, (second,) = message["tensors"]
            content = torch.cat([first, second]).numpy().tobytes()
        late = number < expected[thread]
        self._count(
            received=1,
            damaged=int(zlib.crc32(content) != message["checksum"]),
            reordered=int(late),
            lost=max(0, number - expected[thread]) - int(late),
        )
        expected[thread] = max(expected[thread], number + 1)
