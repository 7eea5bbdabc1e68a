"""Checkpoints of jobs: resumed as if nothing had been, complete, and refused with a reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoint.running import PARAMETERS, PIPELINE, SHARDED, TENSOR, case, run
from tests.jobs.ranks import run_ranks

#: In pipelines with several microbatches, sums depend on when messages arrive.
IN_ORDER = {**PIPELINE, "microbatches": 1}


@pytest.mark.parametrize(
    ("ranks", "config"),
    [(1, {}), (2, IN_ORDER), (2, SHARDED), (2, PARAMETERS), (4, {**IN_ORDER, **SHARDED})],
    ids=["alone", "pipeline", "optimizer", "parameters", "pipeline-optimizer"],
)
def test_resuming_is_bit_identical(ranks: int, config: dict[str, int], tmp_path: Path) -> None:
    """With dropout, and batches from every kind of generator; before the first step and after one."""
    folder = str(tmp_path)
    run(ranks, case("save_and_go_on", config, folder=folder))
    run(ranks, *(case("resume", config, folder=folder, late=late) for late in (False, True)))


@pytest.mark.parametrize("key", ["fp16", "bf16"])
def test_masters_and_the_loss_scale_resume(key: str, tmp_path: Path) -> None:
    """Bit for bit in the layout that saved, and equal under another, where dropout and noise are off."""
    features = (SHARDED, IN_ORDER, *([PARAMETERS] if key == "bf16" else []))
    for number, config in enumerate({**feature, key: True} for feature in features):
        folder = str(tmp_path / f"{number}")
        run(2, case("save_and_go_on", config, folder=folder))
        run(2, *(case("resume", config, folder=folder, late=late) for late in (False, True)))
        run(1, case("masters", {key: True}, folder=folder))
    run(2, case("masters", {**SHARDED, key: True}, folder=str(tmp_path / "0"), all_state=False))


def test_a_partition_is_taken_from_a_file(tmp_path: Path) -> None:
    path = str(tmp_path / "partition.json")
    run(2, case("saved_partition", {**PIPELINE, "partition_file": path}, write=True))
    run(2, case("saved_partition", {**PIPELINE, "partition_file": path, "load_partition": True}, write=False))


def test_full_checkpoints_of_divided_layers(tmp_path: Path) -> None:
    """``transformers`` alone reads what divided layers save, and the other way round."""
    run(2, *(case("full_of_layers", TENSOR, folder=str(tmp_path / name), model=name) for name in ("GPT-2", "T5")))


def test_it_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    folder = str(tmp_path)
    run(2, case("save_and_go_on", PIPELINE, folder=folder, kind="SGD"))
    run(3, *(case("resume", SHARDED, folder=folder, kind="SGD", late=late, same=False) for late in (False, True)))
    run(1, case("resume", folder=folder, kind="SGD", same=False))


@pytest.mark.parametrize(("ranks", "config"), [(2, PIPELINE), (3, SHARDED)], ids=["pipeline", "replicas"])
def test_each_element_is_written_once(ranks: int, config: dict[str, int], tmp_path: Path) -> None:
    run(ranks, case("each_element_once", config, folder=str(tmp_path)))


def test_what_is_no_tensor_comes_back(tmp_path: Path) -> None:
    cases = [
        case(name, PIPELINE, folder=str(tmp_path / f"{number}"))
        for number, name in enumerate(("extra_state", "content", "full"))
    ]
    run(2, *cases)


def test_what_cannot_work_is_refused_on_all_ranks(tmp_path: Path) -> None:
    for number, config in enumerate(({}, PIPELINE)):
        cases = [
            case(name, config, folder=str(tmp_path / f"{number}-{name}"))
            for name in ("full_disk", "wrong_calls", "damaged")
        ]
        run(2, *cases)


def test_another_models_checkpoint_is_refused(tmp_path: Path) -> None:
    run(2, case("another_model", PIPELINE, folder=str(tmp_path)))


def test_a_call_by_one_rank_ends(tmp_path: Path) -> None:
    run(2, case("by_one", PIPELINE, folder=str(tmp_path)))


def test_saving_in_the_background(tmp_path: Path) -> None:
    folders = [str(tmp_path / name) for name in ("a", "b")]
    run(
        2,
        case("in_background", PIPELINE, folder=folders[0]),
        case("newest_is", folder=folders[0], expected=7),
        case("full_disk_in_background", SHARDED, folder=folders[1]),
    )


def test_a_rank_that_is_killed_while_it_saves_leaves_what_was_there(tmp_path: Path) -> None:
    survivor, killed = run_ranks("-m", "tests.checkpoint.killed", str(tmp_path), ranks=2)
    assert killed.code == -9
    assert "told" in survivor.out, survivor.err
    run(2, case("newest_is", folder=str(tmp_path), expected="before"))


def test_between_a_load_and_the_first_step(tmp_path: Path) -> None:
    names = (
        "weights_are_those_loaded",
        "what_comes_later_counts",
        "delayed_weights_are_refused",
        "lost_before_the_first_step",
    )
    run(2, *(case(name, PIPELINE, folder=str(tmp_path / name)) for name in names))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_jobs_take_turns_at_a_directory(asynchronous: bool, tmp_path: Path) -> None:
    run(2, case("save_beside_another_job", {}, folder=str(tmp_path), asynchronous=asynchronous))
