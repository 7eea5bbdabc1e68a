"""Checkpointed modules beside everything else: failures, other libraries, compiled modules, replicas, verification."""

from __future__ import annotations

import copy
import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import shardwright as smp
import torch
from shardwright.activation_checkpointing import recompute
from shardwright.activation_checkpointing.interception import intercept_marked
from shardwright.errors import FrameError
from shardwright.frames.cut import engine_watchers
from shardwright.job.runtime import Runtime
from torch import nn

from tests.activation_checkpointing.running import check
from tests.activation_checkpointing.test_marking import RANKS, Block, Model
from tests.frames.job import Job, job_fixture
from tests.jobs.ranks import outputs_of_ranks
from tests.state.running import MICROBATCHES, MODES

job = job_fixture(2)


class Failing(Block):
    """Fails in its second computation where it is told to, after it has changed what it keeps."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.register_buffer("level", torch.ones(width))
        self.count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.level.mul_(0.5)
        if vars(sys).get("_fail_for_test") and torch._C._current_graph_task_id() != -1:
            raise ValueError("the second computation fails")
        return super().forward(x) * self.level.clone() * self.count


def test_a_second_computation_that_fails_leaves_no_trace(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(fails: bool) -> list[Any]:
        def main(runtime: Runtime) -> list[Any]:
            torch.manual_seed(2)
            module = Model()
            module.body[1] = Failing(3)
            for name, rank in RANKS.items():
                smp.set_partition(module.get_submodule(name), rank)
            smp.set_activation_checkpointing(module.body)
            model = smp.DistributedModel(module)

            @smp.step
            def train(part: torch.Tensor) -> Any:
                loss = model(part).square().mean()
                model.backward(loss)
                return loss.detach()

            found = [train(torch.ones(MICROBATCHES, 3)).concat()]
            smp.barrier()
            if fails:
                monkeypatch.setattr(sys, "_fail_for_test", True, raising=False)
                with pytest.raises((ValueError, smp.RemoteError), match="the second computation fails"):
                    train(torch.ones(MICROBATCHES, 3))
                smp.barrier()
                monkeypatch.setattr(sys, "_fail_for_test", False, raising=False)
                smp.barrier()
            model.zero_grad()
            found.append(train(torch.ones(MICROBATCHES, 3)).concat())
            found += [p.grad.clone() for p in model.local_parameters() if p.grad is not None]
            found += [buffer.clone() for buffer in model.local_buffers()]
            return found

        given = {"auto_partition": False, "default_partition": 0, "microbatches": MICROBATCHES}
        found: list[Any] = []
        for result in job.run(main, given):
            if isinstance(result, BaseException):
                raise result
            found += result
        assert job.rests
        return found

    for one, other in zip(run(True), run(False), strict=True):
        assert torch.equal(one, other)


def test_a_transform_of_torch_func_inside_is_refused_by_name(job: Job) -> None:
    class Transformed(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.func.grad(lambda y: super(Transformed, self).forward(y).sum())(x)

    model = Model()
    model.body[1] = Transformed(3)
    with pytest.raises((FrameError, smp.RemoteError), match=r"Transformed is checkpointed, .* transform of torch.func"):
        check(job, model, RANKS, lambda model: smp.set_activation_checkpointing(model.body))  # type: ignore[arg-type]


@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_that_transformers_checkpoints_too(job: Job, reentrant: bool) -> None:
    transformers = pytest.importorskip("transformers")

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            sizes = {"n_embd": 4, "n_layer": 3, "n_head": 2, "n_positions": 8, "vocab_size": 11}
            config = transformers.GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)
            self.model = transformers.GPT2Model(config)
            self.model.gradient_checkpointing_enable({"use_reentrant": reentrant})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            ids = (x.detach().abs() * 3).long() % 11
            return torch.as_tensor(self.model(ids).last_hidden_state * x.mean())

    def mark(model: Any) -> None:
        for layer in model.model.h:
            smp.set_activation_checkpointing(layer)

    torch.manual_seed(3)
    check(job, Wrapped(), {"model.h.0": 0, "model.h.1": 1, "model.h.2": 0}, mark)


def test_a_cache_that_every_layer_fills_is_filled_once() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 32, "vocab_size": 11}
    model = transformers.GPT2Model(transformers.GPT2Config(**sizes))
    model.train()

    def run(call: Callable[..., Any]) -> list[torch.Tensor]:
        torch.manual_seed(1)
        model.zero_grad()
        first = call(model, torch.arange(5).view(1, 5), use_cache=True)
        second = call(model, torch.arange(4).view(1, 4), past_key_values=first.past_key_values, use_cache=True)
        second.last_hidden_state.square().sum().backward()
        lengths = torch.tensor(second.past_key_values.get_seq_length())
        return [lengths, *(p.grad for p in model.parameters() if p.grad is not None)]

    for one, other in zip(run(smp.checkpoint), run(lambda model, *args, **kwargs: model(*args, **kwargs)), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("mode", MODES)
def test_shared_modules_and_weights(job: Job, mode: str) -> None:
    class Sharing(Model):
        def __init__(self) -> None:
            super().__init__()
            self.body[3].inner.weight = self.body[0].inner.weight
            self.listed.append(self.body[2])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = super().forward(x)
            with torch.no_grad():
                y = self.body(x)
            for _ in range(2):
                x = self.body[1](self.listed[1](x))
            return x + y

    torch.manual_seed(4)
    ranks = {**RANKS, "body.3": 0}
    mark: Any = lambda model: smp.set_activation_checkpointing(model.body, strategy="group_2")  # noqa: E731
    check(job, Sharing(), ranks, mark, MODES[mode], calls=2)
    check(job, Sharing(), ranks, smp.set_activation_checkpointing, MODES[mode])


def test_a_compiled_module_is_computed_again() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dense, self.norm, self.calls = nn.Linear(6, 6), nn.BatchNorm1d(6), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.norm(self.dense(x)))

    torch.manual_seed(0)
    module, plain = Plain(), Plain()
    plain.load_state_dict(module.state_dict())
    module.compile(backend="aot_eager")
    x = torch.randn(8, 6)
    for _ in range(2):
        plain(x).square().sum().backward()
        smp.checkpoint(module, x).square().sum().backward()
    for one, other in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    for one, other in zip(module.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(one, other)


def test_nothing_watches_after_a_run() -> None:
    assert not [watcher for watcher in engine_watchers if watcher.keeper() is not None]


REPLICAS = """
import torch, shardwright as smp
from torch import nn
smp.init(ddp=True, microbatches=2, pipeline_parallel_degree=PP, reproducible_rng=True)
torch.manual_seed(0)

