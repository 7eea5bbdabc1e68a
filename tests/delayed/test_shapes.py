"""A trace without the values of weights sees what one of a model with values sees."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import shardwright as smp
import torch
from shardwright.config import load_config
from shardwright.delayed.draws import advanced
from shardwright.delayed.materialise import is_delayed, materialise
from shardwright.delayed.shapes import NoValuesError, as_shapes
from shardwright.partition.by_shapes import trace_by_shapes
from shardwright.partition.decide import decide
from shardwright.partition.record import Trace
from shardwright.partition.trace import trace_forward
from shardwright.progress import Progress
from torch import nn


def by_shapes(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], **options: Any) -> Trace | None:
    chosen: dict[str, Any] = {"measure_times": False, "measure_memory": False, **options}
    return trace_by_shapes(model, model, args, kwargs, device=torch.device("cpu"), progress=Progress(0), **chosen)


class Branching(nn.Module):
    """Whose course depends on what it computes from weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.second(x) if x.sum() > 0 else x


class Counting(nn.Module):
    """With state, a course that depends on its input, and a weight that another module uses."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.head, self.unused = nn.Linear(4, 3), nn.Linear(4, 3)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        x = self.body(x).mean((2, 3))
        self.latest = x.detach()
        head = self.unused if x.shape[0] > 99 or bool((self.steps > 5).item()) else self.head
        return head(x) + self.unused.bias


def of_transformers(kind: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes: dict[str, Any] = {
        "GPT2": {"n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 50, "bos_token_id": 0, "eos_token_id": 0},
        "GPTNeoX": {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32},
        "Llama": {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32},
        "Bert": {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32},
    }
    names = {"GPT2": "GPT2LMHeadModel", "GPTNeoX": "GPTNeoXForCausalLM", "Llama": "LlamaForCausalLM"}
    configuration = getattr(transformers, f"{kind}Config")(**{"vocab_size": 50, **sizes[kind]})
    model: nn.Module = getattr(transformers, names.get(kind, "BertForMaskedLM"))(configuration)
    return model


def tokens() -> dict[str, torch.Tensor]:
    ids = torch.arange(12).view(2, 6)
    return {"input_ids": ids, "labels": ids}


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]]] = {
    **{
        kind: (lambda kind=kind: of_transformers(kind), lambda: ((), tokens()))
        for kind in ("GPT2", "GPTNeoX", "Llama", "Bert")
    },
    "LSTM": (lambda: nn.LSTM(4, 5, 2), lambda: ((torch.ones(3, 2, 4),), {})),
    "transformer": (
        lambda: nn.Transformer(16, 2, 1, 1, 32, dropout=0.0),
        lambda: ((torch.ones(3, 2, 16), torch.ones(3, 2, 16)), {}),
    ),
    "state": (Counting, lambda: ((torch.ones(2, 3, 5, 5),), {})),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("training", [True, False])
def test_it_sees_the_same(name: str, training: bool) -> None:
    maker, inputs = CASES[name]
    torch.manual_seed(1)
    model = maker().train(training)
    torch.manual_seed(1)
    with smp.delay_param_initialization():
        delayed = maker().train(training)
    args, kwargs = inputs()
    expected = trace_forward(model, model, args, kwargs, device=torch.device("cpu"))
    found = by_shapes(delayed, args, kwargs)
    assert found is not None
    for field in dataclasses.fields(Trace):
        assert getattr(found, field.name) == getattr(expected, field.name), field.name
    assert all(map(is_delayed, delayed.parameters()))
    materialise(delayed.parameters())
    assert all(torch.equal(one, other) for one, other in zip(delayed.parameters(), model.parameters(), strict=True))
    assert all(torch.equal(one, other) for one, other in zip(delayed.buffers(), model.buffers(), strict=True))


def test_a_course_that_depends_on_weights_needs_values() -> None:
    with smp.delay_param_initialization():
        model = Branching()
    assert by_shapes(model, (torch.ones(2, 3),), {}) is None
    assert all(map(is_delayed, model.parameters()))
    with as_shapes(model.parameters()):
        with pytest.raises(NoValuesError, match="needs values"):
            model.first.weight.sum().item()
        with pytest.raises(NoValuesError, match="to a tensor with values"):
            torch.ones(3, 3).add_(model.first.weight)
        assert isinstance(model.first.weight, nn.Parameter)
        assert "tensor without values, shape=(3, 3)" in repr(model.first.weight)


def test_times_that_cannot_be_measured_are_refused() -> None:
    with smp.delay_param_initialization():
        model = Branching()
    options = {"trace_execution_times": True}
    with pytest.raises(smp.PartitionError, match="needs a model with values, but this one has delayed parameters"):
        decide(model, functools.partial(model, torch.ones(2, 3)), load_config({}, {}, {}), 2, options)
    decision = decide(model, functools.partial(model, torch.ones(2, 3)), load_config({}, {}, {}), 2)
    assert {decision.modules["first"], decision.modules["second"]} == {0, 1}


def test_all_layers_are_measured_and_equal_ones_once() -> None:
    with smp.delay_param_initialization():
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)), nn.Linear(64, 640))
    found = by_shapes(model, (torch.ones(8, 64),), {}, measure_times=True, measure_memory=True)
    assert found is not None
    seconds = [found.modules[str(number)].own_seconds or 0.0 for number in range(4)]
    assert min(seconds) > 0
    assert seconds[0] == seconds[1] == seconds[2]
    assert [found.modules[str(number)].own_activation_bytes > 0 for number in range(4)] == [True] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("numbers", [1 << 18, (1 << 18) + 624, (1 << 18) + 7, 3_000_001])
@pytest.mark.parametrize("draw", [torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default])
@pytest.mark.parametrize("before", [0, 1, 623, 624, 1000])
def test_a_generator_is_advanced_as_if_it_had_drawn(draw: Any, dtype: torch.dtype, numbers: int, before: int) -> None:
    generator = torch.Generator().manual_seed(9)
    torch.empty(before).uniform_(generator=generator)
    values = torch.empty(numbers, dtype=dtype)
    after = advanced(draw, values.to("meta"), generator.get_state())
    assert after is not None
    draw(values, generator=generator)
    assert torch.equal(after, generator.get_state())


def test_what_is_small_or_strided_or_drawn_otherwise_is_drawn() -> None:
    state = torch.Generator().get_state()
    normal, large = torch.ops.aten.normal_.default, torch.empty(600, 600, device="meta")
    assert advanced(normal, large, state) is not None
    assert advanced(normal, large[:10], state) is None
    assert advanced(normal, large.t(), state) is None
    assert advanced(torch.ops.aten.exponential_.default, large, state) is None


def test_weights_that_are_not_drawn_at_creation_have_the_numbers_of_ordinary_creation() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(600, 700), nn.Embedding(600, 500), nn.Linear(7, 5))

    torch.manual_seed(2)
    whole = make()
    after = torch.rand(3)
    torch.manual_seed(2)
    with smp.delay_param_initialization():
        delayed = make()
    assert torch.equal(torch.rand(3), after)
    materialise(delayed.parameters())
    assert all(torch.equal(one, other) for one, other in zip(delayed.parameters(), whole.parameters(), strict=True))
