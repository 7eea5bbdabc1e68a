"""Every entry of the zoo by name."""

from __future__ import annotations

from . import transformers_text
from .entry import Entry

_PARTS = (transformers_text.ENTRIES,)

ENTRIES: dict[str, Entry] = {name: entry for part in _PARTS for name, entry in part.items()}
#: What the ranks of a job look problems up in.
PROBLEMS = {name: entry.problem for name, entry in ENTRIES.items()}

if len(ENTRIES) != sum(map(len, _PARTS)):
    raise LookupError("two entries of the zoo have one name")