def build():
    torch.manual_seed(0)
    layers = []
    for _ in range(3):
        parts = nn.Conv1d(3, 3, 3, padding=1), nn.BatchNorm1d(3), nn.ReLU(inplace=True), nn.Dropout(0.2)
        layers.append(nn.Sequential(*parts))
    return nn.Sequential(*layers)

def run(mark):
    module = build()
    if PP > 1:
        smp.set_partition(module[1], 1)
    model = smp.DistributedModel(module)
    mark(model)
    torch.manual_seed(smp.dp_rank())
    data = torch.randn(8, 3, 5)

    @smp.step
    def train(x):
        loss = model(x).square().mean()
        model.backward(loss)
        return loss.detach()

    losses = train(data).concat()
    return losses, [p.grad for p in model.local_parameters()], [b.clone() for b in model.local_buffers()]

# Random numbers depend on the number of the step: both runs are the first of a job.
plain = run(lambda model: None)
smp.shutdown()
smp.init(ddp=True, microbatches=2, pipeline_parallel_degree=PP, reproducible_rng=True)
marked = run(lambda model: smp.set_activation_checkpointing(model.module, strategy="contiguous"))
for one, other in zip(plain, marked):
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a, b), (a, b)
print("same")
"""


@pytest.mark.parametrize(("ranks", "pp"), [(2, 1), (4, 2)])
def test_replicas_are_the_same_bits_as_without_checkpoints(ranks: int, pp: int, tmp_path: Path) -> None:
    script = tmp_path / "replicas.py"
    script.write_text(REPLICAS.replace("PP", str(pp)))
    assert outputs_of_ranks(script, ranks=ranks, folder=tmp_path) == ["same\n"] * ranks


VERIFIED = """
import torch, shardwright as smp
from torch import nn
smp.init(microbatches=2)
torch.manual_seed(0)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense, self.norm, self.dropout = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.3)

    def forward(self, x):
        return x + self.dropout(torch.tanh(self.norm(self.dense(x))))

