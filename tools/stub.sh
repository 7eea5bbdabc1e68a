#!/usr/bin/env bash
# Writes python/shardwright/_core.pyi from the signatures that the extension carries; with --check, compares it instead.
# usage: tools/stub.sh [--check]
set -euo pipefail
cd "$(dirname "$0")/.."
stub=python/shardwright/_core.pyi
made=$(mktemp -d)
trap 'rm -rf "$made"' EXIT
.cache/tools/bin/pyo3-introspection python/shardwright/_core.abi3.so _core "$made"
made_stub=$(find "$made" -name '*.pyi')
.venv/bin/python - "$made_stub" <<'PYTHON'
"""Takes out what the feature `faults` adds, which no wheel has."""
import ast
import sys
from pathlib import Path

stub = Path(sys.argv[1])
lines = stub.read_text().splitlines(keepends=True)
(added,) = [
    node for node in ast.walk(ast.parse("".join(lines))) if getattr(node, "name", "") == "in_process_with_faults"
]
del lines[added.decorator_list[0].lineno - 1 : added.end_lineno]
first = next(number for number, line in enumerate(lines) if line.startswith(("from ", "import ")))
lines[first:first] = ["from collections.abc import Callable, Sequence\n", "import torch\n"]  # what annotations name
stub.write_text("".join(lines))
PYTHON
.venv/bin/ruff check --quiet --fix --select I,UP037 --stdin-filename "$stub" - <"$made_stub" |
    .venv/bin/ruff format --quiet --stdin-filename "$stub" - >"$made/formatted"
if [ "${1:-}" = --check ]; then
    diff -u "$stub" "$made/formatted" >&2 || { echo "stub: $stub is stale: run make stub" >&2; exit 1; }
else
    cp "$made/formatted" "$stub"
fi
