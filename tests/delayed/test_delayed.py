"""Delayed parameters: the same numbers as ever, no memory until then, and nothing that could be silently wrong."""

from __future__ import annotations

import copy
import io
import resource
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import shardwright as smp
import torch
from shardwright.delayed.agreement import draw_as_first
from shardwright.delayed.materialise import has_delayed, is_delayed, materialise
from shardwright.delayed.operations import Operation
from torch import nn
from torch.nn.utils import parametrizations

from tests.jobs.patience import HANG_SECONDS


class Unusual(nn.Module):
    """Parameters made in other ways than by layers."""

    def __init__(self) -> None:
        super().__init__()
        self.orthogonal = nn.Parameter(nn.init.orthogonal_(torch.empty(3, 5)))
        self.truncated = nn.Parameter(nn.init.trunc_normal_(torch.empty(4, 4), std=0.1))
        self.sparse = nn.Parameter(nn.init.sparse_(torch.empty(6, 4), 0.5))
        self.computed = nn.Parameter(torch.linspace(0, 1, 6).view(2, 3).t().contiguous() * 2)
        self.drawn = nn.Parameter(torch.randn(3, 4).mul_(torch.rand(4)).cumsum(0))
        self.of_bernoulli = nn.Parameter(torch.bernoulli(torch.full((8,), 0.5)))
        self.rows = nn.Parameter(torch.zeros(5, 2))
        self.rows.data[1:3].normal_()
        self.rows.data[4] = 1
        self.own_generator = nn.Parameter(torch.empty(7).normal_(generator=torch.Generator().manual_seed(5)))
        self.rounded = nn.Parameter(torch.randn(4, dtype=torch.bfloat16))
        self.imaginary = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        first, second = torch.randn(2, 3).unbind()
        self.first, self.again = nn.Parameter(first), nn.Parameter(second)
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 3)]
        self.register_buffer("mask", torch.ones(4, 4).tril())
        self.kept = torch.arange(3.0)


def tied() -> nn.Module:
    layer = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7, bias=False))
    layer[1].weight = layer[0].weight
    return layer


MAKERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(4, 5),
    "embedding": lambda: nn.Embedding(10, 4, padding_idx=2),
    "transformer": lambda: nn.Transformer(16, 2, 1, 2, 32),
    "LSTM": lambda: nn.LSTM(4, 5, 2),
    "batch normalisation": lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(4, 4)),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(4, 4)),
    "spectral norm": lambda: nn.utils.spectral_norm(nn.Linear(4, 4)),
    "tied": tied,
    "unusual": Unusual,
}


def add_one_to_gradient(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad += 1


def make_both(maker: Callable[[], nn.Module], seed: int = 3) -> tuple[nn.Module, nn.Module]:
    """The module made at once, and delayed; the generator is left alike."""
    torch.manual_seed(seed)
    whole = maker()
    after = torch.rand(3)
    torch.manual_seed(seed)
    with smp.delay_param_initialization():
        delayed = maker()
    assert torch.equal(torch.rand(3), after)
    return whole, delayed


def assert_same(delayed: nn.Module, whole: nn.Module) -> None:
    """Every tensor is an ordinary one with the same values, and lies in memory alike."""
    found, expected = delayed.state_dict(), whole.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert type(found[name]) is torch.Tensor, name
        assert torch.equal(found[name], tensor), name
        assert found[name].stride() == tensor.stride(), name
        assert found[name].dtype == tensor.dtype, name
    assert [p.requires_grad for p in delayed.parameters()] == [p.requires_grad for p in whole.parameters()]
    assert all(type(parameter) is nn.Parameter for parameter in delayed.parameters())


@pytest.mark.parametrize("name", MAKERS)
def test_the_numbers_are_those_of_ordinary_creation(name: str) -> None:
    whole, delayed = make_both(MAKERS[name])
    parameters = list(delayed.parameters())
    assert all(map(is_delayed, parameters))
    assert not any(is_delayed(buffer) for buffer in delayed.buffers())
    copied = copy.deepcopy(delayed)
    for module in (delayed, copied):
        materialise(module.parameters())
        assert_same(module, whole)
    assert all(before is after for before, after in zip(parameters, delayed.parameters(), strict=True))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_parameters_are_made_on_their_device_and_go_where_they_are_placed(device: str) -> None:
    def make() -> nn.Module:
        here = nn.Linear(4, 5)
        with torch.device(device):
            return nn.Sequential(here, nn.Linear(5, 600), nn.Embedding(600, 300))

    whole, delayed = make_both(make)
    assert [one.device for one in delayed.parameters()] == [one.device for one in whole.parameters()]
    materialise(delayed.parameters(), torch.device(device))
    assert {one.device.type for one in delayed.parameters()} == {device}
    assert_same(delayed, whole.to(device))


def test_values_can_be_read_at_any_time() -> None:
    whole, delayed = make_both(Unusual)
    for name, parameter in delayed.named_parameters():
        expected = whole.get_parameter(name)
        assert torch.equal(parameter.cos(), expected.cos()), name
        assert parameter.tolist() == expected.tolist(), name
    assert delayed.rates == whole.rates
    assert torch.equal(delayed.kept, whole.kept)
    written = io.BytesIO()
    torch.save(delayed.state_dict(), written)
    written.seek(0)
    loaded = torch.load(written)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in whole.state_dict().items())
    assert has_delayed(delayed)
    assert "without values yet, shape=(3, 5)" in repr(delayed.orthogonal)


