#!/usr/bin/env bash
# Installs a tool that is a Rust package into the folder ROOT.
# usage: tools/cargo_tool.sh ROOT PACKAGE VERSION [OPTION]...
set -euo pipefail
root=$1 package=$2 version=$3
shift 3
echo "building $package, once (a minute or more)" >&2
# A quick build matters here, a quick program does not.
CARGO_PROFILE_DEV_DEBUG=0 cargo install --quiet --locked --debug "$@" --version "$version" --root "$root" "$package" >&2
