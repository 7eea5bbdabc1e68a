"""A rank that trains for ever, each step compared with plain PyTorch's: ``training.py CONFIGURATION``.

The last rank turns hostile once it is told a line of hexadecimal digits: it writes the bytes on every connection that
it has to another rank.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "failures" / "programs"))

import common
import shardwright as smp
import torch
from common import await_word, say

#: Over many steps of two replicas, rounding grows until a step is no step of the same weights any more.
ROUND = 8


class Anew:
    """Sets both models back to what they were."""

    def __init__(self, job: common.TrainingJob) -> None:
        self.job = job
        self.values = {name: value.detach().clone() for name, value in job.whole.state_dict().items()}

    def __call__(self) -> None:
        """Do it, between two steps."""
        local = [*self.job.model.local_named_parameters(), *self.job.model.local_named_buffers()]
        with torch.no_grad():
            for name, tensor in [*self.job.whole.state_dict(keep_vars=True).items(), *local]:
                tensor.copy_(self.values[name])


def connections() -> list[socket.socket]:
    """The established TCP connections of this process."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if not os.readlink(entry).startswith("socket:"):
                continue
            one = socket.socket(fileno=os.dup(int(entry.name)))
            if one.family == socket.AF_INET and one.type == socket.SOCK_STREAM and one.getpeername():
                found.append(one)
        except OSError:
            continue
    return found


def turn_hostile() -> None:
    digits = await_word()
    for connection in connections():
        try:
            connection.sendall(bytes.fromhex(digits))
        except OSError:
            continue
    say("harmed")


def main() -> None:
    job = common.start(**json.loads(sys.argv[1]))
    if smp.rank() == smp.size() - 1:
        threading.Thread(target=turn_hostile, daemon=True).start()
    anew = Anew(job)
    for number in itertools.count():
        if number > 0 and number % ROUND == 0:
            anew()
        error = job.exact_step()
        say("step", number=number, error=error, strangers=smp.stats()["communication"]["unknown_peers_dropped"])


if __name__ == "__main__":
    main()
