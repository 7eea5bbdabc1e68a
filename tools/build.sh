#!/usr/bin/env bash
# Builds the extension in release mode and puts it at EXTENSION in one move, so that running processes keep the old one.
# usage: tools/build.sh EXTENSION
set -euo pipefail
extension=$1
cd "$(dirname "$0")/.."
command -v cargo >/dev/null || { echo "build: cargo is missing: install Rust (https://rustup.rs)" >&2; exit 1; }
# PYO3_BUILD_EXTENSION_MODULE keeps libpython out of the link, as maturin does for wheels.
PYO3_BUILD_EXTENSION_MODULE=1 cargo build --release --quiet --package shardwright-py --target-dir target >&2
cp target/release/lib_core.so "$extension.new"
mv "$extension.new" "$extension"