module = nn.Sequential(Block(), Block(), Block(), nn.Linear(8, 1)).double()
smp.set_partition(module[1], 1)
model = smp.DistributedModel(module)
smp.set_activation_checkpointing(model.module)
optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

@smp.step
def train(x):
    loss = model(x).square().mean()
    model.backward(loss)
    return loss.detach()

for _ in range(3):
    smp.verify(train, torch.randn(8, 8, dtype=torch.float64), raise_on_difference=True)
    optimizer.zero_grad()
    train(torch.randn(8, 8, dtype=torch.float64))
    optimizer.step()
print("verified")
"""


def test_a_step_with_checkpoints_and_dropout_is_verified_beside_one_process(tmp_path: Path) -> None:
    script = tmp_path / "verified.py"
    script.write_text(VERIFIED)
    environment = {"SM_HP_MP_PARAMETERS": '{"pipeline_parallel_degree": 2}'}
    for out in outputs_of_ranks(script, ranks=2, folder=tmp_path, environment=environment):
        assert "verified" in out


@pytest.mark.parametrize("how", ["each", "group_2", "whole"])
def test_autocast_and_settings_of_the_caller_are_those_of_the_second_computation(job: Job, how: str) -> None:
    class Making(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * torch.full((3,), 1 / 3).sin().float() + torch.exp(x)

    def run(marked: bool) -> list[torch.Tensor]:
        def main(runtime: Runtime) -> list[torch.Tensor]:
            torch.manual_seed(2)
            module = Model()
            module.body[1], module.body[3] = Making(3), Making(3)
            for name, rank in RANKS.items():
                smp.set_partition(module.get_submodule(name), rank)
            model = smp.DistributedModel(module)
            if marked and how == "whole":
                smp.set_activation_checkpointing(model)
            elif marked:
                smp.set_activation_checkpointing(module.body, strategy=how)

            @smp.step
            def train(part: torch.Tensor) -> Any:
                torch.set_default_dtype(torch.float64)
                with torch.autocast("cpu", torch.bfloat16):
                    output = model(part)
                torch.set_default_dtype(torch.float32)
                loss = output.float().square().mean()
                model.backward(loss)
                return loss.detach()

            found = [train(torch.linspace(-1, 1, 6 * MICROBATCHES).view(-1, 3)).concat()]
            return found + [p.grad.clone() for p in model.local_parameters() if p.grad is not None]

        given = {"auto_partition": False, "default_partition": 0, "microbatches": MICROBATCHES, "pipeline": "simple"}
        results = job.run(main, given)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return [tensor for result in results if isinstance(result, list) for tensor in result]

    found, expected = run(True), run(False)
    assert len(found) == len(expected) > 10
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_nothing_is_left_of_many_calls() -> None:
    module = nn.Sequential(Block(3), nn.BatchNorm1d(3), Block(3))
    module.register_buffer("table", torch.zeros(300, 300))

    def objects() -> int:
        gc.collect()
        return len(gc.get_objects())

    def calls(number: int) -> None:
        for _ in range(number):
            smp.checkpoint(module, torch.randn(4, 3)).sum().backward()
            smp.checkpoint_sequential(module, torch.randn(4, 3), "group_2").sum().backward()

    calls(3)
    before = objects()
    calls(50)
    assert objects() - before < 50


@pytest.mark.parametrize("how", ["mark", "call"])
def test_a_module_in_code_that_is_compiled(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.BatchNorm1d(4))

        def forward(self, x: torch.Tensor) -> Any:
            x = torch.sin(self.first(x))
            return smp.checkpoint(self.inner, x) if how == "call" else self.inner(x)

    again: list[Any] = []
    isolated = recompute.isolated
    monkeypatch.setattr(recompute, "isolated", lambda state: again.append(state) or isolated(state))
    torch.manual_seed(0)
    module = Around()
    plain = copy.deepcopy(module)
    if how == "mark":
        smp.set_activation_checkpointing(module.inner, strategy="contiguous")
        intercept_marked(module.modules())
    module.compile(backend="eager")
    x = torch.randn(5, 4)
    for _ in range(2):
        module(x).square().sum().backward()
        plain.inner(torch.sin(plain.first(x))).square().sum().backward()
    assert len(again) == 2
    for one, other in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    for one, other in zip(module.buffers(), plain.buffers(), strict=True):
        assert torch.equal(one, other)
