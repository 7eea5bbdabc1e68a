"""Steps over real ranks in the order of a list, of a program, and of a choice from measurements."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from shardwright import _core
from shardwright.config import load_config
from shardwright.errors import ConfigError
from shardwright.scheduling import RankMemory, ScheduleDecision, StepTimes, decide, tune

from tests.jobs.patience import slowdown
from tests.jobs.ranks import outputs_of_ranks

PROGRAM = Path(__file__).with_name("driven_program.py")
#: Backward in an order that no policy has.
STARTS = [
    (0, "forward"), (1, "forward"), (1, "backward"), (2, "forward"), (3, "forward"), (2, "backward"), (0, "backward"),
    (3, "backward"),
]  # fmt: skip
#: torch's compute-only CSV of one stage per rank, with backwards in an order of its own, the same on both ranks.
ONE_STAGE = "0F0,0F1,0F2,0B1,0B0,0F3,0B3,0B2\n1F0,1F1,1B1,1F2,1B0,1F3,1B3,1B2\n"
TWO_STAGES = (
    "0F0,0F1,2F0,2F1,2B0,2B1,0B0,0B1,0F2,2F2,0F3,2F3,2B3,0B3,2B2,0B2\n"
    "1F0,1F1,3F0,3B0,3F1,3B1,1B0,1B1,1F2,3F2,1F3,3F3,3B3,1B3,3B2,1B2\n"
)
SPLIT = (
    "shardwright program 1\n"
    "rank 0: 0F0 0F1 0I0 0F2 0W0 0I1 0F3 0I2 0W2 0W1 0B3\n"
    "rank 1: 1F0 1I0 1F1 1W0 1I1 1F2 1I2 1F3 1I3 1W3 1W2 1W1\n"
)
DEADLOCK = "0F0,0B0,0F1,0B1,0F2,0B2,0F3,0B3\n1F0,1F1,1B0,1B1,1F2,1F3,1B2,1B3\n"
CIRCLE = (
    "the ranks wait for each other: rank 0 stands at 0B0, which needs 1B0 of rank 1, where 1F1 comes first; "
    "rank 1 stands at 1F1, which needs 0F1 of rank 0, where 0B0 comes first"
)
KEYS = {"pipeline_parallel_degree": 2, "microbatches": 4}


def chain(pipeline: Any, places: str = "0011", **more: Any) -> dict[str, Any]:
    return {"keys": {**KEYS, "pipeline": pipeline}, "places": [int(p) for p in places], "steps": 3, **more}


def limited(pipeline: str, limit: int) -> dict[str, Any]:
    case = chain(pipeline)
    case["keys"]["memory_limit_bytes"] = limit
    return case


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What came of all cases on either rank; they share two processes."""
    folder = tmp_path_factory.mktemp("programs")

    def file(name: str, text: str) -> str:
        (folder / name).write_text(text)
        return str(folder / name)

    one, two, split = file("one.csv", ONE_STAGE), file("two", TWO_STAGES), file("split.txt", SPLIT)
    two_of_own = file("own", _core.read_program(TWO_STAGES))
    cases = {
        "list": chain(STARTS, evaluations=1),
        "list, some without backward": chain(STARTS, without_backward=[1, 2], evaluations=1),
        "one stage": chain(one, evaluations=2),
        "one stage, block by block": chain(one, blocks=True, evaluations=2),
        "one stage, some without backward": chain(one, blocks=True, without_backward=[0, 3]),
        "one stage, frozen": chain(one, frozen=[0, 1, 2, 3][2:], places="0110"),
        "one stage, all of the rank frozen": chain(one, frozen=[0, 1], places="1100"),
        "two stages": chain(two, places="0101"),
        "two stages, block by block": chain(two_of_own, places="0101", blocks=True),
        "in parts": chain(split, evaluations=1),
        "in parts, block by block": chain(split, blocks=True),
        "recorded": chain("zero_bubble", places="0101", trace=str(folder / "recorded")),
        "run as recorded": chain(str(folder / "recorded" / "program.txt"), places="0101"),
        "deadlock": chain(file("deadlock.csv", DEADLOCK)),
        "too few stages": chain(two, places="0011"),
        "auto": chain("auto") | {"steps": 6},
        "auto, a step fails": chain("auto", failing=[2], evaluations=1) | {"steps": 7},
        "tuned": chain("zero_bubble", places="0101", trace=str(folder / "tuned"), evaluations=1) | {"steps": 7},
        "tuned, a step fails": chain("zero_bubble", failing=[2]) | {"steps": 8},
        "tuned under limits": limited("zero_bubble", 1 << 40) | {"steps": 6},
        "interleaved under limits": limited("interleaved", 1) | {"steps": 6},
        "some split": chain("zero_bubble", places="0101", trace=str(folder / "some"), splits=[1, 3]),
        "none split": chain("zero_bubble", places="0101", trace=str(folder / "none"), splits=[0, 0]),
        "list, a step fails": chain(STARTS, failing=[1]),
        "in parts, a step fails": chain(split, failing=[1]),
    }
    return results(outputs_of_ranks(PROGRAM, json.dumps(cases)))


