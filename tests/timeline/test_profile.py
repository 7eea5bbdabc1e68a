"""``smp.profile``: PyTorch's profiler on all ranks, in one trace."""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.ranks import outputs_of_ranks

PROGRAM = Path(__file__).with_name("profile_program.py")
Event = dict[str, Any]


def found_by(folder: Path, job: str, scenario: str, ranks: int = 2) -> tuple[list[dict[str, Any]], list[str]]:
    """What each rank has found, and all that it wrote."""
    outputs = outputs_of_ranks(PROGRAM, str(folder), job, scenario, ranks=ranks)
    lines = [next(line for line in output.splitlines() if line.startswith("found: ")) for output in outputs]
    return [json.loads(line.removeprefix("found: ")) for line in lines], outputs


def events_of(path: Path) -> list[Event]:
    """The events of a trace, which is one that Perfetto reads."""
    text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text()
    events: list[Event] = json.loads(text)["traceEvents"]
    for event in events:
        assert {"ph", "pid", "tid", "ts", "name"} <= set(event), event
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["ph"] != "X" or event["dur"] >= 0
    return events


def named(events: list[Event], what: str) -> dict[tuple[int, int], str]:
    """What processes, or threads, are called."""
    return {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == what}


def check_processes(events: list[Event], stages: list[int]) -> None:
    """Each rank is a process."""
    processes = named(events, "process_name")
    assert processes == {(rank, 0): f"rank {rank} (stage {stage})" for rank, stage in enumerate(stages)}
    assert {event["pid"] for event in events} == set(range(len(stages)))


def check_ranks(events: list[Event], stages: list[int], microbatches: int, steps: int) -> None:
    """Each rank is a process with its operators and its tasks, on one clock."""
    check_processes(events, stages)
    linear_layers = 0
    for rank in range(len(stages)):
        own = [event for event in events if event["pid"] == rank and event["ph"] == "X"]
        tasks = [event for event in own if event["cat"] in ("forward", "backward")]
        operators = Counter(event["name"] for event in own if event["cat"] == "cpu_op")
        assert operators["aten::addmm"] > 0, operators
        linear_layers += operators["aten::addmm"]
        assert operators["autograd::engine::evaluate_function: AddmmBackward0"] == operators["aten::addmm"]
        first, last = min(task["ts"] for task in tasks), max(task["ts"] + task["dur"] for task in tasks)
        for event in own:
            if event["name"] == "aten::addmm":  # on the clock of the tasks, up to how exactly the profiler reads it
                assert first - 1e3 <= event["ts"] <= last + 1e3
    replicas = len(stages) // len(set(stages))
    assert linear_layers == 4 * microbatches * steps * replicas
    flows = Counter(event["id"] for event in events if event["ph"] == "s")
    assert max(flows.values(), default=1) == 1, "flows of ranks have numbers of their own"


@pytest.mark.parametrize("job", ["pipeline", "one-microbatch", "replicas", "sharded", "tensor"])
def test_a_block_is_one_trace_of_all_ranks_and_changes_no_gradient(job: str, tmp_path: Path) -> None:
    found, _ = found_by(tmp_path, job, "whole")
    for rank in found:
        assert rank["same"]
        assert rank["num_gradients"] > 0
        assert any(name.startswith("aten::") for name in rank["operators"])
    events = events_of(tmp_path / "whole.json")
    assert events == events_of(tmp_path / "whole.json.gz")
    assert {path.name for path in tmp_path.iterdir()} == {"whole.json", "whole.json.gz"}
    stages = [0, 1] if job in ("pipeline", "one-microbatch") else [0, 0]
    if job in ("tensor", "sharded"):  # whose layers run other operators
        check_processes(events, stages)
    else:
        check_ranks(events, stages, 1 if job == "one-microbatch" else 4, steps=2)
    if stages == [0, 1]:
        for rank in range(2):
            threads = {name for (process, _), name in named(events, "thread_name").items() if process == rank}
            assert any(re.fullmatch(r"shardwright-worker-\d+", name) for name in threads), threads
            assert any(re.fullmatch(r"tasks: worker \d+", name) for name in threads), threads


def test_a_rank_alone_has_a_trace(tmp_path: Path) -> None:
    (found,), _ = found_by(tmp_path, "alone", "whole", ranks=1)
    assert found["same"]
    check_ranks(events_of(tmp_path / "whole.json"), [0], 4, steps=2)


