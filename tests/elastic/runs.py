"""Runs of the example: some that lose a rank, and one that is resharded by hand."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.elastic.rank import EXAMPLE, example
from tests.jobs.patience import HANG_SECONDS
from tests.jobs.ports import next_port
from tests.jobs.ranks import forked_ranks, outputs_of_ranks

ROOT = EXAMPLE.parents[1]
STEPS, KILLED_IN = 60, 30
#: Several starts of Python and torch by several agents, on a machine that has other things to do as well.
LIMIT_SECONDS = HANG_SECONDS
#: How long agents wait for more nodes than they need, and how soon they notice that one is gone.
RENDEZVOUS = "last_call_timeout=30,keep_alive_interval=1,keep_alive_max_attempt=5"
_POLL_SECONDS = 0.01


class Trained(NamedTuple):
    """What a folder of the example says of its training.

    Attributes:
        starts: From which step, with which degrees, it began and went on.
        losses: The loss of each step, without those that were done again after a restart.
        samples: The samples of these steps, in order.
    """

    starts: list[dict[str, int]]
    losses: list[float]
    samples: list[int]


def trained(folder: Path) -> Trained:
    """Read what is in a folder."""
    starts: list[dict[str, int]] = []
    steps: list[dict[str, Any]] = []
    for line in (folder / "losses.jsonl").read_text().splitlines():
        said = json.loads(line)
        if "from_step" in said:
            starts.append(said)
            del steps[said["from_step"] :]
        else:
            assert said["step"] == len(steps), f"step {said['step']} came after {len(steps)} steps"
            steps.append(said)
    return Trained(starts, [one["loss"] for one in steps], [each for one in steps for each in one["samples"]])


def lost_and_repeated(run: Trained, steps: int) -> tuple[int, int]:
    """How many samples training was to take and did not, and took and was not to."""
    batch = len(run.samples) // len(run.losses)
    wanted, found = Counter(example().samples_from(0, steps * batch)), Counter(run.samples)
    return (wanted - found).total(), (found - wanted).total()


def worst_relative_error(run: Trained, other: Trained) -> float:
    """The largest difference of a loss of two runs."""
    assert len(run.losses) == len(other.losses)
    return max(abs(a - b) / abs(b) for a, b in zip(run.losses, other.losses, strict=True))


def by_hand(folder: Path, run: Trained, *arguments: str) -> Trained:
    """Train to the step at which a run went on, reshard, and train on with the degrees that it had then."""
    first, last = run.starts
    before, after = folder / "before", folder / "after"
    _train(before, first, last["from_step"], *arguments)
    words = ["checkpoint", "reshard", str(before), str(after), "--ranks", str(last["ranks"])]
    subprocess.run([sys.executable, "-m", "shardwright.command", *words], check=True, timeout=LIMIT_SECONDS)
    (after / "losses.jsonl").write_text((before / "losses.jsonl").read_text())
    _train(after, last, len(run.losses), *arguments)
    return trained(after)


def _train(folder: Path, start: dict[str, int], steps: int, *arguments: str) -> None:
    """Run the example with degrees that cannot change."""
    fixed = json.dumps({"pipeline_parallel_degree": start["stages"], "elastic_degrees": None})
    words = [str(EXAMPLE), "--folder", str(folder), *arguments, "--steps", str(steps)]
    outputs_of_ranks(*words, ranks=start["ranks"], seconds=LIMIT_SECONDS, environment={"SM_HP_MP_PARAMETERS": fixed})


def without_launcher(
    folder: Path, ranks: int, step: int | str, *arguments: str, seconds: float = LIMIT_SECONDS
) -> Trained:
    """Kill the last rank in a step, and start the job again with one fewer, once the others have ended in so long."""
    ready = folder / "ready"
    command = ["-m", "tests.elastic.rank", str(ready), str(ranks - 1), str(step)]
    command += ["--folder", str(folder / "run"), *arguments]
    processes = forked_ranks(command, ranks, folder=ROOT, stdout=subprocess.DEVNULL)
    try:
        _wait_for(ready.exists, "the step", [process.poll for process in processes])
        processes[-1].kill()
        for process in processes[:-1]:
            _, said = process.communicate(timeout=seconds)
            assert process.returncode not in (0, None)
            assert "PeerLostError" in said, said[-2000:]
    finally:
        for process in processes:
            process.kill()
    outputs_of_ranks(*command, ranks=ranks - 1, seconds=LIMIT_SECONDS, folder=ROOT)
    return trained(folder / "run")


def under_torchrun(folder: Path, nodes: int, step: int | str, *arguments: str, fewest: int = 2) -> Trained:
    """Kill the last of some nodes, its agent and its rank, in a step: the others go on by themselves.

    Args:
        folder: For what they write.
        nodes: How many there are.
        step: In which step, or "saved STEP": right after the save of that step.
        *arguments: Those of the example.
        fewest: With how many nodes the job goes on.
    """
    ready, port = folder / "ready", next_port()
    environment = {
        **os.environ,
        "SHARDWRIGHT_SECRET": secrets.token_hex(16),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    agents: list[subprocess.Popen[bytes]] = []
    log = folder / "agents.log"
    try:
        with log.open("wb") as out:
            for node in range(nodes):
                launch = [f"--nnodes={fewest}:{nodes}", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-backend=c10d"]
                launch += [f"--rdzv-endpoint=127.0.0.1:{port}", f"--rdzv-id={port}", "--local-addr=127.0.0.1"]
                launch += [f"--rdzv-conf=is_host={int(node == 0)},{RENDEZVOUS}", "--module", "tests.elastic.rank"]
                words = [str(ready), str(nodes - 1), str(step), "--folder", str(folder / "run"), *arguments]
                agents.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "torch.distributed.run", *launch, *words],
                        cwd=ROOT,
                        env={**environment, "ELASTIC_NODE": str(node)},
                        stdout=out,
                        stderr=out,
                        start_new_session=True,
                    )
                )
        _wait_for(ready.exists, "the step", [agent.poll for agent in agents])
        agents[-1].kill()
        os.kill(int(ready.read_text()), signal.SIGKILL)
        deadline = time.monotonic() + LIMIT_SECONDS
        codes = [agent.wait(max(deadline - time.monotonic(), 0.0)) for agent in agents[:-1]]
        assert not any(codes), f"agents ended with {codes}"
    except BaseException:
        print(log.read_text()[-6000:], file=sys.stderr)
        raise
    finally:
        for agent in agents:
            if agent.poll() is None:
                agent.terminate()  # with its ranks
                with contextlib.suppress(subprocess.TimeoutExpired):
                    agent.wait(HANG_SECONDS)
                agent.kill()
    return trained(folder / "run")


def _wait_for(happened: Callable[[], bool], what: str, polls: Sequence[Callable[[], int | None]]) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while not happened():
        codes = [poll() for poll in polls]
        assert codes.count(None) == len(codes), f"before {what}, processes ended with {codes}"
        assert time.monotonic() < deadline, f"{what} did not come within {LIMIT_SECONDS} s"
        time.sleep(_POLL_SECONDS)
