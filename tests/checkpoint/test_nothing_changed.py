"""What a checkpoint lacks, has too much or has damaged is refused before anything of the model is changed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import shardwright as smp
import torch
from shardwright.job.runtime import Runtime
from torch import nn

from tests.checkpoint.small_training import Training
from tests.frames.job import Job, in_process_ranks


class Counting(nn.Linear):
    """Keeps in state dicts what is no tensor."""

    told: Any = "nothing"

    def get_extra_state(self) -> Any:
        return {"calls": 3, "scale": torch.ones(2)}

    def set_extra_state(self, state: Any) -> None:
        self.told = state["calls"]


class Other(Training):
    """The small training, whose layers are of some classes."""

    def __init__(self, ranks: int, *kinds: type[nn.Linear]) -> None:
        torch.manual_seed(0)
        net = nn.Sequential(kinds[0](3, 3), kinds[1](3, 1))
        if ranks > 1:
            smp.set_partition(net[1], 1)
        self.model = smp.DistributedModel(net)
        self.optimizer = smp.DistributedOptimizer(torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9))

    @property
    def named(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def told(self) -> set[Any]:
        """What the modules of this rank were told by a load."""
        return {part.told for part in self.model.module if isinstance(part, Counting)}


def run(ranks: int, main: Any) -> None:
    with in_process_ranks():
        job = Job(ranks)
        assert job.run(main, {}, 300) == [None] * ranks
        job.close()


@pytest.mark.parametrize("divided", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_extra_states_are_compared_as_tensors_are(ranks: int, divided: bool, tmp_path: Path) -> None:
    kinds = [(nn.Linear, Counting), (Counting, nn.Linear), (nn.Linear, nn.Linear), (Counting, Counting)]

    def main(runtime: Runtime) -> None:
        for saved in kinds:
            training = Other(ranks, *saved)
            training.step(0)
            smp.save_checkpoint(tmp_path, "a", **training.named)
            for other in kinds:
                training = Other(ranks, *other)
                if divided:
                    training.step(1)
                before = training.values()
                words = [
                    f"module '{place}' is {'missing' if has else 'not'}"
                    for place, (had, has) in enumerate(
                        zip((s is Counting for s in saved), (o is Counting for o in other), strict=True)
                    )
                    if had != has
                ]
                if words:
                    with pytest.raises(smp.CheckpointError) as raised:
                        smp.resume_from_checkpoint(tmp_path, "a", **training.named)
                    assert all(word in str(raised.value) for word in words), raised.value
                    after = training.values()
                    assert all(torch.equal(before[key], after[key]) for key in {**before, **after})
                    assert training.told() <= {"nothing"}
                smp.resume_from_checkpoint(tmp_path, "a", strict=False, **training.named)
                training.step(2)
                smp.barrier()

    run(ranks, main)


@pytest.mark.parametrize("ranks", [1, 2])
def test_full_checkpoints_have_extra_states(ranks: int, tmp_path: Path) -> None:
    def main(runtime: Runtime) -> None:
        training = Other(ranks, Counting, Counting)
        training.step(0)
        for number, translate in enumerate((True, False)):
            tag = f"full{number}"
            smp.save_checkpoint(tmp_path, tag, partial=False, translate_if_full=translate, **training.named)
            saved = smp.load(str(tmp_path / tag), partial=False)
            assert saved["0._extra_state"]["calls"] == saved["1._extra_state"]["calls"] == 3
            again = Other(ranks, Counting, Counting)
            smp.resume_from_checkpoint(tmp_path, tag, partial=False, model=again.model)
            assert again.told() == {3}

    run(ranks, main)


@pytest.mark.parametrize("ranks", [1, 2])
def test_damaged_user_content_of_a_full_checkpoint_changes_nothing(ranks: int, tmp_path: Path) -> None:
    def main(runtime: Runtime) -> None:
        training = Other(ranks, nn.Linear, nn.Linear)
        training.step(0)
        smp.save_checkpoint(tmp_path, "f", partial=False, user_content={"x": torch.ones(100)}, **training.named)
        smp.barrier()
        if runtime.place.rank == 0:
            os.truncate(tmp_path / "user_content_f", 30)
        smp.barrier()
        training.step(1)
        before = training.values()
        with pytest.raises(smp.CheckpointError, match="user_content_f"):
            smp.resume_from_checkpoint(tmp_path, "f", partial=False, model=training.model)
        after = training.values()
        assert all(torch.equal(before[key], after[key]) for key in {**before, **after})
        training.step(2)

    run(ranks, main)


TAGS = ["", ".", ".hidden", "a/b", "a\nb", "a\x00b", "\udcff", "x" * 300, "newest", "b_partial", "user_content_b", 3]


@pytest.mark.parametrize("ranks", [1, 2])
def test_tags_that_no_checkpoint_can_have_leave_nothing(ranks: int, tmp_path: Path) -> None:
    def main(runtime: Runtime) -> None:
        training = Other(ranks, nn.Linear, nn.Linear)
        for tag in TAGS:
            for partial in (True, False):
                if partial and tag in ("newest", "b_partial", "user_content_b"):
                    continue  # they are names of files, where a checkpoint in parts is a folder of another name
                with pytest.raises(smp.CheckpointError):
                    smp.save_checkpoint(tmp_path / "none", tag, partial=partial, **training.named)  # type: ignore[arg-type]
                with pytest.raises(smp.CheckpointError):
                    smp.resume_from_checkpoint(tmp_path / "none", tag, partial=partial, model=training.model)  # type: ignore[arg-type]
        assert not (tmp_path / "none").exists()
        training.step(0)

    run(ranks, main)


def test_what_a_killed_save_has_left_under_another_tag_goes_with_the_next(tmp_path: Path) -> None:
    def main(runtime: Runtime) -> None:
        training = Other(1, nn.Linear, nn.Linear)
        for name in (".old_partial.writing", ".new_partial.writing"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "part-00003.safetensors").write_bytes(b"x" * 100)
        smp.save_checkpoint(tmp_path, "new", **training.named)
        assert sorted(each.name for each in tmp_path.iterdir()) == ["new_partial", "newest"]

    run(1, main)


@pytest.mark.parametrize(
    ("kind", "option", "value"),
    [
        (torch.optim.AdamW, "betas", (1, 0.999)),
        (torch.optim.SGD, "momentum", -0.5),
        (torch.optim.RMSprop, "alpha", -1.0),
        (torch.optim.Adadelta, "rho", 2.0),
        (torch.optim.Rprop, "etas", (2.0, 0.5)),
    ],
)
def test_options_that_an_optimizer_does_not_take_are_refused(
    kind: Any, option: str, value: Any, tmp_path: Path
) -> None:
    def main(runtime: Runtime) -> None:
        training = Training(1, kind)
        training.step(0)
        (group,) = training.optimizer.param_groups
        was, group[option] = group[option], value
        smp.save_checkpoint(tmp_path, "a", model=training.model, optimizer=training.optimizer)
        group[option] = was
        before = training.values()
        with pytest.raises(smp.CheckpointError, match=rf"options\[0\].*{kind.__name__} takes"):
            smp.resume_from_checkpoint(tmp_path, "a", model=training.model, optimizer=training.optimizer)
        after = training.values()
        assert group[option] == was
        assert all(torch.equal(before[key], after[key]) for key in {**before, **after})

    run(1, main)