def results(outputs: list[str]) -> list[dict[str, Any]]:
    lines = [next(line for line in output.splitlines() if line.startswith("found: ")) for output in outputs]
    return [json.loads(line.removeprefix("found: ")) for line in lines]


LOOPED = ("interleaved", "zero_bubble")


@pytest.fixture(scope="module")
def looped(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Three ranks with two stages each, under the textbook's programs and the policy ``looped``."""
    folder = tmp_path_factory.mktemp("looped")
    pipelines = {"looped": "looped"}
    for name in LOOPED:
        path = folder / name
        path.write_text(_core.reference_program(name, ranks=3, microbatches=6, stages_per_rank=2))
        pipelines[name] = str(path)
    cases = {}
    for name, pipeline in pipelines.items():
        keys = {"pipeline_parallel_degree": 3, "microbatches": 6, "pipeline": pipeline}
        for blocks in (False, True):
            places = [0, 1, 2, 0, 1, 2]
            cases[f"{name} {blocks}"] = {"keys": keys, "places": places, "steps": 3, "blocks": blocks}
    return results(outputs_of_ranks(PROGRAM, json.dumps(cases), ranks=3))


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("name", LOOPED)
def test_several_stages_per_rank_run_as_their_program_says(
    looped: list[dict[str, Any]], name: str, blocks: bool
) -> None:
    text = _core.reference_program(name, ranks=3, microbatches=6, stages_per_rank=2)
    for rank, result in enumerate(looped):
        assert "error" not in result[f"{name} {blocks}"], result
        assert result[f"{name} {blocks}"]["worst"] < 1e-12
        if rank:
            assert served(looped, f"{name} {blocks}", rank) == listed(text, rank)


@pytest.mark.parametrize("blocks", [False, True])
def test_several_stages_per_rank_run_exactly_under_their_policy(looped: list[dict[str, Any]], blocks: bool) -> None:
    for rank, result in enumerate(looped):
        found = result[f"looped {blocks}"]
        assert "error" not in found, found["error"]
        assert found["worst"] < 1e-12
        assert (found["schedule"], found["live"]) == ("looped(active=6)", 0)
        if rank:
            # Either stage forward and backward once for every microbatch, whatever came first.
            twice = [(kind, m) for kind in ("backward", "forward") for m in range(6) for _ in range(2)]
            assert sorted(served(looped, f"looped {blocks}", rank)) == twice


@pytest.mark.parametrize(
    "name",
    [
        "list", "list, some without backward", "one stage", "one stage, block by block",
        "one stage, some without backward", "one stage, frozen", "one stage, all of the rank frozen", "two stages",
        "two stages, block by block", "in parts", "in parts, block by block", "auto", "auto, a step fails",
        "list, a step fails", "in parts, a step fails", "recorded", "run as recorded",
        "tuned", "tuned, a step fails", "tuned under limits", "interleaved under limits", "some split", "none split",
    ],
)  # fmt: skip
def test_gradients_are_those_of_one_process(found: list[dict[str, Any]], name: str) -> None:
    for rank in found:
        assert "error" not in rank[name], rank[name]["error"]
        assert rank[name]["worst"] < 1e-12
        assert rank[name]["live"] == 0


def tasks(found: list[dict[str, Any]], name: str, rank: int, *kinds: str) -> list[tuple[str, int]]:
    """The phases and microbatches of a rank's tasks of these kinds, in the order in which they ran."""
    records = [record for record in found[0][name]["records"] if record[0] == rank and record[1] in kinds]
    return [(phase, microbatch) for _, _, phase, microbatch, _ in sorted(records, key=lambda record: record[4])]


def first_of_each(ran: list[tuple[str, int]]) -> list[tuple[str, int]]:
    return list(dict.fromkeys(ran))


def test_the_root_starts_in_the_order_of_the_list(found: list[dict[str, Any]]) -> None:
    expected = [(phase, microbatch) for microbatch, phase in STARTS]
    assert first_of_each(tasks(found, "list", 0, "root")) == expected
    passed_over = [(phase, m) for phase, m in expected if phase == "forward" or m not in (1, 2)]
    assert first_of_each(tasks(found, "list, some without backward", 0, "root")) == passed_over


def test_steps_that_fail_are_not_measured(found: list[dict[str, Any]]) -> None:
    decisions = [rank["auto, a step fails"]["decision"] for rank in found]
    assert decisions[0] == decisions[1] is not None
    assert (decisions[0]["step"], decisions[0]["measured_steps"]) == (6, [4, 5])


def listed(text: str, rank: int) -> list[tuple[str, int]]:
    """What a program says of a rank, as records name it."""
    line = _core.read_program(text).splitlines()[1 + rank]
    kinds = {"F": "forward", "B": "backward", "I": "backward", "W": "weight"}
    cells = [re.fullmatch(r"(\d+)([FBIW])(\d+)", cell) for cell in line.split()[2:]]
    return [(kinds[cell[2]], int(cell[3])) for cell in cells if cell is not None]


def served(found: list[dict[str, Any]], name: str, rank: int) -> list[tuple[str, int]]:
    """What a rank other than the root did, in order."""
    kinds = ("forward", "backward", "weight")
    records = [record for record in found[0][name]["records"] if record[0] == rank and record[1] in kinds]
    return [(kind, microbatch) for _, kind, _, microbatch, _ in sorted(records, key=lambda record: record[4])]


@pytest.mark.parametrize(("name", "text"), [("one stage", ONE_STAGE), ("two stages", TWO_STAGES), ("in parts", SPLIT)])
def test_every_rank_does_what_its_program_says_in_its_order(found: list[dict[str, Any]], name: str, text: str) -> None:
    assert served(found, name, 1) == listed(text, 1)
    if name == "one stage":
        ran = tasks(found, name, 0, "root")
        forwards = [m for phase, m in first_of_each(ran) if phase == "forward"]
        assert forwards == [m for kind, m in listed(text, 0) if kind == "forward"]
        # A step function has reached its end when its own stage has run backward: the last slice of its microbatch.
        ends = sorted(range(4), key=lambda m: max(i for i, (_, other) in enumerate(ran) if other == m))
        assert ends == [m for kind, m in listed(text, 0) if kind == "backward"]


def test_a_recorded_step_s_program_runs_others_in_its_order(found: list[dict[str, Any]]) -> None:
    program = found[0]["run as recorded"]["schedule"]
    assert served(found, "recorded", 1) == listed(program, 1) == served(found, "run as recorded", 1)
    assert {kind for kind, _ in listed(program, 1)} == {"forward", "backward", "weight"}


def test_a_deadlock_is_refused_before_the_job_starts_and_names_its_circle_on_every_rank(
    found: list[dict[str, Any]],
) -> None:
    for rank in found:
        error = rank["deadlock"]["error"]
        assert error.startswith("ConfigError")
        assert CIRCLE in error
        assert "deadlock.csv" in error


def test_a_model_that_does_not_fit_its_program_ends_in_an_error_on_every_rank(found: list[dict[str, Any]]) -> None:
    for rank in found:
        misfit = rank["too few stages"]
        assert misfit["error"].startswith("StallError"), misfit
        assert "the model does not fit the program" in misfit["error"]
        assert "of the program, " in misfit["error"]
        assert misfit["seconds"] < 15 * slowdown()


def test_the_fastest_schedule_is_chosen_at_the_same_step_on_all_ranks(found: list[dict[str, Any]]) -> None:
    decisions = [rank["auto"]["decision"] for rank in found]
    assert decisions[0] == decisions[1] is not None
    assert (decisions[0]["step"], decisions[0]["measured_steps"]) == (5, [3, 4])
    assert found[0]["auto"]["schedule"] == decisions[0]["schedule"] in decisions[0]["simulated_seconds"]
    assert found[0]["auto"]["report"] == [decisions[0]["schedule"]]


def weights(found: list[dict[str, Any]], name: str, rank: int) -> set[int]:
    """Of which microbatches a rank computed weight gradients apart from their backward."""
    return {m for _, m in tasks(found, name, rank, "weight")}


def test_only_the_last_backwards_are_split_on_each_rank(found: list[dict[str, Any]]) -> None:
    assert [weights(found, "some split", rank) for rank in (0, 1)] == [{3}, {1, 2, 3}]
    assert [weights(found, "none split", rank) for rank in (0, 1)] == [set(), set()]
    assert [weights(found, "recorded", rank) for rank in (0, 1)] == [{0, 1, 2, 3}] * 2


def test_zero_bubble_splits_what_its_choice_says_from_the_same_step_on(found: list[dict[str, Any]]) -> None:
    decision = found[0]["tuned"]["decision"]
    assert decision == found[1]["tuned"]["decision"] is not None
    assert (decision["step"], decision["measured_steps"], decision["fits"]) == (5, [3, 4], True)
    assert found[0]["tuned"]["schedule"] == decision["schedule"]
    for rank, number in enumerate(decision["splits"]):
        assert weights(found, "tuned", rank) == set(range(4 - number, 4))
        assert 1 <= decision["in_flight"][rank] <= 4
    chosen = decision["simulated_seconds"][decision["schedule"]]
    whole, _, _ = decision["simulated_seconds"].values()
    assert chosen <= whole
    failed = found[0]["tuned, a step fails"]["decision"]
    assert (failed["step"], failed["measured_steps"]) == (6, [4, 5])


def test_a_limit_on_memory_bounds_what_is_in_flight(found: list[dict[str, Any]]) -> None:
    ample, none = (found[1][f"{name} under limits"]["decision"] for name in ("tuned", "interleaved"))
    assert ample["fits"]
    assert ample["schedule"].startswith("zero_bubble")
    # Parameters alone take more.
    assert (none["schedule"], none["fits"]) == ("interleaved(active=1)", False)
    assert (none["splits"], none["in_flight"]) == ([0, 0], [1, 1])


def test_a_choice_of_splits_waits_for_three_steps_and_keeps_limits() -> None:
    def load(step: int, backward: int, weight: int) -> StepTimes:
        return StepTimes(step, 400, backward, 1e-6, 4, weight)

    steps = [load(2, 1, 1), load(3, 480, 400), load(4, 800, 0)]

    def choose(number: int, *free: int | None) -> tuple[int, ScheduleDecision | None]:
        memory = [RankMemory(10, each) for each in free]
        bounds = {"microbatches": 4, "active_microbatches": 4, "control": "predicted"}
        return tune(5, [steps[:number]] * 2, memory, may_split=True, **bounds)

    assert choose(2, None, None) == (2, None)
    number, chosen = choose(3, None, None)
    assert chosen is not None
    assert (number, chosen.step, chosen.measured_steps, chosen.fits) == (3, 5, [3, 4], True)
    assert max(chosen.in_flight or []) > 1
    assert sum(chosen.splits or []) > 0
    _, bound = choose(3, 10, None)
    assert bound is not None
    assert (bound.in_flight or [])[0] == 1
    _, none = choose(3, 9, None)
    assert none is not None
    assert not none.fits


def test_the_same_bits_need_a_schedule_that_no_measurement_chooses() -> None:
    for keys, chooses in (({}, True), ({"deterministic_server": True}, False)):
        config = load_config({**KEYS, "pipeline": "zero_bubble", **keys}, {}, {})
        assert config.chooses_active_microbatches() == chooses
        assert config.schedule() == f"zero_bubble(active={2 if chooses else 4})"
    assert not load_config(KEYS, {}, {}).chooses_active_microbatches()
    assert load_config({**KEYS, "memory_limit_bytes": 1 << 30}, {}, {}).schedule() == "interleaved(active=2)"


def times(step: int, backward: int = 20) -> StepTimes:
    return StepTimes(step, forward_ns=40, backward_ns=4 * backward, seconds=1e-6, visits=4)


def test_a_choice_waits_for_three_steps_that_all_ranks_have_and_that_ran_backward() -> None:
    def choose(*ranks: list[StepTimes]) -> ScheduleDecision | None:
        return decide(9, list(ranks), microbatches=4, active_microbatches=4, control="star")

    two = [times(2), times(3)]
    assert choose(two, two) is None
    assert choose([*two, times(4)], [*two, times(5)]) is None
    assert choose([*two, times(4, 0)], [*two, times(4, 0)]) is None
    chosen = choose([*two, times(5)], [*two, times(4), times(5)])
    assert chosen is not None
    assert (chosen.step, chosen.measured_steps, chosen.schedule) == (9, [3, 5], "zero_bubble(active=2)")
    assert chosen.schedule in chosen.simulated_seconds
    only = choose([times(2, 0), times(3, 0), times(4, 0)], [times(2), times(3), times(4)])
    assert only is not None


def refusal(pipeline: Any, **more: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        load_config({**KEYS, "microbatches": 2, "pipeline": pipeline, **more}, {}, {})
    return str(refused.value)


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ([(0, "forward"), (2, "forward")], '[2, "forward"] at index 1; allowed: microbatches from 0 to 1'),
        ([(0, "backward")], '[0, "backward"] at index 0; allowed: a backward only behind [0, "forward"]'),
        ([(0, "forward"), (0, "forward")], "at index 1; allowed: each entry once; it stands at index 0 too"),
        ([(0, "forward"), (0, "back")], '[0,"back"] at index 1; allowed: a microbatch from 0 to 1 and "forward" or'),
        ([(0, "forward"), 3], "3"),
        ([(0, "forward"), (1, "forward"), (0, "backward")], 'without [1, "backward"]'),
        ([], "[]; allowed:"),
    ],
)
def test_a_list_with_a_mistake_is_refused_with_its_index(entries: list[Any], said: str) -> None:
    assert said in refusal(entries)


