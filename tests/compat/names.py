"""Says which names of a description of the interface the table lacks: ``python -m tests.compat.names FILE``.

The description is text in which names stand between backticks. What is no name, such as a value or a formula, is left
out as far as its form tells; of the rest, whoever reads the list decides.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tests.compat.interface import KEYS, OLD_VERSIONS, SYMBOLS
from tests.compat.interface.old import ENVIRONMENT, LAUNCHER

_QUOTED = re.compile(r"`([^`\n]+)`")
_NAME = re.compile(r"[A-Za-z_][A-Za-z_0-9]*")


def names_of(text: str) -> set[str]:
    """Return the identifiers between backticks that are longer than a variable's."""
    return {name for quoted in _QUOTED.findall(text) for name in _NAME.findall(quoted) if len(name) > 3}


def known() -> set[str]:
    """Return the identifiers of all rows of the table."""
    rows = [f"{one.name} {one.signature or ''} {one.differs} {one.refused}" for one in (*SYMBOLS, *OLD_VERSIONS)]
    rows += [f"{key.name} {key.values} {key.refused_values} {key.differs}" for key in KEYS]
    rows += [f"{name} {meaning}" for name, meaning in (*ENVIRONMENT, *LAUNCHER)]
    return {name for row in rows for name in _NAME.findall(row)}


def main() -> int:
    """Print the names, one on each line."""
    print("\n".join(sorted(names_of(Path(sys.argv[1]).read_text()) - known())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
