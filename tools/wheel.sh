#!/usr/bin/env bash
# Builds the wheels into dist/, installs them into an empty environment and trains the example there on two ranks.
set -euo pipefail
cd "$(dirname "$0")/.."
rm -rf dist
# A target folder of its own: maturin's flags would make the ordinary build start over, and the other way round.
.venv/bin/maturin build --release --locked --quiet --target-dir target/wheel --out dist >&2
wheel=$(ls dist/shardwright-*.whl)

environment=out/wheel-environment
tools/uv.sh venv --quiet --clear --no-python-downloads --python .venv/bin/python "$environment" >&2
tools/uv.sh pip install --quiet --python "$environment/bin/python" --constraint requirements/development.txt \
    "$wheel[hf]" >&2
unset PYTHONPATH
export OMP_NUM_THREADS=1 SM_HP_MP_PARAMETERS='{"pipeline_parallel_degree": 2}'
"$environment/bin/shardwright" doctor >&2
tools/compat_wheel.sh "$environment"
script=$PWD/examples/train_gpt.py
cd "$environment"
report=$(bin/python -m torch.distributed.run --standalone --nproc-per-node 2 "$script" --steps 40 | tail -n 1)
printf '%-10s %s\n' wheel "$(basename "$wheel")" training "$report"
bin/python - "$(basename "$wheel")" "$report" <<'PYTHON'
import json
import sys
from pathlib import Path

from shardwright import _core

wheel, report = sys.argv[1], json.loads(sys.argv[2])
# The faults that tests inject between ranks are in no wheel.
assert not hasattr(_core.Node, "in_process_with_faults")
assert b"is not a fault; there are" not in Path(_core.__file__).read_bytes()
assert report["ranks"] == 2 and report["remote_requests"] > 0, report
assert report["loss_last"] < report["loss_first"], report
print(json.dumps({"wheel": wheel, "loss_first": report["loss_first"], "loss_last": report["loss_last"]}))
PYTHON
