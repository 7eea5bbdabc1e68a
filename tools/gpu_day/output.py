"""What a run leaves behind: results as JSON lines, a table, and logs, in few files of bounded size."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: The most files that a run leaves, results and table included, and the most bytes of each.
MAX_FILES = 8
MAX_FILE_BYTES = 16 << 20
#: The most bytes that are kept of one step's output.
MAX_STEP_BYTES = 3 << 20
_LOGS = MAX_FILES - 3  # beside results.jsonl and table.txt, with one to spare
_WIDTH = 100


class Output:
    """The folder into which a run writes, as it goes: a run that is cut off has left what it found.

    Attributes:
        folder: An existing folder.
        rows: The results so far, in order.
    """

    def __init__(
        self, folder: Path, *, max_file_bytes: int = MAX_FILE_BYTES, max_step_bytes: int = MAX_STEP_BYTES
    ) -> None:
        """Begin anew in a folder, which may have the files of an earlier run.

        Args:
            folder: It is made where it is missing.
            max_file_bytes: The most bytes of a file.
            max_step_bytes: The most bytes that are kept of one step's output.
        """
        self.folder = folder
        self.rows: list[dict[str, Any]] = []
        self._max_file_bytes, self._max_step_bytes = max_file_bytes, min(max_step_bytes, max_file_bytes)
        self._log = 0
        folder.mkdir(parents=True, exist_ok=True)
        for old in (*folder.glob("log-*.txt"), folder / "results.jsonl", folder / "table.txt"):
            old.unlink(missing_ok=True)

    def note(self, facts: Mapping[str, Any]) -> None:
        """Write a line of facts that is no step's result."""
        self._line(facts)

    def add(self, row: dict[str, Any], logs: list[Path]) -> None:
        """Write a step's result, and keep what it wrote.

        Args:
            row: Its figures, with ``step``, ``state`` and ``seconds``.
            logs: Files with what it wrote.
        """
        self.rows.append(row)
        self._line(row)
        (self.folder / "table.txt").write_text(table(self.rows))
        self._keep(row, logs)

    def _line(self, facts: Mapping[str, Any]) -> None:
        line = json.dumps(facts, default=str)
        print(line, flush=True)
        with (self.folder / "results.jsonl").open("a") as file:
            file.write(f"{line}\n")

    def _keep(self, row: Mapping[str, Any], logs: list[Path]) -> None:
        parts = [(path, path.stat().st_size) for path in logs if path.exists() and path.stat().st_size]
        text = [f"======== {row['step']}: {row['state']} after {row['seconds']} s ========\n".encode()]
        share = max(self._max_step_bytes - (1 << 10), 0) // max(len(parts), 1)
        for path, size in parts:
            text.append(f"---- {path.name} ({size} bytes)\n".encode())
            text.append(_ends(path, size, share - 200))
        kept = b"".join(text)[: self._max_step_bytes]
        if self._log == 0 or self._path().stat().st_size + len(kept) > self._max_file_bytes:
            if self._log == _LOGS:
                return  # cannot be: all steps' shares fit
            self._log += 1
        with self._path().open("ab") as file:
            file.write(kept)

    def _path(self) -> Path:
        return self.folder / f"log-{self._log}.txt"


def _ends(path: Path, size: int, limit: int) -> bytes:
    """What is in a file; of a long one, its beginning and its end."""
    limit = max(limit, 0)
    with path.open("rb") as file:
        if size <= limit:
            return file.read(limit) + b"\n"
        first = file.read(limit // 2)
        file.seek(size - limit // 2)
        return first + f"\n[... {size - limit // 2 * 2} bytes left out ...]\n".encode() + file.read(limit // 2) + b"\n"


def table(rows: list[dict[str, Any]]) -> str:
    """A line for each step, with its figures on lines of their own below."""
    lines = [f"{'step':24}{'result':>12}{'seconds':>10}"]
    for row in rows:
        lines.append(f"{row['step']:24}{row['state']:>12}{row['seconds']:>10}")
        figures = {name: value for name, value in row.items() if name not in ("step", "state", "seconds", "passed")}
        for name, value in figures.items():
            text = f"{value:.4g}" if isinstance(value, float) else str(value)
            lines.append(f"    {name}: {' '.join(text.split())[:_WIDTH]}")
    return "\n".join(lines) + "\n"
