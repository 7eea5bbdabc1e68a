"""Where and when modules can be marked, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import shardwright as smp
import torch
from shardwright.activation_checkpointing import recompute
from shardwright.errors import ConfigError, RemoteError
from shardwright.frames.checkpointing import mark_of
from shardwright.job.runtime import Runtime
from torch import nn
from torch.utils import checkpoint as torch_checkpoint

from tests.activation_checkpointing.running import check
from tests.frames.job import Job, job_fixture
from tests.state.running import MICROBATCHES

job = job_fixture(2)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.dropout, self.outer = nn.Linear(width, width), nn.Dropout(0.0), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.as_tensor(self.outer(self.dropout(torch.tanh(self.inner(x)))))


class Model(nn.Module):
    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.first, self.body = nn.Linear(width, width), nn.Sequential(*(Block(width) for _ in range(4)))
        self.listed = nn.ModuleList([Block(width)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.listed[0](self.body(self.first(x))))


@pytest.fixture
def again(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The classes of the modules of each second computation."""
    found: list[list[str]] = []
    isolated = recompute.isolated

    def noting(state: Any) -> Any:
        found.append([type(record.module).__name__ for record in state._records])
        return isolated(state)

    monkeypatch.setattr(recompute, "isolated", noting)
    return found


RANKS = {"first": 0, "body.0": 0, "body.1": 1, "body.2": 1, "body.3": 0, "listed.0": 1}


@pytest.mark.parametrize("strategy", ["each", "contiguous", "group_2", "group_3", "group_100"])
@pytest.mark.parametrize("ranks", [RANKS, {}, {"body": 1}], ids=["spread", "here", "away"])
def test_sequences_are_exact_wherever_they_run(
    job: Job, ranks: dict[str, int], strategy: str, again: list[list[str]]
) -> None:
    torch.manual_seed(2)
    check(
        job,
        Model(),
        ranks,
        lambda model: smp.set_activation_checkpointing(model.body, strategy=strategy),  # type: ignore[arg-type]
        steps=2,
    )
    number = {"each": 4, "contiguous": 1, "group_2": 2, "group_3": 2, "group_100": 1}[strategy]
    if ranks is RANKS:  # rank 0 has the first and the last, which do not follow each other
        number = {"each": 4}.get(strategy, 3)
    assert len(again) == number * MICROBATCHES * 2


def test_the_last_mark_counts() -> None:
    model = Model()
    smp.set_activation_checkpointing(model.body)
    assert mark_of(model.body) is None
    assert all(mark_of(block) is not None for block in model.body)
    smp.set_activation_checkpointing(model.body, strategy="group_2")
    assert mark_of(model.body) == (True, True, 2)
    assert all(mark_of(block) is None for block in model.body)
    smp.set_activation_checkpointing(model.body, False)
    assert [mark_of(block) for block in model.body] == [(True, False, 0)] * 4
    assert mark_of(copy.deepcopy(model).body[0]) == (True, False, 0)


@pytest.mark.parametrize("when", ["before", "wrapped", "hook", "later", "whole"])
@pytest.mark.parametrize("delayed", [False, True])
def test_modules_are_marked_at_any_time_between_steps(
    job: Job, when: str, delayed: bool, again: list[list[str]]
) -> None:
    numbers: list[int] = []

    def main(runtime: Runtime) -> None:
        torch.manual_seed(2)
        with smp.delay_param_initialization(delayed):
            module = Model()

        def mark() -> None:
            smp.set_activation_checkpointing(module.listed[0])
            smp.set_activation_checkpointing(module.body[0])

        if when == "before":
            mark()
        for name, rank in RANKS.items():
            smp.set_partition(module.get_submodule(name), rank)
        model = smp.DistributedModel(module)
        if when == "wrapped":
            mark()
        elif when == "hook":
            model.register_post_partition_hook(lambda *_: mark())
        elif when == "whole":
            smp.set_activation_checkpointing(model)

        @smp.step
        def train(part: torch.Tensor) -> Any:
            loss = model(part).square().mean()
            model.backward(loss)
            return loss.detach()

        for step in range(3):
            if when == "later" and step == 1:
                mark()
            train(torch.ones(MICROBATCHES, 3))
            smp.barrier()
            if runtime.place.rank == 0:
                numbers.append(len(again))
            smp.barrier()

    given = {"auto_partition": False, "default_partition": 0, "microbatches": MICROBATCHES}
    for result in job.run(main, given):
        if isinstance(result, BaseException):
            raise result
    each = MICROBATCHES * (5 if when == "whole" else 2)  # two consecutive layers of rank 1 are one
    assert numbers == ([0, each, 2 * each] if when == "later" else [each, 2 * each, 3 * each])


