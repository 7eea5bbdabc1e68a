"""Groups that a script edits after the model was divided: state dicts and checkpoints are those of plain PyTorch."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import shardwright as smp
import torch
from shardwright.job.runtime import Runtime
from torch import nn

from tests.frames.job import Job, in_process_ranks

DRAWS = 12


@smp.step
def stepped(model: Any, inputs: torch.Tensor) -> torch.Tensor:
    loss = model(inputs).square().mean()
    model.backward(loss)
    return loss


class Pair:
    """A model and its optimizer with two groups, divided and plain."""

    def __init__(self, ranks: int) -> None:
        torch.manual_seed(0)
        self.plain = nn.Sequential(*(nn.Linear(3, 3, dtype=torch.float64) for _ in range(4)))
        net = copy.deepcopy(self.plain)
        for place in range(4) if ranks > 1 else ():
            smp.set_partition(net[place], place % ranks)
        self.model = smp.DistributedModel(net)
        self.ours: Any = smp.DistributedOptimizer(self.adamw(self.model))
        self.theirs = self.adamw(self.plain)

    @staticmethod
    def adamw(model: nn.Module) -> torch.optim.AdamW:
        named = list(model.named_parameters())
        return torch.optim.AdamW([{"params": named[:4], "lr": 0.1}, {"params": named[4:], "lr": 0.01}])

    def step(self, number: int) -> None:
        inputs = torch.full((2, 3), 1.0 + number, dtype=torch.float64)
        stepped(self.model, inputs)
        self.plain(inputs).square().mean().backward()
        for each in (self.ours, self.theirs):
            each.step()
            each.zero_grad()

    def edit(self, draw: random.Random) -> str:
        """Move, remove or reorder, as a script does that looks for its parameters by name."""
        what, name = draw.choice(["move", "move", "remove", "sort", "put first"]), f"{draw.randrange(4)}.weight"
        for optimizer, model in ((self.ours, self.model), (self.theirs, self.plain)):
            groups, one = optimizer.param_groups, dict(model.named_parameters())[name]
            holding = [group for group in groups if any(each is one for each in group["params"])]
            if what == "sort":
                for group in groups:
                    order = sorted(range(len(group["params"])), key=lambda place: group["param_names"][place])
                    for key in ("params", "param_names"):
                        group[key][:] = [group[key][place] for place in order]
            for group in holding if what != "sort" else []:
                place = next(place for place, each in enumerate(group["params"]) if each is one)
                taken = [group[key].pop(place) for key in ("params", "param_names")]
                if what == "remove":
                    optimizer.state.pop(one, None)
                    continue
                into = groups[1 - groups.index(group)] if what == "move" else group
                at = 0 if what == "put first" else len(into["params"])
                for key, value in zip(("params", "param_names"), taken, strict=True):
                    into[key].insert(at, value)
        return f"{what} {name}"

    def differ(self, *, ordered: bool) -> list[str]:
        ours, theirs = self.ours.state_dict(), self.theirs.state_dict()
        found = []
        named = []
        for whole in (ours, theirs):
            groups = whole["param_groups"]
            named.append(
                [
                    [
                        (name, whole["state"].get(number))
                        for name, number in zip(group["param_names"], group["params"], strict=True)
                    ]
                    for group in groups
                ]
            )
        for place, (one, other) in enumerate(zip(*named, strict=True)):
            if ordered and [name for name, _ in one] != [name for name, _ in other]:
                found.append(f"group {place}: {[name for name, _ in one]} in place of {[name for name, _ in other]}")
            mine, plain = dict(one), dict(other)
            if mine.keys() != plain.keys():
                found.append(f"group {place}: {sorted(mine)} in place of {sorted(plain)}")
            for name in mine.keys() & plain.keys():
                for key, value in (plain[name] or {}).items():
                    if not torch.allclose(mine[name][key], value, rtol=1e-12, atol=0):
                        found.append(f"{name} {key} differs")
        own = self.model.state_dict()
        found += [
            f"{name} differs"
            for name, value in self.plain.state_dict().items()
            if not torch.allclose(own[name], value, rtol=1e-12, atol=1e-15)
        ]
        return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_state_is_that_of_plain_torch_after_edits(ranks: int, tmp_path: Path) -> None:
    def main(runtime: Runtime) -> list[str]:
        wrong = []
        for seed in range(DRAWS):
            draw, pair, edits = random.Random(seed), Pair(ranks), []
            for number in range(4):
                pair.step(number)
                edits += [pair.edit(draw) for _ in range(draw.randrange(3))]
                pair.step(number)
                if number % 2:
                    # Where ranks have moved several into a group, their order there is that of the model.
                    wrong += [f"{seed}, {edits}: {one}" for one in pair.differ(ordered=ranks == 1)]
            pair.ours.load_state_dict(pair.ours.state_dict())
            pair.theirs.load_state_dict(pair.theirs.state_dict())
            pair.step(5)
            wrong += [f"{seed}, {edits}, loaded: {one}" for one in pair.differ(ordered=ranks == 1)]
            pair.edit(draw)
            smp.save_checkpoint(tmp_path, f"t{seed}", model=pair.model, optimizer=pair.ours)
            kept = copy.deepcopy((pair.plain.state_dict(), pair.theirs.state_dict()))
            pair.step(6)
            smp.resume_from_checkpoint(tmp_path, f"t{seed}", model=pair.model, optimizer=pair.ours)
            pair.plain.load_state_dict(kept[0])
            pair.theirs.load_state_dict(kept[1])
            pair.step(7)
            wrong += [f"{seed}, {edits}, resumed: {one}" for one in pair.differ(ordered=ranks == 1)]
        return wrong

    with in_process_ranks():
        job = Job(ranks)
        assert job.run(main, {}, 300) == [[]] * ranks
        job.close()


def test_edits_that_other_ranks_do_not_know_are_refused_by_what_does_not_tell_them(tmp_path: Path) -> None:
    def main(runtime: Runtime) -> None:
        pair = Pair(2)
        pair.step(0)
        whole = pair.ours.state_dict()
        smp.save_checkpoint(tmp_path, "before", model=pair.model, optimizer=pair.ours)
        first, second = pair.ours.param_groups
        for key in ("params", "param_names"):
            second[key].append(first[key].pop())
        for ask in (pair.ours.local_state_dict, lambda: pair.ours.load_state_dict(whole)):
            with pytest.raises(smp.ConfigError, match="param_groups were edited"):
                ask()
        with pytest.raises(smp.CheckpointError, match="param_groups were edited"):
            smp.resume_from_checkpoint(tmp_path, "before", model=pair.model, optimizer=pair.ours)
        pair.ours.state_dict()
        pair.ours.local_state_dict()
        if runtime.place.rank == 1:
            pair.ours.param_groups[0]["params"].append(nn.Parameter(torch.ones(7)))
        with pytest.raises(smp.ConfigError, match=r"shape \[7\] that no group had .*pp_rank 1"):
            pair.ours.state_dict()
        with pytest.raises(smp.ConfigError, match=r"shape \[7\] that no group had .*pp_rank 1"):
            smp.save_checkpoint(tmp_path, "after", model=pair.model, optimizer=pair.ours)

    with in_process_ranks():
        job = Job(2)
        assert job.run(main, {}, 300) == [None] * 2
        job.close()
