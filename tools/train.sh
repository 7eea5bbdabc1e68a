#!/usr/bin/env bash
# Trains examples/train_gpt.py on RANKS processes of this machine, one thread each, with pipeline degree PP.
# usage: tools/train.sh RANKS PP [arguments of the script]
set -euo pipefail
ranks=$1 pipeline=$2
shift 2
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1 SM_HP_MP_PARAMETERS="{\"pipeline_parallel_degree\": $pipeline}"
exec .venv/bin/python -m torch.distributed.run --standalone --nproc-per-node "$ranks" examples/train_gpt.py "$@"