@pytest.mark.parametrize("strategy", ["each", "contiguous", "group_2"])
def test_modules_of_a_list_are_marked_one_by_one(job: Job, strategy: str, again: list[list[str]]) -> None:
    class Listed(Model):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.ModuleList(self.body)  # type: ignore[assignment]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            for layer in self.body:
                x = layer(x)
            return torch.as_tensor(self.listed[0](x))

    torch.manual_seed(2)
    model = Listed()
    check(
        job,
        model,
        RANKS,
        lambda model: smp.set_activation_checkpointing(model.body, strategy=strategy),  # type: ignore[arg-type]
        steps=2,
    )
    assert len(again) == 4 * MICROBATCHES * 2


def test_a_mark_inside_a_step_is_refused(job: Job) -> None:
    def main(runtime: Runtime) -> None:
        module = Model()
        model = smp.DistributedModel(module)

        @smp.step
        def train(part: torch.Tensor) -> Any:
            smp.set_activation_checkpointing(module.body)
            model.backward(model(part).sum())

        train(torch.ones(2, 3))

    results = job.run(main, {"auto_partition": False, "default_partition": 0, "microbatches": 2})
    assert isinstance(results[0], ConfigError)
    assert "for a Sequential inside a step: call it between steps, on every rank" in str(results[0])
    assert isinstance(results[1], RemoteError)


