"""Stored texts: what errors say, compared word for word. ``SHARDWRIGHT_WRITE_MESSAGES=1`` writes them anew."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

HERE = Path(__file__).parent


def read(name: str) -> dict[str, str]:
    """The texts of a file, by heading."""
    parts = re.split(r"^## (.*)\n", (HERE / f"{name}.md").read_text(), flags=re.MULTILINE)[1:]
    return {heading: text.strip() for heading, text in zip(parts[::2], parts[1::2], strict=True)}


def check(name: str, found: Mapping[str, str]) -> None:
    """Compare texts with those of a file; numbers of seconds may differ."""
    texts = {heading: re.sub(r"\b\d+\.\d+ s\b", "N s", text).strip() for heading, text in found.items()}
    if os.environ.get("SHARDWRIGHT_WRITE_MESSAGES"):
        body = "".join(f"\n## {heading}\n\n{text}\n" for heading, text in texts.items())
        (HERE / f"{name}.md").write_text(f"# {name.capitalize()}\n{body}")
    assert texts == read(name)
