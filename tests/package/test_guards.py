"""The table of what is replaced is complete, and each is replaced only when it says."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from shardwright.guards import TABLE
from shardwright.patches import Guard, When

from tests.jobs.ranks import outputs_of_ranks

ROOT = Path(__file__).parents[2]
PROGRAM = ("-m", "tests.package.guarded_rank")


class Layout(NamedTuple):
    """How a job is laid out, what it needs, and what its ranks come to besides starting and ending."""

    ranks: int
    configuration: dict[str, Any]
    needed: set[When]
    moments: set[str]


_SEVERAL = {When.JOB, When.SEVERAL_RANKS}
LAYOUTS = {
    "one rank": Layout(1, {}, {When.JOB}, {"stepping", "verified"}),
    "replicas": Layout(2, {"ddp": True}, _SEVERAL, {"stepping", "verified"}),
    "a pipeline": Layout(
        2,
        {"pipeline_parallel_degree": 2},
        {*_SEVERAL, When.PIPELINED, When.DIVIDED},
        {"stepping", "traced", "verified"},
    ),
    "tensor parallelism": Layout(
        2, {"tensor_parallel_degree": 2, "ddp": True}, {*_SEVERAL, When.DIVIDED}, {"stepping"}
    ),
}


def place(guard: Guard) -> str:
    owner = guard.owner
    name = f"{owner.__module__}.{owner.__qualname__}" if isinstance(owner, type) else owner.__name__
    return f"{name}.{guard.name}"


def listed(*whens: When) -> set[str]:
    return {place(guard) for guard in TABLE if guard.when in whens}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_what_is_replaced_is_what_the_table_says(layout: Layout) -> None:
    configuration = {"auto_partition": False, "default_partition": 0, "microbatches": 2, **layout.configuration}
    ranks = [
        [json.loads(line) for line in output.splitlines()]
        for output in outputs_of_ranks(*PROGRAM, json.dumps(configuration), ranks=layout.ranks, folder=ROOT)
    ]
    started = listed(*layout.needed)
    expected = {
        "created": listed(When.CREATED),
        "before": set(),
        "started": started,
        "stepping": started,
        "traced": started | listed(When.TRACED),
        "verified": started | listed(When.VERIFIED),
        "ended": set(),
        "registered": listed(When.REGISTERED),
    }
    told = [line for lines in ranks for line in lines if "replaced" in line]
    merged = {
        line["moment"]: set().union(*(set(each["replaced"]) for each in told if each["moment"] == line["moment"]))
        for line in told
    }
    for moment, names in merged.items():
        assert names == expected[moment], moment
    for lines in ranks:
        assert {"created", "before", "started", "ended", "registered"} <= {line["moment"] for line in lines}
    assert merged.keys() & {"stepping", "traced", "verified"} == layout.moments
    refused = [line["refused"] for lines in ranks for line in lines if "refused" in line]
    assert len(refused) == (3 if layout.ranks == 1 else 0)
    for text in refused:
        assert "outside the step function, once per step" in text


def test_each_is_in_the_table_once_for_a_time_and_with_a_reason() -> None:
    places = [(place(guard), guard.when) for guard in TABLE]
    assert len(places) == len(set(places))
    for guard in TABLE:
        assert guard.why
        assert "\n" not in guard.why


@pytest.mark.parametrize("test", sorted({guard.test for guard in TABLE}))
def test_the_tests_that_it_names_are_there(test: str) -> None:
    path, _, name = test.partition("::")
    functions = {node.name for node in ast.parse((ROOT / path).read_text()).body if isinstance(node, ast.FunctionDef)}
    assert name.startswith("test_")
    assert name in functions
