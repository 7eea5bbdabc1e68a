#!/usr/bin/env bash
# Installs cargo-deny into the folder ROOT.
# usage: tools/cargo_deny.sh ROOT
set -euo pipefail
echo "lint: building cargo-deny, once (some minutes)" >&2
# A quick build matters here, a quick program does not.
cargo install --quiet --locked --debug --no-default-features --version 0.20.2 --root "$1" cargo-deny >&2
