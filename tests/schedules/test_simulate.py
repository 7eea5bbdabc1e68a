"""Simulated steps from Python: torch's own schedules, ours, and the execution server's decisions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from shardwright import _core
from shardwright.command import main
from shardwright.errors import ConfigError
from torch.distributed.pipelining import schedules

FORWARD, BACKWARD = 10, 20
DEADLOCK = "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n"
# torch's class, how many stages per rank, microbatches per rank, and which of ours it is.
TORCH = [
    ("ScheduleLoopedBFS", 1, 2, "simple"),
    ("ScheduleLoopedBFS", 2, 2, "simple"),
    ("ScheduleInterleaved1F1B", 1, 2, "interleaved"),
    ("ScheduleInterleaved1F1B", 3, 2, "interleaved"),
    ("ScheduleInterleavedZeroBubble", 1, 2, "zero_bubble"),
    ("ScheduleInterleavedZeroBubble", 2, 2, "zero_bubble"),
    ("ScheduleZBVZeroBubble", 2, 2, None),
    ("ScheduleDualPipeV", 2, 4, None),
]


class Stage(schedules._PipelineStageBase):
    """What a schedule of torch asks a stage when it makes its order; there are no processes."""

    def __init__(self, index: int, num_ranks: int, num_stages: int) -> None:
        self.stage_index = index
        self.group_size = num_ranks
        self.group_rank = 0
        self.num_stages = num_stages
        self.group: Any = None
        self.submod: Any = None
        self.has_backward = False

    def _create_grad_recv_info(self, act_send_info: Any) -> Any:
        raise NotImplementedError

    def _prepare_forward_infra(self, *arguments: Any, **named: Any) -> Any:
        raise NotImplementedError

    def _prepare_backward_infra(self, *arguments: Any, **named: Any) -> Any:
        raise NotImplementedError


def torch_csv(name: str, ranks: int, microbatches: int, stages_per_rank: int, path: Path) -> str:
    """What torch writes for one of its schedules."""
    num_stages = ranks * stages_per_rank
    stages = [Stage(index, ranks, num_stages) for index in range(0, num_stages, ranks)]
    schedule = getattr(schedules, name)(stages, microbatches)
    schedules.PipelineScheduleMulti._dump_csv(schedule, path)
    return path.read_text()


def run_program(program: str, num_stages: int) -> dict[str, Any]:
    return _core.simulate(program=program, forward_ns=[FORWARD] * num_stages, backward_ns=[BACKWARD] * num_stages)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    ("name", "stages_per_rank", "microbatches_per_rank", "ours"),
    [case for case in TORCH if hasattr(schedules, case[0])],
)
def test_torch_s_schedules_are_read_and_none_deadlocks(
    name: str, stages_per_rank: int, microbatches_per_rank: int, ours: str | None, ranks: int, tmp_path: Path
) -> None:
    microbatches, num_stages = ranks * microbatches_per_rank, ranks * stages_per_rank
    csv = torch_csv(name, ranks, microbatches, stages_per_rank, tmp_path / "schedule.csv")
    step = run_program(csv, num_stages)
    work = (FORWARD + BACKWARD) * stages_per_rank * microbatches
    assert [rank["busy_ns"] for rank in step["ranks"]] == [work] * ranks
    assert work < step["makespan_ns"] <= work + (ranks - 1) * (FORWARD + BACKWARD)
    if ours is not None:
        program = _core.reference_program(ours, ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank)
        assert run_program(program, num_stages)["makespan_ns"] == step["makespan_ns"]


@pytest.mark.parametrize("name", ["simple", "interleaved", "zero_bubble"])
def test_torch_accepts_our_programs(name: str) -> None:
    _, *rows = _core.reference_program(name, ranks=4, microbatches=8, stages_per_rank=2).splitlines()
    cells = [row.partition(":")[2].split() for row in rows]
    actions: dict[int, list[schedules._Action | None]] = {
        rank: [schedules._Action.from_str(cell) for cell in row] for rank, row in enumerate(cells)
    }
    stage_ranks = schedules._validate_schedule(actions, 4, 8, 8)
    assert stage_ranks == {stage: stage % 4 for stage in range(8)}


def test_a_step_tells_when_each_task_ran() -> None:
    step = _core.simulate(program="0F0,0B0\n1F0,1B0\n", forward_ns=[3, 5], backward_ns=[7, 11], latency_ns=2)
    assert step["makespan_ns"] == 3 + 2 + 5 + 11 + 2 + 7
    assert step["ranks"] == [{"busy_ns": 10, "idle_ns": 20}, {"busy_ns": 16, "idle_ns": 14}]
    assert step["tasks"][1] == {
        "rank": 1,
        "stage": 1,
        "kind": "forward",
        "microbatch": 0,
        "start_ns": 5,
        "end_ns": 10,
    }
    assert [task["kind"] for task in step["tasks"]] == ["forward", "forward", "backward", "backward"]


def test_a_schedule_runs_as_the_server_would() -> None:
    def makespan(schedule: str, **named: Any) -> int:
        step = _core.simulate(
            schedule=schedule,
            segments=[0, 1, 0],
            microbatches=8,
            forward_ns=[5, 10, 5],
            backward_ns=[10, 20, 10],
            **named,
        )
        found: int = step["makespan_ns"]
        return found

    ideal = 8 * (FORWARD + BACKWARD)
    assert ideal < makespan("zero_bubble(active=4)") < makespan("interleaved(active=4)") < makespan("simple")
    assert makespan("simple", root_backward_ns=1) > makespan("simple")
    assert makespan("simple", control="direct") == makespan("simple")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"program": DEADLOCK}, "rank 0 stands at 0B0, which needs 1B0 of rank 1, where 1F1 comes first"),
        ({"program": "0F0\n"}, "0B0 is missing"),
        ({"program": "0F0,0B0\n"}, "costs of 2 stages are given; allowed are costs of all 1 stages"),
        ({"program": "shardwright program 9\n"}, "format version 9"),
        ({"program": DEADLOCK, "schedule": "simple"}, "allowed are program alone, or schedule"),
        ({"schedule": "simple", "segments": [0, 2], "microbatches": 1}, "no segment is on rank 1"),
        ({"schedule": "simple", "segments": [0, 1], "microbatches": 0}, "microbatches is 0"),
        ({"schedule": "1f1b", "segments": [0, 1], "microbatches": 1}, '"1f1b" is no schedule'),
        ({"program": DEADLOCK, "weight_gradient_ns": [1]}, "have \\[2, 2, 1\\] values"),
        ({"program": DEADLOCK, "weight_gradient_ns": [1, 99]}, "weight_gradient_ns has 99"),
    ],
)
def test_what_cannot_be_simulated_is_refused_with_the_reason(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _core.simulate(**{"forward_ns": [FORWARD] * 2, "backward_ns": [BACKWARD] * 2, **arguments})


def test_the_command_finds_a_deadlock_in_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "schedule.csv"
    path.write_text(DEADLOCK)
    assert main(["simulate", "--program", str(path)]) == 1
    assert "rank 1 stands at 1F1, which needs 0F1 of rank 0, where 0B0 comes first" in capsys.readouterr().out
    path.write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    assert main(["simulate", "--program", str(path), "--forward", "1ms", "--backward", "2ms"]) == 0
    assert capsys.readouterr().out.startswith("makespan 9.00ms, bubble 33.3%\n")


def test_the_command_simulates_a_list_and_refuses_what_is_no_policy(capsys: pytest.CaptureFixture[str]) -> None:
    line = [
        "simulate",
        "--segments",
        "0,1",
        "--microbatches",
        "2",
        "--forward",
        "10ms",
        "--backward",
        "20ms",
        "--policy",
    ]
    assert main([*line, "list(0F 1F 1B 0B)"]) == 0
    assert "F1" in capsys.readouterr().out
    assert main([*line, "list(0F 0B)"]) == 2
    assert "the list has 2 entries" in capsys.readouterr().err
    assert main([*line, _core.reference_program("simple", ranks=2, microbatches=2)]) == 2
    assert "a program was given as a policy" in capsys.readouterr().err
