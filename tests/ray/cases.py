"""The cases: what is trained by Ray, and what has to come of it. Each raises AssertionError if it does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ray.train
import shardwright as smp
import shardwright.ray
import torch

from tests.ray import loops
from tests.ray.broken import refuse_row_40
from tests.ray.driving import cluster, data_set, in_order, told, trainer
from tests.ray.layouts import ANY, DP2, PP2
from tests.ray.plain import BAR, BATCH, EPOCHS, ROWS, apart, batches, rows


def held_to_plain(end: dict[str, Any], given: list[torch.Tensor] | None = None) -> str:
    """Hold what a rank tells at the end to plain training."""
    away = apart(end["losses"], end["weights"], batches() if given is None else given)
    assert away <= BAR, f"losses or weights are off by {away:.1e}"
    return f"within {away:.1e}"


def exact(folder: Path, config: dict[str, Any], workers: int) -> str:
    with cluster(folder):
        trainer(loops.on_tensors, folder, workers, {"smp": config}).fit()
    said = [held_to_plain(told(folder, rank)[-1]) for rank in range(workers)]
    return said[0]


def of_data(folder: Path, config: dict[str, Any], workers: int, *, count: int = ROWS, hands_on: bool = True) -> str:
    """Each row is trained on once in each epoch by some replica, and all ranks of a replica have the same."""
    division = shardwright.ray.DataConfig(config, hands_on=hands_on, execution_options=in_order())
    with cluster(folder):
        trainer(
            loops.on_data,
            folder,
            workers,
            {"smp": config},
            datasets={"train": data_set(count)},
            dataset_config=division,
        ).fit()
    ends = [told(folder, rank)[-1] for rank in range(workers)]
    replicas: dict[int, Any] = {end["dp"]: end["seen"] for end in ends if end["pp"] == 0}
    for end in ends:
        if end["pp"] == 0 or hands_on:
            assert end["seen"] == replicas[end["dp"]], "ranks of a pipeline have different rows"
        else:
            assert [len(epoch) for epoch in end["seen"]] == [len(epoch) for epoch in replicas[end["dp"]]]
            assert all(batch is None for epoch in end["seen"] for batch in epoch)
    scale = count / ROWS  # rows tell their numbers of so many
    for epoch in range(EPOCHS):
        taken = sorted(row for seen in replicas.values() for batch in seen[epoch] for row in batch)
        assert [round(one * scale) for one in taken] == list(range(count)), taken
    steps = [
        torch.cat([rows(count)[[round(one * scale) for one in seen[epoch][step]]] for seen in replicas.values()])
        for epoch in range(EPOCHS)
        for step in range(len(replicas[0][epoch]))
    ]
    if len(replicas) == 1:  # the order of the rows, as in one process
        assert torch.equal(torch.cat(steps), torch.cat([rows(count)] * EPOCHS))
        assert len(steps) == EPOCHS * -(-count // BATCH)
    said = [held_to_plain(end, steps) for end in ends]
    return f"{count} rows once in each of {EPOCHS} epochs, {said[0]}"


def plain_shard(folder: Path) -> str:
    """Ray's own division in a job with a pipeline is told apart, and what to write is said."""
    with cluster(folder):
        trainer(loops.by_processes, folder, 2, {"smp": PP2}, datasets={"train": data_set(ROWS)}).fit()
    warnings = [line["warning"] for rank in (0, 1) for line in told(folder, rank) if "warning" in line]
    assert any("dataset_config=shardwright.ray.DataConfig(" in one for one in warnings), warnings
    return "the warning names the line"


def other_division(folder: Path) -> str:
    """A data set that was divided for another configuration is refused on all ranks, and no rank waits."""
    division = shardwright.ray.DataConfig(DP2)
    with cluster(folder):
        failure = failed(
            trainer(loops.on_data, folder, 2, {"smp": PP2}, datasets={"train": data_set(ROWS)}, dataset_config=division)
        )
    told_by_both(folder, failure, "give shardwright.ray.DataConfig the configuration of smp.init", smp.ConfigError)
    return "both ranks say what to give"


def data_fails(folder: Path) -> str:
    """An error of the data set reaches all ranks of the pipeline."""
    division = shardwright.ray.DataConfig(PP2)
    with cluster(folder):
        broken = data_set(ROWS).map_batches(refuse_row_40, batch_size=6)
        failure = failed(
            trainer(loops.on_data, folder, 2, {"smp": PP2}, datasets={"train": broken}, dataset_config=division)
        )
    told_by_both(folder, failure, "row 40 is not liked", Exception)
    return "both ranks have told it"


def resumed(folder: Path, before: int, after: int) -> str:
    """A run that ends early goes on in another one of the same name, with other workers."""
    config = {"smp": ANY, "saves": 2}
    with cluster(folder):
        first = trainer(loops.on_tensors, folder, before, {**config, "steps": 5}).fit()
    assert first.checkpoint is not None
    with cluster(folder):
        last = trainer(loops.on_tensors, folder, after, config).fit()
    starts = [line for line in told(folder) if "first" in line]
    assert [(one["first"], one["ranks"]) for one in starts] == [(0, before), (4, after)], starts
    assert last.checkpoint.path != first.checkpoint.path
    return f"from step 4, {held_to_plain(told(folder)[-1])}"


