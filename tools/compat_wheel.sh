#!/usr/bin/env bash
# Builds the wheel with the old import path into dist/, installs it where Shardwright's wheel is, and checks that it
# refuses to be mixed with another package of its name.
# usage: tools/compat_wheel.sh ENVIRONMENT
set -euo pipefail
cd "$(dirname "$0")/.."
python=$PWD/$1/bin/python
unset PYTHONPATH
work=out/compat-wheel
rm -rf "$work" dist/shardwright_smdistributed-*
mkdir -p "$work"
git ls-files -z compat | xargs -0 cp --parents --target-directory "$work"  # setuptools writes into the folder it builds

build() { # the environment that builds is the one that is installed into, as in pip install --no-build-isolation
    tools/uv.sh build --wheel --no-build-isolation --python .venv/bin/python --out-dir "$1" "$work/compat"
}
said=$(build dist 2>&1) || { printf '%s\n' "$said" >&2; exit 1; }
wheel=$(ls dist/shardwright_smdistributed-*.whl)
tools/uv.sh pip install --quiet --python "$python" --constraint requirements/development.txt "$wheel" >&2
import="import smdistributed.modelparallel.torch as smp; print(smp.DistributedModel.__module__)"
(cd "$work" && [ "$("$python" -c "$import")" = shardwright.model.distributed ])

# Another package of the name: a file that the wheel does not replace is what is left of it.
other=$work/other
mkdir -p "$other/smdistributed/modelparallel/torch"
touch "$other/smdistributed/modelparallel/__init__.py" "$other/smdistributed/modelparallel/torch/server.py"
refused() { # a text that the command has to fail with, and the command
    local said
    if said=$("${@:2}" 2>&1); then echo "$2: it was not refused" >&2; return 1; fi
    [[ $said == *"$1"* ]] || { printf '%s\n' "$said" >&2; return 1; }
}
PYTHONPATH=$PWD/$other refused "belongs to another package" build "$work/refused"
tools/uv.sh pip install --quiet --python "$python" --no-deps --target "$other" "$wheel" >&2
PYTHONPATH=$PWD/$other refused "by another package" "$python" -c "$import"
printf '%-10s %s\n' wheel "$(basename "$wheel")"
