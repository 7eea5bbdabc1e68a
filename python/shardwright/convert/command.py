"""``shardwright convert``: a configuration of accelerate or DeepSpeed as one of this library."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from shardwright.convert.conversion import Conversion, convert, deepspeed_file, is_of_accelerate
from shardwright.convert.files import read
from shardwright.convert.keys import Outcome
from shardwright.convert.rendering import command, command_line, configuration, script
from shardwright.convert.values import shortened, shown
from shardwright.errors import ConfigError

WHOLE, LACKING, MISUSE = 0, 1, 2
_MOST_RANKS = 1 << 20
_EPILOG = """
FILE is what `accelerate config` writes (YAML, or JSON by its name), or a JSON file of DeepSpeed by itself. A file of
DeepSpeed that it names is read too. Nothing is written but the standard output.

Every key of FILE is in the table that follows the lines. Exit status: 0 if each becomes something here or is not
needed, 1 if one changes training or what fits in memory and has no counterpart, or is not known; 2 on misuse, or if
accelerate or DeepSpeed would not take FILE either.

  shardwright convert accelerate_config.yaml
  shardwright convert ds_config.json --num-processes 8
"""


class _Misused(Exception):
    """The arguments are wrong."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _Misused(f"{message}; --help says more")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's arguments."""
    made = _Parser(
        prog="shardwright convert",
        description="Print what a configuration of accelerate or DeepSpeed becomes here.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
    )
    made.add_argument("-h", "--help", action="store_true", help="show this help and exit")
    made.add_argument("file", metavar="FILE", nargs="?", help="the configuration")
    made.add_argument("--num-processes", metavar="N", type=_ranks, help="processes on all hosts, whatever FILE says")
    made.add_argument("--json", action="store_true", help="write one JSON object")
    return made


def _ranks(text: str) -> int:
    if text.isascii() and text.isdecimal() and len(text) <= len(str(_MOST_RANKS)) and 0 < int(text) <= _MOST_RANKS:
        return int(text)
    raise argparse.ArgumentTypeError(f"{shortened(text)} is not allowed; allowed: 1 to {_MOST_RANKS}")


def main(arguments: Sequence[str]) -> tuple[int, str]:
    """Run the command, and return its exit status and what it has to say."""
    made = parser()
    try:
        given = made.parse_args(arguments)
        if given.help:
            return WHOLE, made.format_help()
        if given.file is None:
            raise _Misused("there is no FILE; --help says more")
        done = _converted(given.file, given.num_processes)
    except (_Misused, ConfigError) as error:
        sys.stderr.write(f"shardwright convert: {' '.join(str(error).split())}\n")
        return MISUSE, ""
    text = as_json(done) if given.json else as_text(done, given.file)
    return (WHOLE if done.is_whole else LACKING), text


def _converted(path: str, ranks: int | None) -> Conversion:
    given = read(path)
    other = deepspeed_file(given) if is_of_accelerate(given) else None
    if other is None:
        return convert(given, None, ranks)
    # Accelerate takes it from where it is started; a file that was moved is looked for beside the other.
    beside = Path(path).parent / other
    found = other if Path(other).exists() or not beside.exists() else str(beside)
    return convert(given, read(found), ranks)


def as_json(done: Conversion) -> str:
    """Return a conversion as one JSON object."""
    environment, words = command(done.plan)
    told: dict[str, Any] = {
        "configuration": configuration(done.plan),
        "script": script(done.plan),
        "environment": environment,
        "command": words,
        "keys": [
            {"key": row.key, "value": row.value, "outcome": row.outcome.value, "text": row.text} for row in done.rows
        ],
        "whole": done.is_whole,
    }
    return json.dumps(told, indent=2, default=str, ensure_ascii=False) + "\n"


def as_text(done: Conversion, path: str) -> str:
    """Return a conversion as lines for a script, a command, and a table of all keys."""
    lines = ["In the script:", ""]
    lines += [f"    {line}".rstrip() for line in script(done.plan)]
    lines += ["", "To start it, on each host:" if done.plan.hosts > 1 else "To start it:", ""]
    lines += [f"    {command_line(done.plan)}", "", f"The keys of {shown(path)}:", ""]
    cells = [(f"{row.key}: {_value(row.value)}".rstrip(": "), row) for row in done.rows]
    for outcome in Outcome:
        told = [(cell, row.text) for cell, row in cells if row.outcome is outcome]
        if told:
            lines += [f"  {outcome.value}", *_columns(told), ""]
    missing = sum(row.outcome is Outcome.NO_COUNTERPART for row in done.rows)
    are = "key has" if missing == 1 else "keys have"
    lines += [f"{missing} {are} no counterpart" if missing else "every key has a counterpart, or needs none"]
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    return "" if value is None else shortened(value)


_WIDTH = 44


def _columns(told: list[tuple[str, str]]) -> list[str]:
    """Return rows of two columns, the second in a line of its own where the first is long."""
    width = min(_WIDTH, max(len(cell) for cell, _ in told))
    return [
        f"    {cell:<{width}}  {text}" if len(cell) <= width else f"    {cell}\n    {'':<{width}}  {text}"
        for cell, text in told
    ]