def ended(folder: Path, **fate: Any) -> str:
    """A worker is killed; Ray starts all anew, and they go on from the newest complete checkpoint."""
    with cluster(folder):
        result = trainer(loops.on_tensors, folder, 2, {"smp": PP2, "saves": 2, **fate}, failures=1).fit()
    starts = [line["first"] for line in told(folder) if "first" in line]
    expected = 2 if "in_save" in fate else 4  # what was complete
    assert starts == [0, expected], starts
    complete = {Path(one.path).name for one, _ in result.best_checkpoints}
    storage = folder / "storage" / "run"
    torn = [each for each in storage.glob("checkpoint_*/") if not (each / "shardwright_partial").is_dir()]
    assert not complete & {each.name for each in torn}
    assert len(torn) == ("in_save" in fate), torn
    return f"from step {expected}, {held_to_plain(told(folder)[-1])}"


def fewer(folder: Path) -> str:
    """A worker is killed and Ray starts one fewer, as where a node is lost: the job goes on with lower degrees."""
    config = {"smp": ANY, "saves": 2, "fate": {"what": "killed", "rank": 1, "step": 5}}
    with cluster(folder):
        failure = failed(trainer(loops.on_tensors, folder, 2, config))
        assert causes(failure), failure
        trainer(loops.on_tensors, folder, 1, config).fit()
    starts = [(line["first"], line["ranks"]) for line in told(folder) if "first" in line]
    assert starts == [(0, 2), (4, 1)], starts
    return f"1 worker in place of 2 from step 4, {held_to_plain(told(folder)[-1])}"


def full_disk(folder: Path) -> str:
    """A disk that is full on one rank: the save fails on both in words, and the run goes on from the one before."""
    fate = {"what": "full", "rank": 1, "step": 4}
    with cluster(folder):
        failure = failed(trainer(loops.on_tensors, folder, 2, {"smp": PP2, "saves": 2, "in_save": fate}))
        told_by_both(folder, failure, "smp.save_checkpoint failed on rank 1", smp.CheckpointError)
        trainer(loops.on_tensors, folder, 2, {"smp": PP2, "saves": 2}).fit()
    assert [line["first"] for line in told(folder) if "first" in line] == [0, 2]
    return f"from step 2, {held_to_plain(told(folder)[-1])}"


def error_in_step(folder: Path) -> str:
    """An error in a step of one rank reaches Ray from both, as an exception of ours; then another training works."""
    by_hand = {**PP2, "auto_partition": False, "default_partition": 0}
    with cluster(folder):
        failure = failed(trainer(loops.failing, folder, 2, {"smp": by_hand}, name="failing"))
        told_by_both(folder, failure, "a layer on rank 1 fails", (smp.RemoteError, ValueError), name="failing")
        trainer(loops.on_tensors, folder, 2, {"smp": PP2}).fit()
    return f"both ranks, then {held_to_plain(told(folder)[-1])}"


def error_between(folder: Path) -> str:
    """An error between steps on one rank ends the training at once, while the other waits in a step for it."""
    fate = {"what": "raises", "rank": 1, "step": 2}
    with cluster(folder):
        failure = failed(trainer(loops.on_tensors, folder, 2, {"smp": PP2, "fate": fate}))
    said = causes(failure)
    assert isinstance(said[1], ValueError), (said, failure)
    assert "does not like step 2" in str(said[1])
    return f"ranks {sorted(said)} have told it"


def in_turn(folder: Path) -> str:
    """Two trainings after one another in a cluster, of other degrees."""
    with cluster(folder):
        for name, config in (("one", PP2), ("two", DP2)):
            trainer(loops.on_tensors, folder, 2, {"smp": config}, name=name).fit()
    return ", ".join(held_to_plain(told(folder, name=name)[-1]) for name in ("one", "two"))


def tuned(folder: Path) -> str:
    """Two trials of Tune at once on a host."""
    from ray import tune

    with cluster(folder, cpus=8):
        tuner = tune.Tuner(
            loops.trial,
            param_space={"folder": str(folder), "smp": PP2, "name": tune.grid_search(["one", "two"])},
            tune_config=tune.TuneConfig(max_concurrent_trials=2),
            run_config=tune.RunConfig(storage_path=str(folder / "tune"), name="tune"),
        )
        results = tuner.fit()
        assert not results.errors, results.errors
    ends = [told(folder, name=name)[-1] for name in ("one", "two")]
    begun = [told(folder, name=name)[0]["time"] for name in ("one", "two")]
    done = [end["time"] for end in ends]
    assert max(begun) < min(done), f"the trials ran one after another: {begun}, {done}"
    return ", ".join(held_to_plain(end) for end in ends)


def failed(training: Any) -> Any:
    """Run a training that has to fail, and return with what."""
    try:
        training.fit()
    except ray.train.TrainingFailedError as error:
        return error
    raise AssertionError("the training did not fail")


def told_by_both(folder: Path, failure: Any, words: str, kinds: Any, name: str = "run") -> None:
    """Hold both ranks to having failed in these words, and Ray to have got what at least one of them raised."""
    lines = [told(folder, rank, name)[-1] for rank in (0, 1)]
    assert all(words in line.get("text", "") for line in lines), lines
    arrived = causes(failure)
    assert arrived, failure
    assert all(isinstance(one, kinds) and words in str(one) for one in arrived.values()), arrived


def causes(failure: Any) -> dict[int, BaseException]:
    """What each worker raised, of those whose training had ended when Ray looked."""
    found = {}
    for rank, error in failure.worker_failures.items():
        found[rank] = getattr(error, "_base_exc", error)
    return found
