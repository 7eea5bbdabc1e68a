#!/usr/bin/env bash
# Builds the extension with PROFILE (dev or release) and puts it at EXTENSION in one move, so that running processes keep
# the old one. It has, beside what wheels have, the faults that tests inject, unless FEATURES are given ("" for none).
# usage: tools/build.sh EXTENSION PROFILE [FEATURES]
set -euo pipefail
extension=$1 profile=$2 features=${3-faults}
cd "$(dirname "$0")/.."
command -v cargo >/dev/null || { echo "build: cargo is missing: install Rust (https://rustup.rs)" >&2; exit 1; }
# Without libpython, as maturin links wheels.
PYO3_BUILD_EXTENSION_MODULE=1 cargo build --profile "$profile" --quiet --package shardwright-py --features "$features" \
    --target-dir target >&2
folder=$profile
[ "$profile" != dev ] || folder=debug
cp "target/$folder/lib_core.so" "$extension.new"
mv "$extension.new" "$extension"
