"""The trace tells what runs when, and leaves nothing behind."""

from __future__ import annotations

import gc
import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from shardwright.errors import PartitionError
from shardwright.partition import trace as trace_module
from shardwright.partition.gpu_fallback import retrying_on
from shardwright.partition.record import Trace
from shardwright.partition.trace import choose_device, is_tracing, trace_forward
from torch import nn


class Restless(nn.Module):
    """Changes everything that a forward can change."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4, max_norm=0.5)
        self.norm = nn.BatchNorm1d(4)
        self.cast = nn.Linear(4, 4)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("state", torch.zeros(4))
        self.alias = self.state
        self.seen: list[int] = []
        self.table: dict[str, int] = {"calls": 0}
        self.last: torch.Tensor | None = None

    def forward(self, index: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        self.state = self.state + 1
        self.alias.add_(3)
        self.seen.append(len(self.seen))
        self.table["calls"] += 1
        self.fresh = random.random() + numpy.random.rand()
        scale.mul_(2)
        self.norm.weight.data.mul_(2)
        torch.set_default_dtype(torch.float64)
        self.cast = self.cast.to(torch.float64)
        self.norm.eval()
        self.norm.train()
        self.eval()
        self.last = nn.functional.dropout(self.norm(self.embedding(index)), 0.5) * scale
        return self.last


def executed(trace: Trace) -> list[str]:
    """The paths of the executed modules in the order of their first execution."""
    records = [(record.execution_index, path) for path, record in trace.modules.items()]
    return [path for _, path in sorted((index, path) for index, path in records if index is not None)]


def snapshot(model: nn.Module) -> dict[str, Any]:
    return {
        "parameters": [(id(p), p.dtype, p._version, p.tolist(), p.data_ptr(), p.grad) for p in model.parameters()],
        "buffers": [(n, id(b), b._version, b.tolist(), b.data_ptr()) for n, b in model.named_buffers()],
        "attributes": [dict(m.__dict__) for m in model.modules()],
        "training": [m.training for m in model.modules()],
        "random": (torch.get_rng_state().tolist(), random.getstate(), numpy.random.get_state()[1].tolist()),
        "default": torch.get_default_dtype(),
    }


@pytest.mark.parametrize("measure", [False, True])
def test_nothing_of_a_trace_can_be_seen(measure: bool) -> None:
    model = Restless()
    before = snapshot(model)
    scale = torch.full((4,), 2.0)
    index = torch.tensor([0, 1, 2])
    trace_forward(model, model, (index, scale), measure_times=measure, measure_memory=measure)
    after = snapshot(model)
    for kind in before:
        assert after[kind] == before[kind], kind
    assert scale.tolist() == [2.0] * 4
    assert model.seen == []
    assert model.table == {"calls": 0}
    assert "__getattribute__" not in nn.Module.__dict__
    assert nn.Module.__setattr__.__module__ == "torch.nn.modules.module"


def test_nothing_can_be_seen_after_a_forward_that_fails() -> None:
    class Failing(Restless):
        def forward(self, index: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            super().forward(index, scale)
            raise LookupError("mine")

    model = Failing()
    before = snapshot(model)
    with pytest.raises(LookupError, match="mine"):
        trace_forward(model, model, (torch.tensor([0, 1]), torch.ones(4)))
    after = snapshot(model)
    for kind in before:
        assert after[kind] == before[kind], kind
    assert not is_tracing()


class Block(nn.Module):
    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.second = nn.Linear(size, size)
        self.first = nn.Linear(size, size)
        self.unused = nn.Linear(size, size)

    def forward(self, x: torch.Tensor, *, times: int = 1) -> dict[str, torch.Tensor]:
        assert is_tracing()
        x = self.first(x)
        for _ in range(times):
            x = self.second(x)
        return {"x": x}

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x)


def test_order_and_number_of_calls_are_seen() -> None:
    model = Block()
    assert not is_tracing()
    trace = trace_forward(model, model, (torch.ones(2, 4),), {"times": 3})
    assert executed(trace) == ["", "first", "second"]
    assert trace.modules["second"].num_calls == 3
    assert trace.modules["unused"].execution_index is None
    assert set(trace.calls) == {("", "", 1), ("", "first", 1), ("", "second", 3)}
    kept = {path: record.own_activation_bytes for path, record in trace.modules.items()}
    assert kept == {"": 0, "first": 2 * 4 * 4, "second": 3 * 2 * 4 * 4, "unused": 0}
    assert trace.modules["second"].operations == 3 * 2 * 2 * 4 * 4
    assert trace.modules[""].operations == 4 * 2 * 2 * 4 * 4
    assert trace.modules[""].own_seconds is None
    assert trace.joins == ()


def test_any_method_of_the_model_can_be_traced() -> None:
    model = Block()
    trace = trace_forward(model, lambda x: model.encode(x), (torch.ones(2, 4),))
    assert executed(trace) == ["first"]
    assert trace.calls == (("", "first", 1),)
    assert trace.joins == ()


def test_times_are_each_modules_own_also_where_it_calls_itself() -> None:
    class Recursive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor, depth: int) -> torch.Tensor:
            return self.inner(x) if depth == 0 else self(x, depth - 1)

    model = Recursive()
    trace = trace_forward(model, model, (torch.ones(8, 64), 3), measure_times=True)
    inner, outer = (trace.modules[path].own_seconds for path in ("inner", ""))
    assert inner is not None
    assert outer is not None
    assert min(inner, outer) > 0
    assert trace.measurement is not None
    assert inner + outer == pytest.approx(trace.measurement.seconds())


def test_memory_that_autograd_keeps_is_measured() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Flatten())
    trace = trace_forward(model, model, (torch.ones(2, 4),), measure_memory=True)
    # The linear keeps its input, the activation its result; the reshape keeps nothing.
    assert [trace.modules[path].own_activation_bytes for path in ("", "0", "1", "2")] == [0, 32, 32, 0]
    assert all(p.grad is None for p in model.parameters())


def test_a_model_on_the_meta_device_is_traced_without_times() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        x = torch.ones(2, 4)
    trace = trace_forward(model, model, (x,))
    assert executed(trace) == ["", "0", "1"]
    assert choose_device(model, "gpu") is None
    with pytest.raises(PartitionError, match="meta device"):
        trace_forward(model, model, (x,), measure_times=True)


def test_a_gpu_trace_without_a_gpu_runs_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device(nn.Linear(2, 2), "gpu") == torch.device("cpu")
    assert choose_device(nn.Linear(2, 2), "cpu") == torch.device("cpu")


def test_a_module_with_an_unsupported_operation_runs_on_the_other_device(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    attempts = tmp_path / "attempts"  # what is in memory would be put back

    class Picky(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with attempts.open("a") as file:
                file.write("x")
            if attempts.read_text() == "x":
                raise NotImplementedError("no kernel here")
            return x

    model = nn.Sequential(nn.Linear(2, 2), Picky(), nn.Linear(2, 2))
    cpu = torch.device("cpu")
    monkeypatch.setattr(trace_module, "runner_for", lambda device: retrying_on(cpu, cpu))
    trace = trace_forward(model, model, (torch.ones(1, 2),))
    assert attempts.read_text() == "xx"
    assert executed(trace) == ["", "0", "1", "2"]
    assert trace.modules["1"].num_calls == 1


def test_modules_with_their_own_call_and_direct_forwards_are_seen() -> None:
    class Own(nn.Linear):
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return self.forward(x) + 1

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = Own(2, 2)
            self.direct = nn.Linear(2, 2)
            self.hooked = nn.Linear(2, 2)
            self.hooked.register_forward_pre_hook(lambda module, args: (args[0] * module.weight.sum(),))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.hooked(self.direct.forward(self.own(x)))

    model = Model()
    trace = trace_forward(model, model, (torch.ones(1, 2),))
    assert executed(trace) == ["", "own", "direct", "hooked"]
    assert {path: record.num_calls for path, record in trace.modules.items()} == {
        "": 1,
        "own": 1,
        "direct": 1,
        "hooked": 1,
    }
    assert trace.joins == ()


def test_compiled_modules_are_traced_uncompiled() -> None:
    calls = []

    def backend(graph: Any, inputs: Any) -> Any:
        calls.append(graph)
        return graph

    model = nn.Sequential(torch.compile(nn.Linear(2, 2), backend=backend), nn.Linear(2, 2))
    model[1].compile(backend=backend)
    compiled = model[1]._compiled_call_impl
    trace = trace_forward(model, model, (torch.ones(1, 2),))
    assert executed(trace) == ["", "0", "0._orig_mod", "1"]
    assert calls == []
    assert model[1]._compiled_call_impl is compiled


def test_a_forward_that_differentiates_something_is_traced_with_gradients() -> None:
    class Forces(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.energy = nn.Linear(3, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad() if torch.is_grad_enabled() else torch.no_grad():
                x = x.requires_grad_()
                return torch.autograd.grad(self.energy(x).sum(), x)[0]

    model = Forces()
    trace = trace_forward(model, model, (torch.ones(2, 3),))
    assert executed(trace) == ["", "energy"]


def test_a_trace_with_gradients_may_write_to_an_argument_as_the_forward_may() -> None:
    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x.mul_(2))

    model = Writing()
    x = torch.ones(2, 3, requires_grad=True) * 1
    assert executed(trace_forward(model, model, (x,), measure_memory=True)) == ["", "layer"]
    assert x.tolist() == torch.ones(2, 3).tolist()


def test_a_trace_under_autocast_does_not_cut_the_gradients_of_what_follows() -> None:
    model = nn.Linear(4, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        trace_forward(model, model, (torch.ones(2, 4),))
        model(torch.ones(2, 4)).float().sum().backward()
    assert model.weight.grad is not None


def test_lazy_modules_are_refused() -> None:
    with pytest.raises(PartitionError, match=r"'1\.weight' has no shape yet"):
        trace_forward(nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2)), lambda: None)


def test_running_out_of_memory_says_what_to_do() -> None:
    class Large(nn.Module):
        def forward(self) -> None:
            raise torch.OutOfMemoryError("no more")

    with pytest.raises(PartitionError, match="trace_device='cpu'"):
        trace_forward(Large(), Large())


def test_a_trace_under_inference_mode_leaves_ordinary_tensors() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    before = snapshot_of(model)
    with torch.inference_mode():
        trace = trace_forward(model, model, (torch.ones(2, 4),))
    assert executed(trace) == ["", "0", "1"]
    assert snapshot_of(model) == before
    model(torch.ones(2, 4)).sum().backward()


def snapshot_of(model: nn.Module) -> list[Any]:
    tensors = [*model.parameters(), *model.buffers()]
    return [(id(t), t._version, t.tolist(), t.is_inference()) for t in tensors]


class Uncollected(nn.Linear):
    """Fails where garbage would be collected, and where it is told to."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert not gc.isenabled()
        if self.fails:
            raise KeyError("no")
        return super().forward(x)


def test_no_garbage_is_collected_meanwhile_and_again_afterwards() -> None:
    model = Uncollected()
    trace_forward(model, model, (torch.ones(1, 2),), measure_times=True)
    assert gc.isenabled()
    model.fails = True
    with pytest.raises(KeyError):
        trace_forward(model, model, (torch.ones(1, 2),))
    assert gc.isenabled()
    gc.disable()
    try:
        model.fails = False
        trace_forward(model, model, (torch.ones(1, 2),))
        assert not gc.isenabled()
    finally:
        gc.enable()


class OtherWay(nn.Module):
    """Runs only one way with gradients on, and another with them off."""

    def __init__(self, *ways: bool) -> None:
        super().__init__()
        self.layer, self.ways = nn.Linear(4, 4), ways

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() not in self.ways:
            raise KeyError("there is no such way")
        return self.layer(x)


def test_a_forward_that_fails_without_gradients_is_traced_with_them() -> None:
    trace = trace_forward(model := OtherWay(True), model, (torch.ones(2, 4),))
    assert ("", "layer", 1) in trace.calls


def test_a_forward_that_always_fails_says_why() -> None:
    with pytest.raises(KeyError, match="no such way"):
        trace_forward(model := OtherWay(), model, (torch.ones(2, 4),))
