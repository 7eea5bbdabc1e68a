"""Writes the table of docs/guide/configuration.md from the library's own table of keys; with --check, compares it."""

import argparse
import sys
from pathlib import Path

from shardwright import _core

PAGE = Path(__file__).parents[1] / "docs" / "guide" / "configuration.md"
BEGIN, END = "<!-- table of keys: begin -->\n", "<!-- table of keys: end -->"


def table() -> str:
    """All keys as tables, one for the interface that the library implements and one for its own keys."""
    rows = _core.Config.keys_table()
    sections = []
    for title, own in (("Keys of the interface", False), ("Keys of this library", True)):
        lines = [f"## {title}", "", "| key | allowed | default | meaning |", "| --- | --- | --- | --- |"]
        for name, origin, allowed, default, unit, meaning, not_built in rows:
            if (origin == "Shardwright") != own:
                continue
            allowed = f"{allowed} ({unit})" if unit else allowed
            meaning = f"{meaning}; **only the default: {not_built}**" if not_built else meaning
            cells = (f"`{name}`", allowed, default, meaning)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        sections.append("\n".join(lines))
    return "\n\n".join(sections) + "\n\n"


def main() -> int:
    """Write or check the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only say whether the page is up to date")
    check = parser.parse_args().check
    page = PAGE.read_text()
    before, rest = page.split(BEGIN)
    after = rest.split(END)[1]
    fresh = before + BEGIN + table() + END + after
    if not check:
        PAGE.write_text(fresh)
    elif fresh != page:
        print(f"{PAGE.name} is stale: run python tools/configuration_table.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
