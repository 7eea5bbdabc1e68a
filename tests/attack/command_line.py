"""The command line under attack: a table over all verbs, their options and their words, with values that are none.

Each cell ends soon, with one line on the standard error, and no exception leaves the command.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
from shardwright._core import CheckpointWriter
from shardwright.command import main
from shardwright.launcher.command import parser

from tests.checkpoint.test_bindings import description, whole
from tests.jobs.patience import slowdown

#: How long a cell may take, and how much it may say: what was given is quoted, twice at most.
SECONDS = 2.0
MOST_CHARACTERS = 11_000
VERBS = {
    ("checkpoint", "ls"): ["checkpoint"],
    ("checkpoint", "show"): ["checkpoint"],
    ("checkpoint", "verify"): ["checkpoint"],
    ("checkpoint", "diff"): ["checkpoint", "checkpoint"],
    ("checkpoint", "export"): ["checkpoint", "--full", "exported", "--force"],
    ("checkpoint", "reshard"): ["checkpoint", "resharded", "--ranks", "2", "--force"],
    ("checkpoint", "import"): ["exported", "imported", "--tag", "t", "--force"],
    ("trace", "show"): ["missing"],
    ("trace", "draw"): ["missing"],
    ("trace", "program"): ["missing"],
    ("trace", "compare"): ["missing", "missing"],
    ("simulate",): ["--schedule", "simple", "--ranks", "2", "--microbatches", "4"],
    ("run",): ["--ranks", "2", "script.py"],
}
VALUES = [
    *(
        "",
        " ",
        "x",
        "-1",
        "0",
        "1e400",
        "nan",
        "1.5",
        "0x10",
        "\u0663",
        "1,2",
        "1:2:3",
        "a=b=c",
        "host:port",
        "h:99999999",
    ),
    *("65535", "65536", str(2**31), str(2**32), str(2**63), str(2**64), "9" * 4000, "-" + "9" * 40),
    *("\udcff", "tag\udcff", "a\nb", "\x1b[2J", "x" * 5000, "../../..", "%s{}", "--", "--json=1", "\0"),
    *("/dev/null", "/dev/zero", "/dev/full", "/proc/self/mem", "/", "missing/missing", "pipe", "s3://", "s3:/b/x"),
    *("[]", "{", "interleaved(active=99999999999)", "looped(active=8)", "99999999999999999999s", "9TB"),
]


class Outcome(NamedTuple):
    """What a command did."""

    status: int
    out: str
    err: str
    seconds: float


def command(words: list[str]) -> Outcome:
    """Run it in this process; an exception that leaves it is a failure of the test."""
    out, err = io.StringIO(), io.StringIO()
    begin = time.monotonic()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(words)
    return Outcome(status, out.getvalue(), err.getvalue(), time.monotonic() - begin)


def options(verb: tuple[str, ...]) -> list[str]:
    """The options of a verb that take a value, out of its help."""
    told = command([*verb, "--help"])
    assert told.status == 0, told
    if verb == ("run",):
        return [one.option_strings[-1] for one in parser()._actions if one.option_strings and one.nargs is None]
    return re.findall(r"^\s+(?:-\w, )?(--[a-z-]+) <", told.out, re.MULTILINE)


def _is_drawn(draw: random.Random, most: int | None) -> bool:
    return most is None or draw.random() * len(VALUES) < most


def cases(most: int | None = None) -> Iterator[list[str]]:
    """Every value at every place, or so many of them: of each option, and of each word that a verb is given."""
    draw = random.Random(most)
    for verb, words in VERBS.items():
        named = options(verb)
        for value in VALUES:
            for option in named:
                if not _is_drawn(draw, most):
                    continue
                without = words[:]
                if option in without:
                    at = without.index(option)
                    del without[at : at + 2]
                split = len(without) - 1 if verb == ("run",) else 0  # what follows the script is the script's
                yield [*verb, *without[:split], f"{option}={value}", *without[split:]]
            for place in range(len(words)):
                if _is_drawn(draw, most):
                    yield [*verb, *words[:place], value, *words[place + 1 :]]
        for place in range(len(words)):
            yield [*verb, *words[:place], *words[place + 1 :]]
        yield [*verb, *words, "--no-such-option"]
        yield [*verb, *words, "one", "more", "and another"]


@contextlib.contextmanager
def furnished() -> Iterator[Path]:
    """A folder with a checkpoint, a script, and a pipe that nobody writes; and a launcher that starts nothing."""
    import torch.distributed.run as torchrun

    store = {"AWS_ENDPOINT_URL": "http://127.0.0.1:1", "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(contextlib.chdir(folder))
        stack.enter_context(mock.patch.dict(os.environ, store))
        # What torchrun makes of its options, without the ranks.
        stack.enter_context(mock.patch.object(torchrun, "run", lambda given: torchrun.config_from_args(given) and None))
        given = torch.arange(5000, dtype=torch.float32)
        writer = CheckpointWriter("checkpoint", "t")
        part = writer.write_part("part-0.safetensors", [("model/a", given, [5000], whole(given))])
        writer.commit(description(), [part])
        (folder / "script.py").write_text("")
        os.mkfifo("pipe")
        assert command(["checkpoint", "export", "checkpoint", "--full", "exported"]).status == 0
        yield folder


def fault(words: list[str]) -> str | None:
    """Run the command, and return what is wrong with how it ended."""
    try:
        outcome = command(words)
    except BaseException as error:
        return f"{words}: {type(error).__name__}: {error}"[:500]
    lines = outcome.err.splitlines()
    is_well = outcome.status in (0, 1, 2) and "Traceback" not in outcome.err + outcome.out
    if outcome.status == 2:
        is_well &= len(lines) == 1 and not outcome.out and len(lines[0]) < MOST_CHARACTERS
        is_well &= not any(ord(one) < 32 for one in lines[0])
    elif outcome.status == 1:
        is_well &= bool(lines or outcome.out)
    is_well &= outcome.seconds < SECONDS * slowdown()
    return None if is_well else f"{words}: {outcome}"[:500]


def refusals() -> Iterator[bool]:
    """Of each cell, whether the command did not take it well."""
    with furnished():
        for words in list(cases()):
            yield fault(words) is not None
