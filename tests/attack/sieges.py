"""Jobs under attack from outside: while they start, while they train, on one host and over several."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from tests.hosts.network import LINK, Network
from tests.jobs.door import ask, name_of
from tests.jobs.job import Job, torchrun_environment
from tests.jobs.listeners import listeners
from tests.jobs.patience import slowdown
from tests.jobs.ports import next_port

from . import strangers
from .protocol import WAIT, hello, visit
from .watch import PROGRAM, STEP_SECONDS, Watch, doors

SECRET = "the secret of the attack"
GLOO = {"GLOO_SOCKET_IFNAME": LINK}
#: Far above what a start takes, and far below the time after which ranks are given up.
START_SECONDS = 25.0


@dataclass
class Row:
    """What one kind of attack did to one job."""

    job: str
    attack: str
    attacks: int
    survived: int
    inexact: int = 0
    outside: int = 0
    growth_mb: float = 0.0
    said: str = ""


def on_one_host(name: str, ranks: int, keys: dict[str, Any], count: int, seed: int) -> Iterator[Row]:
    """Strangers of every kind at every door of a job that trains, ``count`` of each."""
    with Job(PROGRAM, ranks, [json.dumps(keys)]) as job, Watch(job) as watch:
        places = [place for process in job.ranks for place in doors(process)]
        assert len(places) == ranks, places
        draw = random.Random(seed)
        for attack, kind in strangers.KINDS.items():
            before = watch.steps()
            seeds = [draw.randrange(2**32) for _ in places]

            def visits(place: strangers.Address, one: int, kind: Any = kind) -> list[bool]:
                own = random.Random(one)
                return [kind(place, own) for _ in range(count)]

            with ThreadPoolExecutor(ranks) as pool:
                let_in = [one for answers in pool.map(visits, places, seeds) for one in answers]
            yield _row(name, attack, let_in, watch, before)
        before = watch.steps()
        with ThreadPoolExecutor(ranks) as pool:
            answers = pool.map(lambda place: list(strangers.idle_and_slow(place, 8 * count, 2.0)), places)
            let_in = [one for some in answers for one in some]
        yield _row(name, "idle and slow connections", let_in, watch, before)


def late_members(name: str, ranks: int, keys: dict[str, Any], count: int, seed: int) -> Iterator[Row]:
    """Processes that know the secret of a job on one host and come late; their handshakes, recorded and replayed."""
    port = next_port()
    launch = _at(port)
    with Job(PROGRAM, ranks, [json.dumps(keys)], launch=launch) as job, Watch(job) as watch:
        secret, draw = ask(name_of(port), STEP_SECONDS).secret, random.Random(seed)
        places = [place for process in job.ranks for place in doors(process)]
        before = watch.steps()
        let_in = [one for place in places for one in strangers.late_members(place, secret, count, draw)]
        yield _row(name, "late members", let_in, watch, before)
        before = watch.steps()
        recorded = visit(places[0], secret, hello())
        let_in = [one for place in places for one in strangers.replays(place, recorded, count)]
        yield _row(name, "recorded handshakes, replayed", let_in, watch, before)


def while_it_starts(name: str, keys: dict[str, Any], count: int) -> Iterator[Row]:
    """Idle connections to rank 0's door before the others come, and more of them while they do."""
    port = next_port()
    arguments = [json.dumps(keys)]
    with Job(PROGRAM, 1, arguments, launch=_at(port, world=2)) as first, contextlib.ExitStack() as idle:
        place = ("127.0.0.1", ask(name_of(port), STEP_SECONDS).port)
        draw = random.Random(count)

        def besiege() -> None:
            for _ in range(count // 2):
                idle.enter_context(socket.create_connection(place, WAIT))
                with contextlib.suppress(OSError):
                    strangers.false_proofs(place, draw)

        besiege()
        began = time.monotonic()
        with Job(PROGRAM, 1, arguments, launch=_at(port, world=2, rank=1)) as second:
            besiege()
            ranks = [first[0], second[0]]
            for process in ranks:
                process.event("step", START_SECONDS, 3)
            seconds = time.monotonic() - began
            steps = [step for process in ranks for step in process.events("step")]
            inexact = sum(step["error"] > 1e-10 for step in steps)
            attacks = 4 * (count // 2)
            survived = attacks if seconds < START_SECONDS * slowdown() and not inexact else 0
            yield Row(name, "while it starts", attacks, survived, inexact, said=f"started in {seconds:.1f} s")


def over_hosts(name: str, hosts: int, keys: dict[str, Any], count: int, seed: int) -> Iterator[Row]:
    """A job with a rank on each of several hosts that are network namespaces; strangers call from one more."""
    with Network(hosts + 1, rate="1gbit", delay_milliseconds=1.0) as network:

        def launch(rank: int, world: int, port: int) -> dict[str, str]:
            own = torchrun_environment(rank, world, port)
            return {**own, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": network.address(0), **GLOO}

        job = Job(
            PROGRAM,
            hosts,
            [json.dumps(keys)],
            lambda rank: {"SHARDWRIGHT_SECRET": SECRET},
            launch=launch,
            prefix=network.prefix,
        )
        with job, Watch(job, one_host=False) as watch:
            before = watch.steps()
            outcomes = []
            for rank, process in enumerate(job.ranks):
                for address, port in listeners(process.pid):
                    if str(address) != network.address(rank):
                        continue
                    command = [sys.executable, "-m", "tests.attack.strangers", address, port, seed, count]
                    command = [*network.prefix(hosts), *map(str, command), SECRET.encode().hex()]
                    outcomes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            attacks = let_in = attacked = 0
            for outcome in outcomes:
                out, _ = outcome.communicate(timeout=2 * STEP_SECONDS)
                visits, accepted = map(int, out.split())
                attacks, let_in, attacked = attacks + visits, let_in + accepted, attacked + (visits > 0)
            assert attacked == hosts, "not every rank's door was found"
            verdicts = [True] * let_in + [False] * (attacks - let_in)
            yield _row(name, "all of these, from another host", verdicts, watch, before)


def _at(port: int, world: int | None = None, rank: int | None = None) -> Any:
    def launch(own: int, size: int, _port: int) -> dict[str, str]:
        return torchrun_environment(own if rank is None else rank, size if world is None else world, port)

    return launch


def _row(name: str, attack: str, let_in: list[bool], watch: Watch, before: list[int]) -> Row:
    goes_on = watch.goes_on(before)
    survived = len(let_in) - sum(let_in) if goes_on else 0
    return Row(name, attack, len(let_in), survived, watch.inexact(), watch.outside, watch.growth_mb)
