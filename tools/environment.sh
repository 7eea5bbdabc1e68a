#!/usr/bin/env bash
# Builds the Python environment VENV from the lock file LOCK with uv (fetched with pip where it is missing).
# usage: tools/environment.sh VENV LOCK
set -euo pipefail
venv=$1 lock=$2
cd "$(dirname "$0")/.."

fail() { echo "setup: $1" >&2; exit 1; }

[ "$(uname -s)" = Linux ] || fail "Shardwright runs on Linux only; this is $(uname -s)"
command -v cargo >/dev/null || fail "cargo is missing: install Rust (https://rustup.rs)"
command -v cc >/dev/null || fail "a C compiler is missing: install gcc or clang (Debian: apt-get install gcc)"

python=
for candidate in "${PYTHON_INTERPRETER:-python3}" python3.14 python3.13 python3.12 python3.11; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        python=$candidate
        break
    fi
done
[ -n "$python" ] || fail "Python 3.11 or newer is missing (found: $(python3 --version 2>&1 || echo none))"

"$venv/bin/python" -c '' 2>/dev/null || PYTHON_INTERPRETER=$python tools/uv.sh venv --quiet --clear --no-python-downloads --python "$python" "$venv" >&2
echo "setup: installing the Python packages of $lock" >&2
PYTHON_INTERPRETER=$python tools/uv.sh pip sync --quiet --compile-bytecode --require-hashes --python "$venv/bin/python" "$lock" >&2
# The package is used from where it stands, and so is its command.
"$venv/bin/python" - "$PWD/python" <<'PYTHON'
import sys
import sysconfig
from pathlib import Path

Path(sysconfig.get_path("purelib"), "shardwright.pth").write_text(sys.argv[1] + "\n")
command = Path(sysconfig.get_path("scripts"), "shardwright")
command.write_text(f"#!{sys.executable}\nimport sys\n\nfrom shardwright.command import main\n\nsys.exit(main())\n")
command.chmod(0o755)
PYTHON
