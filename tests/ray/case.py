"""Runs one case in this process, its driver.

usage: python -m tests.ray.case NAME FOLDER
"""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from pathlib import Path

from tests.ray.listed import CASES


def main() -> int:
    """Run the case, and say in a file what came of it."""
    name, folder = sys.argv[1], Path(sys.argv[2])
    try:
        where, given = CASES[name]
        module, _, function = where.partition(".")
        run = getattr(importlib.import_module(f"tests.ray.{module}"), function)
        said = {"passed": True, "said": run(folder, **given)}
    except Exception:
        said = {"passed": False, "said": traceback.format_exc()}
    (folder / "outcome.json").write_text(json.dumps(said))
    return 0


if __name__ == "__main__":
    sys.exit(main())
