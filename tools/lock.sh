#!/usr/bin/env bash
# Writes the lock files in requirements/ from their .in files: hashes, every Linux Python from 3.11 on, no index address.
set -euo pipefail
cd "$(dirname "$0")/.."
for source in requirements/*.in; do
    tools/uv.sh pip compile "$source" --output-file "${source%.in}.txt" --universal --python-version 3.11 --generate-hashes \
        --no-emit-index-url --no-annotate --custom-compile-command "make lock" --quiet
done