def test_what_is_done_outside_counts_too() -> None:
    whole, delayed = make_both(lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)))
    torch.manual_seed(8)
    states = []
    for module in (whole, delayed):
        torch.manual_seed(8)
        nn.init.xavier_normal_(module[0].weight)
        with torch.no_grad():
            module[0].bias.add_(module[1].bias)
            module[1].bias.mul_(2)
            module[1].weight[1:3].fill_(3)
        module[2].load_state_dict({"weight": torch.ones(2, 4), "bias": torch.zeros(2)})
        module.double()
        states.append(torch.get_rng_state())
    assert torch.equal(*states)
    assert is_delayed(delayed[0].weight)
    with torch.no_grad():
        for module in (whole, delayed):  # what was loaded has memory, and is written to there
            module[2].weight.sub_(torch.full((2, 4), 0.25))
    materialise(delayed.parameters())
    assert_same(delayed, whole)


def test_values_that_were_read_before_a_write_are_those_of_before() -> None:
    with smp.delay_param_initialization():
        first = torch.ones(3)
        second = first * 2
        first.add_(1)
        third = first + second
        first.copy_(torch.tensor([5.0, 6.0, 7.0]))  # memory of its own from here on
        fourth = first + 1
        module = nn.ParameterList([first, second, third, fourth])
    assert [one.tolist() for one in module] == [[5, 6, 7], [2, 2, 2], [4, 4, 4], [6, 7, 8]]


def test_where_values_are_read_or_written_does_not_matter() -> None:
    def make() -> nn.Module:
        return nn.ParameterList([torch.cat([torch.randn(3), torch.rand(3)]) @ torch.eye(6), torch.rand(2)])

    whole, delayed = make_both(make)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(delayed[0] + 1, whole[0] + 1)
    with torch.inference_mode():
        assert torch.equal(delayed[1].cos(), whole[1].cos())
        delayed[1].copy_(torch.tensor([7.0, 8.0]))
    with torch.no_grad(), torch.device("meta"):
        delayed[1].add_(torch.ones(2, device="cpu"))
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        materialise(delayed.parameters())
    assert torch.equal(delayed[0], whole[0])
    assert delayed[1].tolist() == [8, 9]
    (delayed[0].sum() + delayed[1].prod()).backward()
    assert delayed[1].grad is not None


def test_hooks_attributes_gradients_and_optimizers_stay() -> None:
    whole, delayed = make_both(lambda: nn.Linear(3, 2))
    optimizers = []
    for module in (whole, delayed):
        module.weight.register_hook(lambda gradient: gradient * 2)
        module.weight.register_post_accumulate_grad_hook(add_one_to_gradient)
        module.weight.marked = "by the script"  # type: ignore[assignment]
        module.bias.grad = torch.ones(2)
        optimizers.append(torch.optim.AdamW(module.parameters(), lr=0.1))
    held = weakref.ref(delayed.weight)
    materialise(delayed.parameters())
    assert held() is delayed.weight
    assert delayed.weight.marked == "by the script"
    for module, optimizer in zip((whole, delayed), optimizers, strict=True):
        module(torch.ones(4, 3)).sum().backward()
        optimizer.step()
    assert_same(delayed, whole)
    assert torch.equal(delayed.weight.grad, whole.weight.grad)


