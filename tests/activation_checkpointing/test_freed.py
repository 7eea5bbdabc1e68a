"""What a checkpointed module computes is freed after its forward on every rank, and computed again in the backward."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import shardwright as smp
import torch
from shardwright.job.runtime import Runtime, find_runtime
from torch import nn

from tests.frames.job import Job, job_fixture
from tests.state.running import MICROBATCHES

job = job_fixture(3)
WIDTH = 160

#: By the name of a layer: whether each activation that its forwards computed is alive, and where each forward ran.
computed: dict[str, list[weakref.ref[torch.Tensor]]] = {}
runs: list[tuple[str, int, bool]] = []


def note(name: str, hidden: torch.Tensor) -> None:
    runtime = find_runtime()
    runs.append((name, -1 if runtime is None else runtime.place.rank, torch._C._current_graph_task_id() != -1))
    computed.setdefault(name, []).append(weakref.ref(hidden))


@pytest.fixture(autouse=True)
def noted(monkeypatch: pytest.MonkeyPatch) -> None:
    computed.clear()
    runs.clear()
    monkeypatch.setattr(sys, "_note_for_test", note, raising=False)


class Layer(nn.Module):
    """A layer whose second operation keeps the result of the first, and which may have another in the middle."""

    def __init__(self, name: str, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.name, self.dense, self.inner = name, nn.Linear(WIDTH, WIDTH), inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.dense(x).sin()
        vars(sys)["_note_for_test"](self.name, hidden)  # the trace must not see that all layers write to one list
        if self.inner is not None:
            hidden = self.inner(hidden)
        return hidden.cos()


def alive(name: str) -> int:
    return sum(reference() is not None for reference in computed[name])


class Watched(nn.Module):
    """Calls layers one after another, and counts what is alive when all have run."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers, self.last = layers, nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.last(self.layers(x)))


def train(job: Job, make: Callable[[], nn.Module], ranks: dict[str, int], mark: Any, **settings: Any) -> dict[str, int]:
    """One training step; how many activations of each layer were alive between forwards and backwards."""
    found: dict[str, int] = {}

    def main(runtime: Runtime) -> None:
        torch.manual_seed(3)
        module = make()
        for name, rank in ranks.items():
            smp.set_partition(module.get_submodule(name), rank)
        model = smp.DistributedModel(module)

        @smp.step
        def step(part: torch.Tensor) -> Any:
            loss = model(part).square().mean()
            gc.collect()
            found.update({name: alive(name) for name in computed})
            model.backward(loss)
            return loss.detach()

        step(torch.randn(MICROBATCHES * 40, WIDTH))  # the first step divides the model
        mark(module)
        if runtime.place.rank == 0:
            computed.clear()
            runs.clear()
        smp.barrier()
        step(torch.randn(MICROBATCHES * 40, WIDTH))
        smp.barrier()

    given = {"auto_partition": False, "default_partition": 0, "microbatches": MICROBATCHES, "pipeline": "simple"}
    for result in job.run(main, {**given, **settings}):
        if isinstance(result, BaseException):
            raise result
    return found


def layers(*names: str) -> Callable[[], nn.Module]:
    return lambda: Watched(nn.Sequential(*map(Layer, names)))


RANKS = {"layers.0": 0, "layers.1": 1, "layers.2": 1, "layers.3": 2}
NAMES = ("a", "b", "c", "d")


def test_without_checkpoints_they_are_kept(job: Job) -> None:
    assert train(job, layers(*NAMES), RANKS, lambda _: None) == dict.fromkeys(NAMES, MICROBATCHES)


@pytest.mark.covering(1)
@pytest.mark.parametrize("schedule", ["simple", "interleaved"])
@pytest.mark.parametrize("strategy", ["each", "contiguous", "group_2"])
def test_every_rank_frees_what_its_layers_compute(job: Job, strategy: str, schedule: str) -> None:
    def mark(module: Any) -> None:
        smp.set_activation_checkpointing(module.layers, strategy=strategy)

    found = train(job, layers(*NAMES), RANKS, mark, pipeline=schedule)
    # In other schedules a backward of another microbatch may be suspended, with what it has computed again.
    assert max(found.values()) <= (0 if schedule == "simple" else 1)
    for name, rank in zip(NAMES, (0, 1, 1, 2), strict=True):
        own = [run for run in runs if run[0] == name]
        assert own.count((name, rank, False)) == own.count((name, rank, True)) == MICROBATCHES
        assert len(own) == 2 * MICROBATCHES


