"""The parity command of what saves memory covers what it must, finds what is wrong, and holds in some of its cases."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.covering import covering
from tests.jobs.patience import HANG_SECONDS
from tests.parity.job import ROOT

from .cases import DividedCase, HalfCase, MemoryCase, PipelineCase, all_cases, feature_of, few
from .features import activation_offloading, optimizer_offloading, sharded_data_parallel
from .features.activation_checkpointing import HOWS, SCHEDULES, STRATEGIES
from .features.half_precision import LONG
from .features.optimizer_sharding import OPTIMIZERS
from .table import judge, render

CASES = [
    PipelineCase("layers", 2, 1, "simple", 4, feature="activation_checkpointing", how="each"),
    DividedCase("GPT-2", 2, 2, "interleaved", 2, feature="activation_checkpointing", how="whole"),
    PipelineCase("layers", 2, 2, "simple", 2, feature="optimizer_sharding", how="adamw, layers"),
    HalfCase(
        "language model",
        2,
        2,
        "simple",
        2,
        steps=LONG,
        feature="half_precision",
        how="fp16, adamw, sharded, checkpointed",
    ),
    next(one for one in sharded_data_parallel.CASES if one.pp == 2 and one.how == "checkpointed"),
]


def row(**changes: Any) -> dict[str, Any]:
    usual = {
        "worst": 1e-15,
        "where": "there",
        "failures": [],
        "parameters": 3,
        "forward": 4,
        "backward": 4,
        "recomputed": 2,
        "owned": 7,
        "overflows": 3,
        "distance": 1e-4,
        "sharded": 2,
        "whole": 1,
        "elements": 8,
        "held": 4,
        "streamed": 4096,
    }
    return usual | changes


def test_the_table_has_every_strategy_schedule_and_degree() -> None:
    cases = [case for case in all_cases() if case.feature == "activation_checkpointing"]
    assert len({case.name for case in cases}) == len(cases) >= 60
    pipelines = [case for case in cases if isinstance(case, PipelineCase)]
    assert {case.schedule for case in pipelines} >= {*SCHEDULES, "list", "program.csv", "program.txt", "auto"}
    for problem in ("layers", "attention"):
        assert {case.how for case in pipelines if case.problem == problem} >= set(HOWS)
    for strategy in STRATEGIES:
        assert {bool(case.keys) for case in pipelines if case.how == strategy} == {False, True}
    assert {(case.pp, case.dp) for case in pipelines} >= {(1, 1), (2, 1), (3, 1), (1, 2), (2, 2), (3, 2)}
    assert {(case.pp, case.tp, case.rdp) for case in cases if isinstance(case, DividedCase)} == {
        (1, 2, 1),
        (2, 2, 1),
        (1, 2, 2),
    }


def test_the_table_has_every_optimizer_dtype_and_pair_of_features() -> None:
    cases = all_cases()
    assert len({case.name for case in cases}) == len(cases) >= 150
    sharding = [case for case in cases if case.feature == "optimizer_sharding"]
    half = [case for case in cases if isinstance(case, HalfCase)]
    assert len(sharding) + len(half) >= 45
    assert {case.how.partition(", ")[0] for case in sharding} == {*OPTIMIZERS}
    assert {(case.pp, case.dp) for case in sharding if isinstance(case, PipelineCase)} >= {
        (1, 2),
        (2, 2),
        (1, 3),
        (3, 2),
    }
    assert {(case.pp, case.tp, case.rdp) for case in sharding if isinstance(case, DividedCase)} == {
        (1, 2, 1),
        (2, 2, 1),
        (1, 2, 2),
    }
    for kind in ("fp16", "bf16"):
        assert {(case.pp, case.dp) for case in half if case.how == f"{kind}, adamw" and case.steps == LONG} == {
            (1, 1),
            (2, 1),
            (1, 2),
            (2, 2),
        }
        ways = {case.how.removeprefix(f"{kind}, adamw") for case in half}
        assert ways >= {"", ", checkpointed", ", sharded", ", sharded, checkpointed"}


def test_the_small_choice_has_every_way_of_every_feature() -> None:
    chosen = covering(all_cases(), few)
    assert len(chosen) < len(all_cases()) / 5

    def ways(cases: list[MemoryCase]) -> set[tuple[str, str]]:
        return {(case.feature, way) for case in cases for way in feature_of(case).ways(case)}

    assert ways(chosen) == ways(all_cases())


def test_the_table_has_every_storage_horizon_schedule_and_degree_of_offloading() -> None:
    cases = [case for case in all_cases() if case.feature == activation_offloading.NAME]
    assert len({case.name for case in cases}) == len(cases) >= 50
    found = {tuple(case.how.split()) for case in cases if case.problem == "large layers"}
    assert {way[:2] for way in found} == {(to, str(horizon)) for to in ("host", "disk") for horizon in (1, 4, 100)}
    assert {way[2] for way in found} == set(activation_offloading.STRATEGIES)
    pipelines = [case for case in cases if isinstance(case, PipelineCase)]
    assert {case.schedule for case in pipelines} >= {*SCHEDULES, "list", "program.csv", "program.txt", "auto"}
    assert {bool(case.keys) for case in pipelines} == {False, True}
    assert {(case.pp, case.dp) for case in pipelines} >= {(1, 1), (2, 1), (3, 1), (1, 2), (2, 2)}
    assert {case.tp for case in cases if isinstance(case, DividedCase)} == {2}


def test_the_table_has_every_optimizer_place_and_pair_of_optimizer_offloading() -> None:
    cases = [case for case in all_cases() if case.feature == optimizer_offloading.NAME]
    assert len({case.name for case in cases}) == len(cases) >= 25
    pipelines = [case for case in cases if isinstance(case, PipelineCase)]
    assert {case.how.partition(", ")[0] for case in pipelines} == {*optimizer_offloading.OPTIMIZERS}
    assert {(case.pp, case.dp) for case in pipelines} >= {*optimizer_offloading.PLACES, (1, 3)}
    ways = {way for case in cases for way in optimizer_offloading.ways(case)}
    assert ways >= {"shard_optimizer_state", "sharded_data_parallel_degree", "offload_activations", "layers"}
    case = next(case for case in pipelines if case.problem == "large layers" and ", " not in case.how)
    ranks = case.pp * case.dp
    assert not judge(case, [row()] * ranks).failures
    assert judge(case, [row(streamed=0)] * ranks).failures


@pytest.mark.parametrize(
    ("horizon", "stored", "is_wrong"), [(1, 0, True), (1, 8, False), (100, 0, False), (100, 8, True)]
)
def test_tensors_go_out_unless_they_are_within_the_horizon(horizon: int, stored: int, is_wrong: bool) -> None:
    how = f"disk {horizon} layers"
    case = PipelineCase("large layers", 2, 1, "simple", 4, feature=activation_offloading.NAME, how=how)
    offloaded = {"stored": stored, "loaded": stored, "bytes": 0}
    assert bool(judge(case, [row(offloaded=offloaded)] * 2).failures) == is_wrong
    assert judge(case, [row(offloaded=offloaded | {"bytes": 4096})] * 2).failures


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{type(case).__name__} {case.feature}")
@pytest.mark.parametrize(
    "changed",
    [
        {"worst": 1e-9},
        {"forward": 0},
        {"backward": 0},
        {"recomputed": 0},
        {"failures": ["something"]},
        {"error": "ValueError: no"},
    ],
)
def test_a_case_fails_for_each_thing_that_can_be_wrong(case: MemoryCase, changed: dict[str, Any]) -> None:
    ranks = case.pp * case.dp
    assert not judge(case, [row()] * ranks).failures
    outcome = judge(case, [row(**changed)] * ranks)
    assert outcome.failures
    assert "FAILED" in render([outcome])
    assert judge(case, [row(), None]).failures


@pytest.mark.parametrize("changed", [{"owned": 0}, {"overflows": 0}, {"distance": 0.1}])
def test_sharding_and_half_precision_have_to_be_seen(changed: dict[str, Any]) -> None:
    assert judge(CASES[3], [row(**changed)] * 4).failures
    if "owned" in changed:
        assert judge(CASES[2], [row(**changed)] * 4).failures


@pytest.mark.parametrize("changed", [{"sharded": 0}, {"whole": 0}, {"held": 8}])
def test_shards_have_to_be_seen(changed: dict[str, Any]) -> None:
    assert judge(CASES[4], [row(**changed)] * 4).failures


def test_the_command_prints_a_table_and_counts() -> None:
    command = [sys.executable, "-m", "tests.parity_memory", "layers-pp1-dp1-simple*", "layers-pp2-dp1-list*"]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ}, capture_output=True, text=True, timeout=HANG_SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = json.loads(done.stdout.splitlines()[-1])
    assert counts["cases"] == 2
    assert not counts["failed"]
    assert counts["worst_rel_error"] < 1e-10
    assert done.stdout.count("exact") == 2
