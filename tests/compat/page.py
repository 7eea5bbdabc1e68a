"""Writes the tables of the guide's page on the original library; with --check, compares them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.compat.interface import KEYS, OLD_VERSIONS, SYMBOLS, Symbol
from tests.compat.interface.old import ENVIRONMENT, LAUNCHER

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "original-library.md"
BEGIN, END = "<!-- tables of the interface: begin -->\n", "<!-- tables of the interface: end -->"


def tables() -> str:
    """Return all tables."""
    return "\n\n".join([*_keys(), *_surroundings(), *_symbols(SYMBOLS), *_symbols(OLD_VERSIONS)]) + "\n\n"


def _keys() -> Iterable[str]:
    for group in dict.fromkeys(key.group for key in KEYS):
        rows = [
            (f"`{key.name}`", key.shown_default, _said(key.refused, key.differs)) for key in KEYS if key.group == group
        ]
        yield _table(group, ("key", "default there", "what differs, and why"), rows)


def _surroundings() -> Iterable[str]:
    headings = ("variable", "here")
    yield _table("Environment variables", headings, [(_code(names), meaning) for names, meaning in ENVIRONMENT])
    yield _table("Launcher", ("there", "here"), [(_code(names), meaning) for names, meaning in LAUNCHER])


def _symbols(symbols: Sequence[Symbol]) -> Iterable[str]:
    for group in dict.fromkeys(symbol.group for symbol in symbols):
        rows = [
            (f"`{symbol.name}{symbol.signature or ''}`", _where(symbol), _said(symbol.refused, symbol.differs))
            for symbol in symbols
            if symbol.group == group
        ]
        yield _table(group, ("symbol", "here", "what differs, and why"), rows)


def _where(symbol: Symbol) -> str:
    """Return what a script without the old import path writes."""
    if symbol.refused:
        return "no"
    if symbol.here:
        return f"`{symbol.here}`"
    return "the same" if symbol.name.startswith("smp.") else "yes"


def _said(refused: str, differs: str) -> str:
    return f"**Refused**: {refused}." if refused else differs


def _code(names: str) -> str:
    return ", ".join(f"`{name}`" for name in names.split(", "))


def _table(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"### {title}", "", f"| {' | '.join(headings)} |", f"| {' | '.join('---' for _ in headings)} |"]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def main() -> int:
    """Write or check the page."""
    parser = argparse.ArgumentParser(prog="python -m tests.compat.page", description=__doc__)
    parser.add_argument("--check", action="store_true", help="only say whether the page is up to date")
    check = parser.parse_args().check
    page = PAGE.read_text()
    before, rest = page.split(BEGIN)
    after = rest.split(END)[1]
    fresh = before + BEGIN + tables() + END + after
    if not check:
        PAGE.write_text(fresh)
    elif fresh != page:
        print(f"{PAGE.name} is stale: run python -m tests.compat.page", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
