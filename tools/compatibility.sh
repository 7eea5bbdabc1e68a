#!/usr/bin/env bash
# Runs the Python tests with the oldest supported torch (pinned) and the newest one published.
set -euo pipefail
cd "$(dirname "$0")/.."
declare -A versions
failed=0
for name in oldest newest; do
    environment=.cache/compatibility/$name
    [ -x "$environment/bin/python" ] ||
        tools/uv.sh venv --quiet --no-python-downloads --python .venv/bin/python "$environment" >&2
    if [ $name = oldest ]; then
        tools/uv.sh pip sync --quiet --require-hashes --python "$environment/bin/python" requirements/oldest.txt >&2
    else
        tools/uv.sh pip install --quiet --upgrade --python "$environment/bin/python" \
            torch transformers numpy rich libucx-cu12 hypothesis pytest pytest-timeout pytest-xdist >&2
    fi
    versions[$name]=$("$environment/bin/python" -c 'import torch; print(torch.__version__)')
    echo "compatibility: torch ${versions[$name]}" >&2
    outcome=passed
    "$environment/bin/python" -m pytest --quiet -n2 --dist=loadfile >&2 || { outcome=FAILED failed=$((failed + 1)); }
    printf '%-8s torch %-16s %s\n' $name "${versions[$name]}" $outcome
done
printf '{"oldest": "%s", "newest": "%s", "failed": %d}\n' "${versions[oldest]}" "${versions[newest]}" $failed
exit $((failed > 0))
