#!/usr/bin/env bash
# Runs uv, fetched with pip into .cache/uv where the machine has none.
# usage: tools/uv.sh [arguments of uv]; PYTHON_INTERPRETER names the Python whose pip fetches it
set -euo pipefail
if command -v uv >/dev/null && uv --version >/dev/null 2>&1; then
    exec uv "$@"
fi
fetched=$(dirname "$0")/../.cache/uv
if [ ! -x "$fetched/bin/uv" ]; then
    python=${PYTHON_INTERPRETER:-python3}
    "$python" -m pip --version >/dev/null 2>&1 ||
        { echo "setup: pip is missing for $python: install it (Debian: apt-get install python3-pip)" >&2; exit 1; }
    echo "setup: fetching uv with pip" >&2
    "$python" -m pip install --quiet --disable-pip-version-check --root-user-action ignore --target "$fetched" uv >&2
fi
exec "$fetched/bin/uv" "$@"
