"""Writes the tables of docs/coming-from/accelerate-configuration.md from the keys that are known; --check compares."""

import argparse
import sys
from pathlib import Path

from shardwright.convert.accelerate_keys import ACCELERATE, SAGEMAKER
from shardwright.convert.deepspeed_keys import DEEPSPEED, INLINE
from shardwright.convert.engine_keys import FSDP, MEGATRON, PARALLELISM
from shardwright.convert.keys import Key

PAGE = Path(__file__).parents[1] / "docs" / "coming-from" / "accelerate-configuration.md"
BEGIN, END = "<!-- tables of keys: begin -->\n", "<!-- tables of keys: end -->"
TABLES: tuple[tuple[str, tuple[Key, ...]], ...] = (
    ("Keys of accelerate", (*ACCELERATE, *SAGEMAKER)),
    ("FSDP: keys of `fsdp_config`", FSDP),
    ("Keys of `parallelism_config`", PARALLELISM),
    ("DeepSpeed: keys of `deepspeed_config`", INLINE),
    ("DeepSpeed: keys of its own file", DEEPSPEED),
    ("Megatron-LM: keys of `megatron_lm_config`", MEGATRON),
)


def tables() -> str:
    """All keys as tables; those with the same answer share a row."""
    sections = []
    for title, keys in TABLES:
        rows: dict[str, list[str]] = {}
        for each in keys:
            rows.setdefault(each.guide, []).extend(each.names)
        lines = [f"## {title}", "", "| key | becomes |", "| --- | --- |"]
        for guide, names in rows.items():
            cells = (", ".join(f"`{name}`" for name in names), guide)
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
    fresh = before + BEGIN + tables() + END + rest.split(END)[1]
    if not check:
        PAGE.write_text(fresh)
    elif fresh != page:
        print(f"{PAGE.name} is stale: run python tools/conversion_table.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
