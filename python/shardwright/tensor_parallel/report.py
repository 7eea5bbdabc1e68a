"""The report on which modules were replaced and which were not, and why."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

from shardwright import logs
from shardwright.tables import error_console
from shardwright.tensor_parallel.replacement import Replacement, Result

if TYPE_CHECKING:
    from rich.console import Console

_MAX_FRESH = 4
#: A number between dots, as in the names of children of lists.
_NUMBER = re.compile(r"(?<![^.'])\d+(?![^.'])")


def announce(result: Result, degree: int) -> None:
    """Print the outcomes for marked modules to standard error, and log them; do nothing if there are none."""
    if not result.replacements:
        return
    render(result, degree, error_console())
    logs.logger.info(
        "Tensor parallelism: %s",
        "; ".join(f"{each.name or each.module}: {outcome(each)}" for each in result.replacements if each.substitute),
    )


def outcome(replacement: Replacement) -> str:
    """Describe the outcome for a module."""
    if replacement.substitute is None:
        return f"skipped: {replacement.reason}"
    text = f"replaced by {replacement.substitute}"
    if replacement.fresh:
        names = ", ".join(replacement.fresh[:_MAX_FRESH]) + (", ..." if len(replacement.fresh) > _MAX_FRESH else "")
        text += f", with fresh weights: {names}"
    return text


def render(result: Result, degree: int, console: Console) -> None:
    """Print a table of modules; children of lists with the same outcome share a line, with ``*`` for their numbers."""
    from rich.table import Table

    table = Table(title=f"Tensor parallelism over {degree} rank{'s' if degree > 1 else ''}", title_justify="left")
    table.add_column("module", overflow="fold")
    table.add_column("number", justify="right")
    table.add_column("class", overflow="fold")
    table.add_column("outcome", overflow="fold")
    alike: dict[tuple[str, str, str], list[str]] = {}
    for each in result.replacements:
        if each.supported and each.part_of is None:
            key = (_NUMBER.sub("*", each.name), each.module, _NUMBER.sub("*", outcome(each)))
            alike.setdefault(key, []).append(each.name)
    for (pattern, cls, _), names in alike.items():
        told = next(outcome(each) for each in result.replacements if each.name == names[0])
        one = len(names) == 1
        table.add_row(names[0] or "the model itself" if one else pattern, str(len(names)), cls, told)
    if alike:
        console.print(table)
    num_parts = sum(each.part_of is not None for each in result.replacements)
    if num_parts:
        console.print(f"parts of replaced modules: {num_parts}", highlight=False)
    unsupported = Counter(each.module for each in result.replacements if not each.supported)
    if unsupported:
        text = ", ".join(f"{cls} ({number})" if number > 1 else cls for cls, number in unsupported.items())
        console.print(f"without a distributed implementation: {text}", highlight=False, markup=False)
    if result.unused_options:
        text = ", ".join(result.unused_options)
        console.print(f"arguments that no distributed module takes: {text}", highlight=False, markup=False)
