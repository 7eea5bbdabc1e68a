"""How to start a script that asks for more ranks than it was given."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path


def how_to_start(ranks: int) -> str:
    """Return the advice for a process that no launcher started, in a job of this many ranks."""
    main = sys.modules.get("__main__")
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec is not None:
        name = spec.name.removesuffix(".__main__")
        return f"this process was started without a launcher; start it as: shardwright run --ranks {ranks} -m {name}"
    if file is not None and Path(file).is_file():
        script = shlex.quote(_shortest(Path(file)))
        return f"this process was started without a launcher; start it as: shardwright run --ranks {ranks} {script}"
    return (
        f"a notebook or an interactive session is one rank; to use {ranks}, put the training in a function, and call "
        f"shardwright.notebook.launch(function, ranks={ranks})"
    )


def _shortest(path: Path) -> str:
    """Return the path of the script as it is typed here."""
    folder = Path.cwd()
    return str(path.relative_to(folder) if path.is_relative_to(folder) else path)
