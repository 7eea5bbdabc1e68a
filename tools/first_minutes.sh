#!/usr/bin/env bash
# Builds the wheel into dist/, and does with it what a newcomer does; writes the transcript into the guide.
set -euo pipefail
cd "$(dirname "$0")/.."
rm -rf dist
# A target folder of its own: maturin's flags would make the ordinary build start over, and the other way round.
.venv/bin/maturin build --release --locked --quiet --target-dir target/wheel --out dist >&2
.venv/bin/python -m tests.first_minutes --wheel dist/*.whl --transcript docs/guide/first-minutes.md