@pytest.mark.parametrize("whole", [False, True])
def test_a_module_with_parts_on_other_ranks_frees_them_on_each(job: Job, whole: bool) -> None:
    """The outer layer is on rank 1, and its parts on all three; code of its own between them is computed once."""

    def make() -> nn.Module:
        return Watched(nn.Sequential(Layer("a"), Layer("outer", Layer("middle", Layer("inner")))))

    def mark(module: Any) -> None:
        smp.set_activation_checkpointing(module if whole else module.layers[1])

    ranks = {"layers.0": 0, "layers.1": 1, "layers.1.inner": 2, "layers.1.inner.inner": 0}
    found = train(job, make, ranks, mark)
    assert found["inner"] == 0
    assert found["a"] == (0 if whole else MICROBATCHES)
    assert [run for run in runs if run[0] == "inner"].count(("inner", 0, True)) == MICROBATCHES
    assert not [run for run in runs if run[0] in ("outer", "middle") and run[2]]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_call_of_the_function_frees_them_where_the_module_runs(job: Job, rank: int) -> None:
    class Calling(Watched):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.layers[0](x)
            return torch.as_tensor(self.last(smp.checkpoint(self.layers[1], x)))

    found = train(job, lambda: Calling(nn.Sequential(Layer("a"), Layer("b"))), {"layers.1": rank}, lambda _: None)
    assert found == {"a": MICROBATCHES, "b": 0}


@pytest.mark.parametrize("ranks", [{}, RANKS, dict.fromkeys(RANKS, 1)], ids=["here", "spread", "away"])
def test_a_sequential_call_is_computed_again_in_groups(job: Job, ranks: dict[str, int]) -> None:
    class Calling(Watched):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.as_tensor(self.last(smp.checkpoint_sequential(self.layers, x, strategy="group_2")))

    found = train(job, lambda: Calling(nn.Sequential(*map(Layer, NAMES))), ranks, lambda _: None)
    assert found == dict.fromkeys(NAMES, 0)
    again = [name for name, _, is_again in runs if is_again]
    assert sorted(again) == sorted(NAMES * MICROBATCHES)


def test_groups_are_computed_again_together() -> None:
    def again(strategy: str) -> list[str]:
        runs.clear()
        sequence = nn.Sequential(*map(Layer, "abcde"))
        smp.checkpoint_sequential(sequence, torch.randn(2, WIDTH), strategy).sum().backward()
        return [name for name, _, is_again in runs if is_again]

    assert "".join(again("each")) == "edcba"
    assert "".join(again("group_2")) == "ecdab"
    assert "".join(again("group_3")) == "deabc"
    assert "".join(again("contiguous")) == "".join(again("group_9")) == "abcde"


def test_after_the_backward_nothing_is_left() -> None:
    layer = Layer("a")
    x = torch.randn(2, WIDTH)
    arguments = weakref.ref(x)
    smp.checkpoint(layer, x).sum().backward()
    del x
    gc.collect()
    assert arguments() is None
    assert alive("a") == 0


def test_one_copy_is_kept_of_a_tensor_that_every_layer_gets() -> None:
    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
            return torch.tanh(x * self.weight) + bias

    bias, x = torch.randn(1, WIDTH).expand(40, WIDTH), torch.randn(40, WIDTH)
    storages = set()
    from shardwright.activation_checkpointing.arguments import Arguments

    kept = [Arguments((x * index, bias), {}) for index in range(3)]
    for arguments in kept:
        storages.add(arguments.copies[1].untyped_storage().data_ptr())
        assert arguments.copies[1].untyped_storage().nbytes() == bias[:1].numel() * 4
    assert len(storages) == 1
    result = x
    for _ in range(3):
        result = smp.checkpoint(Biased(), result, bias)
    bias.untyped_storage().fill_(0)
    result.sum().backward()


def test_a_module_that_keeps_its_results_does_not_keep_all_earlier_ones() -> None:
    class Keeping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dense = nn.Linear(WIDTH, WIDTH)
            self.result: torch.Tensor | None = None
            self.results: list[torch.Tensor] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.result = torch.tanh(self.dense(x)).sin()
            self.results = [self.result]
            return self.result

    module, made = Keeping(), []
    for _ in range(4):
        result = smp.checkpoint(module, torch.randn(2, WIDTH))
        made.append(weakref.ref(result))
        del result  # no backward comes
    gc.collect()
    assert [reference() is not None for reference in made] == [False] * 3 + [True]
