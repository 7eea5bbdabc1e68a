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
.venv/bin/ruff check --quiet --fix --select I,UP037 --stdin-filename "$stub" - <"$made_stub" |
    .venv/bin/ruff format --quiet --stdin-filename "$stub" - >"$made/formatted"
if [ "${1:-}" = --check ]; then
    diff -u "$stub" "$made/formatted" >&2 || { echo "stub: $stub is stale: run make stub" >&2; exit 1; }
else
    cp "$made/formatted" "$stub"
fi
