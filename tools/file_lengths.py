"""Fails when a source file of the project has more lines than a reader keeps in mind."""

import subprocess
import sys
from pathlib import Path

LIMIT = 400


def main() -> int:
    """List the tracked source files that are too long."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.rs", "*.py"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    too_long = 0
    for name in listing:
        path = Path(name)
        num_lines = len(path.read_text().splitlines()) if path.exists() else 0
        if num_lines > LIMIT:
            print(f"{name}: {num_lines} lines; at most {LIMIT}", file=sys.stderr)
            too_long += 1
    return int(too_long > 0)


if __name__ == "__main__":
    sys.exit(main())
