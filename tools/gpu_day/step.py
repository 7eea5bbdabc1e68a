"""The process of one step: ``python -m tools.gpu_day.step NAME --device cuda --folder FOLDER``.

Its last line on standard output is what the step returned, as a JSON object.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import traceback

from tools.gpu_day import stacks
from tools.gpu_day.options import Options, add_arguments, options_of

#: The longest text of an error in a result.
_ERROR_CHARACTERS = 2_000


def run(module: str, options: Options) -> int:
    """Run a step and print its result; the exit code.

    Args:
        module: The full name of its module.
        options: What it is told.
    """
    stacks.register()
    try:
        found = dict(importlib.import_module(module).run(options))
        if not isinstance(found.get("passed"), bool):
            raise TypeError(f"{module}.run has to return whether it passed, and returned {found}")
    except BaseException as error:
        traceback.print_exc()
        found = {"passed": False, "error": f"{type(error).__name__}: {error}"[:_ERROR_CHARACTERS]}
    sys.stderr.flush()
    print(f"\n{json.dumps(found, default=str)}", flush=True)
    return 0 if found["passed"] else 1


def main() -> int:
    """Parse and run."""
    parser = argparse.ArgumentParser(prog="python -m tools.gpu_day.step", description=__doc__)
    parser.add_argument("module", help="a step's name, or the full name of a module with one")
    add_arguments(parser)
    given = parser.parse_args()
    if given.folder is None:
        parser.error("--folder is needed")
    given.folder.mkdir(parents=True, exist_ok=True)
    return run(given.module if "." in given.module else f"tools.gpu_day.steps.{given.module}", options_of(given))


if __name__ == "__main__":
    sys.exit(main())
