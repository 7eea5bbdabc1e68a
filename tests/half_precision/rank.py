"""One rank of a job of a case; its arguments: the case's name, the configuration and the case's parameters, as JSON."""

import json
import sys

import shardwright as smp

from tests.half_precision import cases, more_cases, odd_cases, refusal_cases


def main() -> None:
    assert {more_cases.case, odd_cases.case, refusal_cases.case} == {cases.case}, "all register their cases"
    name, config, parameters = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
    smp.init(config)
    print(json.dumps(cases.CASES[name](**parameters)), flush=True)


if __name__ == "__main__":
    main()
