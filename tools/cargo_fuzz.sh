#!/usr/bin/env bash
# Installs cargo-fuzz into the folder ROOT.
# usage: tools/cargo_fuzz.sh ROOT
set -euo pipefail
echo "fuzz: building cargo-fuzz, once (some minutes)" >&2
cargo install --quiet --locked --debug --version 0.13.2 --root "$1" cargo-fuzz >&2