def test_memory_that_parameters_share_is_shared_afterwards() -> None:
    def make() -> nn.Module:
        flat = torch.randn(6)
        return nn.ParameterList([flat[:4], flat[2:]])

    whole, delayed = make_both(make)
    materialise(delayed.parameters())
    for module in (whole, delayed):
        with torch.no_grad():
            module[0].mul_(3)
    assert_same(delayed, whole)


def test_a_part_of_something_larger_takes_memory_for_itself_alone() -> None:
    with smp.delay_param_initialization():
        part = nn.Parameter(torch.randn(1000, 10)[3])
    materialise([part])
    assert part.untyped_storage().nbytes() == 10 * part.element_size()


def test_only_what_is_created_inside_and_on_this_thread_is_delayed() -> None:
    made: list[nn.Module] = []
    with smp.delay_param_initialization():
        thread = threading.Thread(target=lambda: made.append(nn.Linear(2, 2)))
        thread.start()
        thread.join()
        with smp.delay_param_initialization(False):
            made.append(nn.Linear(2, 2))
        inside = nn.Linear(2, 2)
    made.append(nn.Linear(2, 2))
    assert has_delayed(inside)
    assert not any(map(has_delayed, made))
    with pytest.raises(smp.ConfigError, match="enabled is 1; allowed: True and False"):
        smp.delay_param_initialization(1).__enter__()  # type: ignore[arg-type]


def test_what_cannot_be_noted_or_given_values_is_refused() -> None:
    with smp.delay_param_initialization():
        layer = nn.Linear(2, 3)
    with pytest.raises(smp.ShardwrightError, match=r"resize_.* cannot be noted: create the module outside"):
        layer.bias.data.resize_(5)
    graph = layer(torch.ones(1, 2))
    with pytest.raises(smp.ShardwrightError, match=r"shape \(3, 2\) cannot get its values: a view of it that autograd"):
        materialise([layer.weight])
    del graph
    materialise([layer.weight])


def test_other_ranks_draw_what_the_first_one_draws() -> None:
    def of(seed: int, maker: Callable[[], Any] = Unusual) -> list[Any]:
        torch.manual_seed(seed)
        with smp.delay_param_initialization():
            # Sparse initialisation writes values of its own.
            return [parameter for parameter in maker().parameters() if not parameter.is_written]

    def agree(ranks: list[list[Any]]) -> list[bool]:
        gathered: list[list[Any]] = [[] for _ in ranks]
        meeting = threading.Barrier(len(ranks))
        answers = [False] * len(ranks)

        def run(rank: int) -> None:
            def gather(value: Any) -> list[Any]:
                gathered[rank].append(value)
                meeting.wait(HANG_SECONDS)
                return [each[len(gathered[rank]) - 1] for each in gathered]

            answers[rank] = draw_as_first([one.value for one in ranks[rank]], gather, is_first=rank == 0)

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(ranks))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return answers

    first, same, other = of(1), of(1), of(2)
    assert not torch.equal(first[0], other[0])
    assert agree([first, same, other]) == [True, True, True]
    for one, another in zip(first, other, strict=True):
        assert torch.equal(one, another)
    scaled = [of(1, lambda factor=factor: nn.ParameterList([torch.randn(3) * factor])) for factor in (2.0, 3.0)]
    assert agree(scaled) == [False, False]


def test_values_that_are_overwritten_are_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    run = Operation.run

    def noted(operation: Operation, real: Any) -> Any:
        ran.append(operation.function)
        return run(operation, real)

    with smp.delay_param_initialization():
        layer = nn.Linear(2, 2)
        nn.init.zeros_(layer.weight)
    monkeypatch.setattr(Operation, "run", noted)
    materialise([layer.weight])
    assert torch.equal(layer.weight, torch.zeros(2, 2))
    assert [function.overloadpacket.__name__ for function in ran] == ["empty", "zero_"]
    materialise([layer.bias])
    assert [function.overloadpacket.__name__ for function in ran[2:]] == ["empty", "uniform_"]


def test_creation_takes_no_memory() -> None:
    nn.Linear(1000, 1000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with smp.delay_param_initialization():
        layers = nn.Sequential(*(nn.Linear(2000, 2000, bias=False) for _ in range(60)))
    assert sum(parameter.nbytes for parameter in layers.parameters()) == 960_000_000
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 100_000, f"{grown} KiB"
