"""``smp.trace`` and the efficiency report over real ranks, and ``shardwright trace`` on what was written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from shardwright.command import main
from shardwright.timeline import Timeline

from tests.jobs.ranks import outputs_of_ranks

PROGRAM = Path(__file__).with_name("program.py")
FILES = {"trace.json", "timeline.html"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces")


@pytest.fixture(scope="module")
def outputs(folder: Path) -> list[str]:
    return outputs_of_ranks(PROGRAM, str(folder), "2", ranks=2)


def found_in(output: str) -> dict[str, Any]:
    line = next(line for line in output.splitlines() if line.startswith("found: "))
    found: dict[str, Any] = json.loads(line.removeprefix("found: "))
    return found


def test_only_the_steps_asked_for_are_recorded(outputs: list[str], folder: Path) -> None:
    found = found_in(outputs[0])
    assert (found["some"], found["again"]) == ([4, 6], [8])
    assert {path.name for path in (folder / "some").iterdir()} == FILES
    read = Timeline.read(folder / "some" / "trace.json")
    assert (read.steps(), read.lost) == ([4, 6], 0)
    records = read.records()
    assert {record["rank"] for record in records} == {0, 1}
    assert {record["microbatch"] for record in records if record["kind"] == "forward"} == {0, 1, 2, 3}
    assert "some" not in found_in(outputs[1])


def test_messages_last_until_they_arrive_and_have_their_bytes(outputs: list[str], folder: Path) -> None:
    assert outputs
    records = Timeline.read(folder / "some" / "trace.json").records()
    sends = [record for record in records if record["kind"] == "send"]
    receives = [record for record in records if record["kind"] == "receive"]
    assert len(sends) == len(receives) > 0
    assert sorted(record["end_ns"] for record in sends) == sorted(record["start_ns"] for record in receives)
    # Two steps of four microbatches: activations there and back, gradients there and back, of 2 rows of 16 floats.
    assert sum(record["bytes"] for record in sends) == 2 * 4 * 4 * 2 * 16 * 4


def test_a_decorated_function_is_traced_and_a_failed_block_writes_nothing(outputs: list[str], folder: Path) -> None:
    assert outputs
    assert Timeline.read(folder / "decorated" / "trace.json").steps() == [9, 10]
    assert not (folder / "failed").exists()


def test_traces_do_not_nest_and_do_not_begin_in_steps(outputs: list[str]) -> None:
    for output in outputs:
        found = found_in(output)
        assert found["nested"] == "smp.trace was called inside another smp.trace; traces do not nest"
        assert "smp.trace was called in a step function; put it around the call" in found["in a step"]


def test_the_report_agrees_with_the_trace(outputs: list[str]) -> None:
    summary = found_in(outputs[0])["summary"]
    for rank, output in enumerate(outputs):
        newest, traced = found_in(output)["newest"], summary["ranks"][rank]
        for activity in ("forward", "backward"):
            assert newest[f"{activity}_seconds"] == pytest.approx(traced[f"{activity}_ns"] / 1e9, rel=0.01, abs=1e-5)
        assert (newest["sent_bytes"], newest["received_bytes"]) == (traced["sent_bytes"], traced["received_bytes"])


def test_all_time_of_the_steps_is_told_and_whom_it_was_waited_for(outputs: list[str]) -> None:
    for rank, output in enumerate(outputs):
        total = found_in(output)["efficiency"]["total"]
        assert total["steps"] == 10  # of twelve: one divided the model, one failed
        used = sum(total[f"{use}_seconds"] for use in ("forward", "backward", "weight", "other", "overhead", "commit"))
        waited = total["waiting_seconds"]
        assert set(waited) == {str(1 - rank)}
        assert used + sum(waited.values()) == pytest.approx(total["seconds"], rel=1e-6)
        assert total["waiting"] == pytest.approx(sum(waited.values()) / total["seconds"], rel=1e-6)
        assert total["ideal_bubble"] == pytest.approx(1 / 5, rel=1e-6)
        assert 0 < total["bubble"] < 1
        assert f"shardwright: rank {rank}: 10 steps in " in output
        assert f"(for rank {1 - rank} " in output


def test_the_report_is_the_same_on_every_rank(outputs: list[str]) -> None:
    first, second = (found_in(output)["report"] for output in outputs)
    assert first == second
    assert len(first["busy_per_rank"]) == 2
    assert first["ideal_bubble"] == 0.2


def test_a_rank_alone_is_traced_too(tmp_path: Path) -> None:
    (output,) = outputs_of_ranks(PROGRAM, str(tmp_path), "1", ranks=1)
    found = found_in(output)
    assert found["some"] == [4, 6]
    total = found["efficiency"]["total"]
    assert (total["steps"], total["bubble"], total["ideal_bubble"], total["waiting_seconds"]) == (11, 0.0, 0.0, {})
    assert total["busy"] > 0
    assert {path.name for path in (tmp_path / "some").iterdir()} == FILES


def test_the_command_shows_draws_and_compares(
    outputs: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert outputs
    some, again = str(folder / "some"), str(folder / "decorated" / "trace.json")
    assert main(["trace", "show", some, "--step", "4", "--width", "60"]) == 0
    shown = capsys.readouterr().out
    assert shown.splitlines()[0].split() == (
        ["step", "rank", "length", "forward", "backward", "weight", "other", "idle", "idle", "%", "sent", "received"]
    )
    assert "\nstep 4: " in shown
    assert "\nrank 1 |" in shown
    assert main(["trace", "show", some, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert [step["step"] for step in figures["steps"]] == [4, 6]
    assert figures["all"] == Timeline.read(folder / "some" / "trace.json").summary()
    assert main(["trace", "draw", some]) == 0
    assert capsys.readouterr().out.startswith("<svg ")
    assert main(["trace", "compare", some, again]) == 0
    assert "median step, ms" in capsys.readouterr().out
    assert main(["trace", "compare", some, again, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_steps"] == {"a": 2, "b": 2}


def test_the_command_names_the_file_that_it_cannot_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    newer = tmp_path / "newer.json"
    newer.write_text('{"otherData": {"shardwright_format": 2, "shardwright_version": "9.9.9"}, "traceEvents": []}')
    assert main(["trace", "show", str(newer)]) == 2
    assert "newer.json: this trace has format 2, written by shardwright 9.9.9" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"newer\.json: this trace has format 2"):
        Timeline.read(newer)
    assert main(["trace", "compare", str(newer), str(tmp_path / "none.json")]) == 2
    assert main(["trace", "draw", str(tmp_path / "none.json")]) == 2
    assert "none.json cannot be read" in capsys.readouterr().err


def test_records_from_elsewhere_become_a_timeline() -> None:
    record = {"rank": 3, "step": 1, "kind": "weight", "start_ns": 10, "end_ns": 30}
    timeline = Timeline.from_json(json.dumps({"records": [record], "lost": 0}))
    assert timeline.records() == [{**record, "bytes": 0}]
    assert timeline.summary(1)["ranks"][0]["weight_ns"] == 20
    assert "weight gradients" in timeline.svg()
    with pytest.raises(ValueError, match="step 2 is not in this trace; it has step 1"):
        timeline.summary(2)
    with pytest.raises(ValueError, match="unknown variant `sideways`"):
        Timeline.from_json(json.dumps({"records": [{**record, "kind": "sideways"}], "lost": 0}))