def test_each_cycle_of_a_schedule_has_its_trace(tmp_path: Path) -> None:
    found, _ = found_by(tmp_path, "pipeline", "cycles")
    for rank in found:
        assert rank["ready"] == [4, 8, 12]
        assert rank["without a pause"] == [1, 2, 2]
    for cycle in (4, 8, 12):
        events = events_of(tmp_path / f"cycle_{cycle}.json")
        check_ranks(events, [0, 1], 4, steps=2)
        steps = {event["name"] for event in events if event["name"].startswith("ProfilerStep#")}
        assert steps == {f"ProfilerStep#{cycle - 2}", f"ProfilerStep#{cycle - 1}"}
    check_ranks(events_of(tmp_path / "cycle_1.json"), [0, 1], 4, steps=1)


def test_what_cannot_be_is_refused_on_all_ranks(tmp_path: Path) -> None:
    found, _ = found_by(tmp_path, "pipeline", "refusals")
    for rank, one in enumerate(found):
        assert one["before init"] == "ShardwrightError: call smp.init(...) before any other function of shardwright"
        for nested in ("nested", "inside a trace"):
            other = "smp.profile" if nested == "nested" else "smp.trace"
            for each in range(2):
                told = f"rank {each} was called inside {other}; smp.profile and smp.trace do not nest"
                assert told in one[nested], one[nested]
        assert "smp.trace was called inside smp.profile; traces do not nest" in one["trace inside"]
        assert "smp.profile has no trace" in one["too early"]
        assert "smp.profile was called in a step function" in one["in a step"]
        assert "ConfigError: smp.profile: profile_memory is True; allowed over a pipeline of 2 ranks" in one["memory"]
        assert one["no folder"].startswith("FileNotFoundError") if rank == 0 else "nothing" in one["no folder"]
        assert "rank 1 was called while another profiler of torch is active" in one["another profiler on rank 1"]
        assert "rank 0 was" not in one["another profiler on rank 1"]
    assert {path.name for path in tmp_path.iterdir()} == {"after.json"}
    check_ranks(events_of(tmp_path / "after.json"), [0, 1], 4, steps=1)


def test_a_block_that_an_exception_leaves_hangs_nobody_and_the_next_one_is_whole(tmp_path: Path) -> None:
    found, _ = found_by(tmp_path, "pipeline", "left")
    assert all("smp.profile has no trace" in one["nothing"] for one in found)
    assert found[0]["one left"] == "ShardwrightError: smp.profile: rank 1 left its block with Broken: of rank 1"
    assert found[1]["one left"] == "nothing was refused"
    assert [one["handler"] for one in found] == ["nothing was refused"] * 2
    assert {path.name for path in tmp_path.iterdir()} == {"after.json"}
    check_ranks(events_of(tmp_path / "after.json"), [0, 1], 4, steps=1)


def test_a_trace_that_a_rank_cannot_take_is_an_error_of_all(tmp_path: Path) -> None:
    found, _ = found_by(tmp_path, "pipeline", "unwritable")
    assert found[0]["rank 1 cannot"].startswith("ShardwrightError: smp.profile: rank 1 could not take its trace: ")
    assert "Error" in found[1]["rank 1 cannot"]


def test_a_profiler_of_torch_tells_once_what_it_does_not_see(tmp_path: Path) -> None:
    _, outputs = found_by(tmp_path, "pipeline", "plain")
    for rank, output in enumerate(outputs):
        assert output.count(f"shardwright: rank {rank}: torch.profiler sees the thread that started it") == 1
        assert "smp.profile(...) takes the same arguments" in output
    _, outputs = found_by(tmp_path, "replicas", "plain")
    assert not any("torch.profiler" in output for output in outputs)


def test_memory_is_profiled_without_a_pipeline(tmp_path: Path) -> None:
    found_by(tmp_path, "replicas", "memory")
    events = events_of(tmp_path / "memory.json")
    assert {event["pid"] for event in events if event["name"] == "[memory]"} == {0, 1}


def test_stacks_of_all_threads_are_recorded(tmp_path: Path) -> None:
    found_by(tmp_path, "pipeline", "stacks")
    events = events_of(tmp_path / "stacks.json")
    check_ranks(events, [0, 1], 4, steps=2)
    assert {event["pid"] for event in events if event.get("cat") == "python_function"} == {0, 1}