def test_a_list_that_has_more_in_flight_than_allowed_is_refused() -> None:
    entries = [(0, "forward"), (1, "forward"), (0, "backward"), (1, "backward")]
    assert "has 2 microbatches in flight at once; allowed: 2 or more" in refusal(entries, active_microbatches=1)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0F0,0B0\n1F0,1B0\n", 'it has 1 microbatches; allowed: 2, the value of "microbatches"'),
        ("0F0,0F1,0B0,0B1\n", 'it has 1 ranks; allowed: 2, as many as "pipeline_parallel_degree"'),
        ("1F0,1F1,1B0,1B1\n0F0,0F1,0B0,0B1\n", "stage 0 is on rank 1; allowed: rank 0, the root"),
        ("0F0,0F1,0B0,0B1\n1F0,1F1,1B0\n", "1B1 is missing"),
        ("0F0,0X1\n", "row 1 (rank 0), cell 2: "),
        ("shardwright program 9\n", "this is a program of format version 9"),
    ],
)
def test_a_file_that_does_not_fit_the_job_is_refused_by_name(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "program").write_text(text)
    refused = refusal(str(tmp_path / "program"))
    assert said in refused
    assert str(tmp_path / "program") in refused


def test_what_is_neither_a_name_nor_a_file_is_refused() -> None:
    refused = refusal("interleavd")
    assert "'interleavd'; allowed: " in refused
    assert "there is no file to read" in refused


def test_a_configuration_with_a_program_reads_back_as_itself(tmp_path: Path) -> None:
    (tmp_path / "program.csv").write_text("0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n")
    config = load_config({**KEYS, "microbatches": 2, "pipeline": str(tmp_path / "program.csv")}, {}, {})
    assert config.pipeline.startswith("shardwright program 1\n")
    assert load_config(config.to_dict(), {}, {}) == config
    listed = load_config({**KEYS, "microbatches": 1, "pipeline": [(0, "forward"), (0, "backward")]}, {}, {})
    assert listed.schedule() == "list(0F 0B)"
    assert load_config(listed.to_dict(), {}, {}) == listed
