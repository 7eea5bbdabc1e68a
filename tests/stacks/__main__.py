"""Trains by the trainers of other libraries over ranks, beside one plain process.

The last line of the output is a JSON object: how many runs there were, how many were as exact as rounding allows, were
refused in words, were wrong, and hung.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from tests.stacks import adapters, kinds, scripts
from tests.stacks.comparing import compared
from tests.stacks.kinds import ONE_REPLICA
from tests.stacks.layouts import LAYOUTS, RANKS

KINDS, RESUMED = {**kinds.KINDS, **adapters.KINDS}, (*kinds.RESUMED, *adapters.RESUMED)
#: Ends a job that stands still: the trainings of one layout take about a minute.
HANG_SECONDS = 600.0


def main() -> int:
    """Run all, print a table."""
    parser = argparse.ArgumentParser(prog="python -m tests.stacks", description=__doc__)
    parser.add_argument("--only", default="*", help="a pattern of names such as dpo-lora:pp2:4")
    chosen = parser.parse_args()
    jobs: dict[tuple[str, int], list[str]] = {}
    for layout in LAYOUTS:
        for microbatches in (1, 4):
            those = [kind for kind in KINDS if not (kind in ONE_REPLICA and "dp2" in layout)]
            those = [kind for kind in those if not (kind in adapters.KINDS and layout == "tp2")]
            those = [kind for kind in those if fnmatch.fnmatch(f"{kind}:{layout}:{microbatches}", chosen.only)]
            if those:
                jobs[layout, microbatches] = those
    resumed = [
        (kind, layout, 4 if "pp2" in layout else 1)
        for kind in RESUMED
        for layout in LAYOUTS
        if layout != "tp2" and fnmatch.fnmatch(f"{kind}-resumed:{layout}:{4 if 'pp2' in layout else 1}", chosen.only)
    ]
    chosen_kinds = {kind for those in jobs.values() for kind in those} | {kind for kind, *_ in resumed}
    found = {"exact": 0, "refused": 0, "wrong": 0, "hung": 0}
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder, "plain")
        if chosen_kinds:
            trained([kind for kind in KINDS if kind in chosen_kinds], "plain", 1, plain)

        def tell(name: str, layout: str, microbatches: int, outcome: str, said: str) -> None:
            found[outcome] += 1
            print(f"{name:24}{layout:>10}{microbatches:>4}  {outcome:8}{' '.join(said.split())}", flush=True)

        for (layout, microbatches), those in jobs.items():
            here = Path(folder, f"{layout}-{microbatches}")
            outcomes = trained(those, layout, microbatches, here)
            for kind in those:
                outcome, said = outcomes.get(kind) or beside_plain(kind, plain, here)
                tell(kind, layout, microbatches, outcome, said)
        for kind, layout, microbatches in resumed:
            here = Path(folder, f"{kind}-{layout}-resumed")
            outcome, said = killed_and_resumed(kind, layout, microbatches, plain, here)
            tell(f"{kind}-resumed", layout, microbatches, outcome, said)
        for script, layout, microbatches in scripts.cases():
            if fnmatch.fnmatch(f"{script.title}:{layout}:{microbatches}", chosen.only):
                outcome, said = scripts.outcome(script, layout, microbatches, Path(folder, "scripts"), HANG_SECONDS)
                tell(script.title, layout, microbatches, outcome, said)
        if fnmatch.fnmatch("qlora-loading:pp2:1", chosen.only):
            tell("qlora-loading", "pp2", 1, *loading(Path(folder, "loading")))
    runs = sum(found.values())
    print(json.dumps({"runs": runs, **found}), flush=True)
    return 0 if runs and not found["wrong"] and not found["hung"] and found["refused"] <= 6 else 1


def run(kinds: list[str], layout: str, microbatches: int, folder: Path, *what: str) -> bool:
    """Run a job of trainings, and return whether it ended by itself."""
    given = ["-m", "tests.stacks.rank", ",".join(kinds), layout, str(microbatches), str(folder), *what]
    started = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS[layout]}"]
    command = [sys.executable, *(started if layout != "plain" else []), *given]
    with Path(folder, "output").open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            process.wait(HANG_SECONDS)
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun ends its ranks
            process.wait()
            return False
    return True


def loading(folder: Path) -> tuple[str, str]:
    """Whether each rank has loaded a model in 4 bits in the memory of its share and of one layer."""
    folder.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "tests.stacks.loading", str(folder)]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return "hung", ""
    told = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    if len(told) != 2:
        return "wrong", ended.stderr[-2000:]
    fits = all(one["peak"] <= one["share"] + one["layer"] for one in told)
    parts = ", ".join(f"{one['peak'] >> 20} of {one['share'] + one['layer'] >> 20} MiB" for one in told)
    return ("exact" if fits else "wrong"), f"at most {parts}"


def trained(kinds: list[str], layout: str, microbatches: int, folder: Path) -> dict[str, tuple[str, str]]:
    """Train each kind, in one job as far as that comes; return what became of those that did not train to the end."""
    folder.mkdir()
    outcomes: dict[str, tuple[str, str]] = {}
    left = list(kinds)
    while left:
        has_ended = run(left, layout, microbatches, folder)
        ended = [kind for kind in left if "error" not in (report(kind, folder) or {"error": ""})]
        left = [kind for kind in left if kind not in ended]
        if left:
            first, *left = left
            outcomes[first] = failed(first, layout, folder) if has_ended else ("hung", "")
    return outcomes


def killed_and_resumed(kind: str, layout: str, microbatches: int, plain: Path, folder: Path) -> tuple[str, str]:
    """Kill a training while it saves, let a fresh job go on, and hold it to the plain one."""
    folder.mkdir()
    for what in ("killed", "resumed"):
        if not run([kind], layout, microbatches, folder, what):
            return "hung", what
        if what == "killed" and report(kind, folder) is not None and "error" not in (report(kind, folder) or {}):
            return "wrong", "it was not killed"
    if "error" in (report(kind, folder) or {"error": ""}):
        return failed(kind, layout, folder)
    if "checkpoint-1" not in Path(folder, "output").read_text():
        return "wrong", "it has not gone on from the newest complete checkpoint"
    return beside_plain(kind, plain, folder)


def failed(kind: str, layout: str, folder: Path) -> tuple[str, str]:
    """What became of a training that has failed."""
    errors = [one["error"] for rank in range(RANKS[layout]) if "error" in (one := report(kind, folder, rank) or {})]
    errors.sort(key=lambda error: error.startswith("PeerLostError"))  # what other ranks heard of it
    told = errors[0] if errors else Path(folder, "output").read_text()[-2000:]
    return "refused" if is_refusal(told) else "wrong", told[:300]


def report(kind: str, folder: Path, rank: int = 0) -> dict[str, Any] | None:
    """What a rank has told of a training."""
    path = folder / f"{kind}-{rank}.json"
    told: dict[str, Any] | None = json.loads(path.read_text()) if path.is_file() else None
    return told


def is_refusal(error: str) -> bool:
    """Whether an error is one by which this library refuses something in words."""
    return error.startswith(("ConfigError: ", "FrameError: ", "UnsupportedValueError: "))


def beside_plain(kind: str, plain: Path, folder: Path) -> tuple[str, str]:
    """Hold a training to the plain one."""
    told = report(kind, plain), report(kind, folder)
    assert told[0] is not None, f"{kind} does not train alone"
    assert told[1] is not None, f"{kind} has told nothing"
    first, second = ([*one["log"], {"eval_loss": one["eval_loss"]}] for one in told if one is not None)
    weights = torch.load(plain / f"{kind}.pt"), torch.load(folder / f"{kind}.pt")
    return compared((first, second), ("loss", "grad_norm", "eval_loss"), weights)


if __name__ == "__main__":
    sys.exit(main())
