"""Every entry of the zoo by name: those of the hand-written modules, and of the architectures of ``transformers``."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

from .entry import Entry


def _all() -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    for found in pkgutil.iter_modules([str(Path(__file__).parent)]):
        if not found.name.startswith(("modules_", "transformers_")):
            continue
        for name, entry in importlib.import_module(f"{__package__}.{found.name}").ENTRIES.items():
            if name in entries:
                raise LookupError(f"two entries of the zoo have the name {name!r}")
            entries[name] = entry
    return entries


ENTRIES = _all()
#: What the ranks of a job look problems up in.
PROBLEMS = {name: entry.problem for name, entry in ENTRIES.items()}