WRONG: dict[str, tuple[Callable[[Model], Any], str]] = {
    "no module": (
        lambda model: smp.set_activation_checkpointing([model]),  # type: ignore[arg-type]
        r"(?s)was given \[.*a list; allowed: an nn.Module",
    ),
    "a dictionary": (
        lambda model: smp.set_activation_checkpointing(nn.ModuleDict({"first": model.first})),
        "a ModuleDict, which has no forward",
    ),
    "strategy": (
        lambda model: smp.set_activation_checkpointing(model.body, strategy="all"),
        "strategy is 'all' for a Sequential; allowed: 'each', 'contiguous', and 'group_k'",
    ),
    "group of none": (
        lambda model: smp.set_activation_checkpointing(model.body, strategy="group_0"),
        "strategy is 'group_0' for a Sequential",
    ),
    "a number": (
        lambda model: smp.set_activation_checkpointing(model.body, strategy=2),  # type: ignore[arg-type]
        "strategy is 2 for a Sequential",
    ),
    "strategy of another": (
        lambda model: smp.set_activation_checkpointing(model.first, strategy="contiguous"),
        "strategy is 'contiguous' for a Linear, which is not an nn.Sequential",
    ),
    "tuples of another": (
        lambda model: smp.set_activation_checkpointing(model.first, pack_args_as_tuple=True),
        "pack_args_as_tuple is True for a Linear",
    ),
    "preserve": (
        lambda model: smp.set_activation_checkpointing(model.first, preserve_rng_state=1),  # type: ignore[arg-type]
        "preserve_rng_state is 1 for a Linear; allowed: True and False",
    ),
    "pack": (
        lambda model: smp.set_activation_checkpointing(model.body, True, "no"),  # type: ignore[arg-type]
        "pack_args_as_tuple is 'no' for a Sequential",
    ),
    "script": (
        lambda model: smp.set_activation_checkpointing(nn.Sequential(torch.jit.script(model.first))),
        "part '0' of it is compiled by TorchScript",
    ),
    "function": (
        lambda model: smp.checkpoint(torch.tanh, torch.ones(1)),  # type: ignore[arg-type]
        "smp.checkpoint was given .* allowed: an nn.Module .for other functions",
    ),
    "function with wrong argument": (
        lambda model: smp.checkpoint(model.first, torch.ones(3), preserve_rng_state=None),  # type: ignore[arg-type]
        "smp.checkpoint: preserve_rng_state is None",
    ),
    "sequential": (
        lambda model: smp.checkpoint_sequential(model.first, torch.ones(3)),  # type: ignore[arg-type]
        "smp.checkpoint_sequential was given a Linear; allowed: an nn.Sequential",
    ),
    "sequential with wrong argument": (
        lambda model: smp.checkpoint_sequential(model.body, torch.ones(3), "group_x"),
        "smp.checkpoint_sequential: strategy is 'group_x'",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_bad_input_is_refused(name: str) -> None:
    call, words = WRONG[name]
    with pytest.raises(ConfigError, match=words):
        call(Model())


class Tuples(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, both: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any]:
        left, right = both
        return torch.tanh(left * self.weight) + right, right


@pytest.mark.parametrize("strategy", ["each", "contiguous", "group_2"])
@pytest.mark.parametrize("pack", [False, True])
def test_children_that_take_tuples_get_them(pack: bool, strategy: str) -> None:
    sequence = nn.Sequential(Tuples(), Tuples(), Tuples())
    x = torch.ones(3, requires_grad=True)
    left, right = smp.checkpoint_sequential(sequence, (x, 2), strategy, True, pack)
    expected, _ = sequence((x, 2))
    assert right == 2
    assert torch.equal(*(torch.autograd.grad(one.sum(), x)[0] for one in (left, expected)))


def test_hooks_of_a_marked_module_run_once_and_those_inside_twice(job: Job) -> None:
    ran: list[str] = []

    def main(runtime: Runtime) -> None:
        module = Model()
        block: Any = module.body[1]
        if runtime.place.rank == 1:
            block.register_forward_hook(lambda *_: ran.append("own"))
            block.register_full_backward_hook(lambda *_: ran.append("backward"))
            block.inner.register_forward_hook(lambda *_: ran.append("inside"))
        smp.set_activation_checkpointing(block)
        for name, rank in RANKS.items():
            smp.set_partition(module.get_submodule(name), rank)
        model = smp.DistributedModel(module)

        @smp.step
        def train(part: torch.Tensor) -> Any:
            model.backward(model(part).sum())

        train(torch.ones(2, 3))

    for result in job.run(main, {"auto_partition": False, "default_partition": 0, "microbatches": 2}):
        if isinstance(result, BaseException):
            raise result
    assert {name: ran.count(name) for name in set(ran)} == {"own": 2, "backward": 2, "inside": 4}


def test_checkpoints_of_torch_around_and_inside_are_exact(job: Job) -> None:
    class Around(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch_checkpoint.checkpoint(self.body, self.first(x), use_reentrant=False)
            return torch.as_tensor(smp.checkpoint(self.listed[0], x))

    class Inside(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.as_tensor(torch_checkpoint.checkpoint(super().forward, x, use_reentrant=False))

    def mark(model: Any) -> None:
        smp.set_activation_checkpointing(model.body)
        smp.set_activation_checkpointing(model.listed[0])

    torch.manual_seed(2)
    model = Around()
    model.body[2] = Inside(3)
    check(job, model, RANKS, mark)
    check(job, model, RANKS, smp.set_activation_checkpointing)


@pytest.fixture
def job_of_one() -> Iterator[None]:
    yield
    smp.shutdown()


@pytest.mark.parametrize("checkpointed", [False, True])
def test_scores_of_attention_are_computed_again(job_of_one: None, checkpointed: bool) -> None:
    """Dropout makes the CPU compute attention by its formula, which keeps the scores."""
    smp.init(checkpoint_attentions=checkpointed)
    torch.manual_seed(1)
    layer = smp.nn.DistributedAttentionLayer(2, 8, 16, attention_dropout_prob=0.25, hidden_dropout_prob=0.0)
    x = torch.randn(2, 96, 16, requires_grad=True)
    kept: list[int] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.numel())
        return tensor

    torch.manual_seed(5)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = layer((x,))
    result.square().sum().backward()
    assert (max(kept) >= 2 * 2 * 96 * 96) is not checkpointed
    _EXPECTED.setdefault("gradient", x.grad)
    assert torch.equal(_EXPECTED["gradient"], x.grad)  # type: ignore[arg-type]


_EXPECTED: dict[str, Any] = {}
