#!/usr/bin/env bash
# Writes python/shardwright/_core.pyi from the extension's own signatures; with --check, compares it instead.
# usage: tools/stub.sh [--check]
set -euo pipefail
cd "$(dirname "$0")/.."
stub=python/shardwright/_core.pyi
made=$(mktemp -d)
trap 'rm -rf "$made"' EXIT
# A target folder of its own: the signatures are compiled in for this purpose only.
.venv/bin/maturin generate-stubs --quiet --out "$made" --features pyo3/experimental-inspect \
    --profile dev --target-dir target/stub >&2
made_stub=$(find "$made" -name '*.pyi')
.venv/bin/ruff check --quiet --fix --select I,UP037 --stdin-filename "$stub" - <"$made_stub" |
    .venv/bin/ruff format --quiet --stdin-filename "$stub" - >"$made/formatted"
if [ "${1:-}" = --check ]; then
    diff -u "$stub" "$made/formatted" >&2 || { echo "stub: $stub is stale: run make stub" >&2; exit 1; }
else
    cp "$made/formatted" "$stub"
fi
