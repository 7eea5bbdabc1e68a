"""A linear layer in tiles beside ``nn.Linear``, in one process and over ranks that have some of the tiles each."""

from __future__ import annotations

import itertools
import json
import re
import weakref
from pathlib import Path
from typing import Any

import pytest
import shardwright as smp
import torch
from torch import nn

from tests.jobs.ranks import outputs_of_ranks

PROGRAM = Path(__file__).with_name("tiled_linear.py")
#: Input features, output features, in_splits, out_splits, and the other dims of the input.
LAYERS = [
    (5, 7, 2, 3, (4,)),
    (64, 96, 4, 3, (2, 9)),
    (72, 80, 1, 7, (33,)),
    (300, 200, 7, 1, (2, 3, 5)),
    (3, 2, 3, 2, (0,)),
    (8, 8, 1, 1, ()),
]


@pytest.fixture(autouse=True)
def _float64() -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def gradient_of(tiled: Any, name: str) -> torch.Tensor:
    if name == "bias":
        return torch.cat([row[0].bias.grad for row in tiled.tiles])
    return torch.cat([torch.cat([tile.weight.grad for tile in row], 1) for row in tiled.tiles])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("inner", "outer", "in_splits", "out_splits", "shape"), LAYERS)
def test_outputs_and_gradients_are_those_of_linear(
    inner: int, outer: int, in_splits: int, out_splits: int, shape: tuple[int, ...], bias: bool
) -> None:
    torch.manual_seed(3)
    linear = nn.Linear(inner, outer, bias)
    tiled = smp.nn.TiledLinear.from_linear(linear, in_splits, out_splits)
    x = torch.randn(*shape, inner, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    expected, found = linear(x), tiled(y)
    gradient = torch.randn_like(expected)
    expected.backward(gradient)
    found.backward(gradient)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(y.grad, x.grad, rtol=1e-12, atol=1e-13)
    for name, parameter in linear.named_parameters():
        torch.testing.assert_close(gradient_of(tiled, name), parameter.grad, rtol=1e-12, atol=1e-13)


def test_tiles_over_outputs_are_bit_equal_to_these_rows_of_the_layer() -> None:
    torch.manual_seed(3)
    linear, x = nn.Linear(72, 50), torch.randn(33, 72)
    found = smp.nn.TiledLinear.from_linear(linear, out_splits=4)(x)
    rows = zip(linear.weight.tensor_split(4), linear.bias.tensor_split(4), strict=True)
    assert torch.equal(found, torch.cat([nn.functional.linear(x, *row) for row in rows], -1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inner", "outer", "in_splits", "out_splits", "shape"), LAYERS)
def test_a_new_layer_has_the_numbers_of_linear_from_the_same_seed(
    inner: int, outer: int, in_splits: int, out_splits: int, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    torch.manual_seed(4)
    expected, after = nn.Linear(inner, outer, dtype=dtype), torch.rand(())
    torch.manual_seed(4)
    tiled = smp.nn.TiledLinear(inner, outer, in_splits=in_splits, out_splits=out_splits, dtype=dtype)
    assert torch.equal(torch.rand(()), after)
    found = tiled.to_linear()
    assert torch.equal(found.weight, expected.weight)
    assert torch.equal(found.bias, expected.bias)
    assert found.weight.dtype == dtype
    assert tiled(torch.ones(*shape, inner, dtype=dtype)).dtype == dtype


def test_parts_are_as_even_as_possible_and_have_the_documented_names() -> None:
    state = smp.nn.TiledLinear(10, 7, in_splits=3, out_splits=2, device="meta").state_dict()
    assert {name: tuple(value.shape) for name, value in state.items()} == {
        "tiles.0.0.weight": (4, 4),
        "tiles.0.0.bias": (4,),
        "tiles.0.1.weight": (4, 3),
        "tiles.0.2.weight": (4, 3),
        "tiles.1.0.weight": (3, 4),
        "tiles.1.0.bias": (3,),
        "tiles.1.1.weight": (3, 3),
        "tiles.1.2.weight": (3, 3),
    }


def test_conversions_copy_values_and_keep_what_is_frozen_and_the_mode_and_draw_nothing() -> None:
    linear = nn.Linear(6, 5).eval()
    linear.bias.requires_grad_(False)
    state = torch.get_rng_state()
    tiled = smp.nn.TiledLinear.from_linear(linear, 2, 2)
    back = tiled.to_linear()
    assert torch.equal(torch.get_rng_state(), state)
    for layer in (tiled, back):
        assert not layer.training
        assert {name.rpartition(".")[2]: one.requires_grad for name, one in layer.named_parameters()} == {
            "weight": True,
            "bias": False,
        }
    assert torch.equal(back.weight, linear.weight)
    assert torch.equal(back.bias, linear.bias)
    with torch.no_grad():
        linear.weight.zero_()
    assert tiled.tiles[0][0].weight.all()
    assert back.weight.all()


def test_one_product_is_alive_beside_the_sum_and_no_gradient_is_copied() -> None:
    tiled = smp.nn.TiledLinear(12, 10, in_splits=3, out_splits=2)
    products: list[Any] = []
    alive: list[int] = []
    gradients: list[int] = []

    def before(tile: nn.Module, args: Any) -> None:
        alive.append(sum(product() is not None for product in products))

    def after(tile: nn.Module, args: Any, product: torch.Tensor) -> None:
        products.append(weakref.ref(product.untyped_storage()))
        product.register_hook(lambda gradient: gradients.append(gradient.untyped_storage().data_ptr()))

    for tile in itertools.chain.from_iterable(tiled.tiles):
        tile.register_forward_pre_hook(before)
        tile.register_forward_hook(after)
    output = tiled(torch.randn(4, 12, requires_grad=True))
    assert alive == [0] * 6
    gradient = torch.randn_like(output)
    output.backward(gradient)
    assert gradients == [gradient.untyped_storage().data_ptr()] * 6


def test_gradients_of_gradients_are_right_and_the_output_may_be_written_to() -> None:
    tiled = smp.nn.TiledLinear(5, 4, in_splits=2, out_splits=2)
    x = torch.randn(3, 5, requires_grad=True)
    assert torch.autograd.gradcheck(tiled, x)
    assert torch.autograd.gradgradcheck(lambda x: tiled(x).tanh(), x)
    linear = tiled.to_linear()
    (found,) = torch.autograd.grad(tiled(x).relu_().sum(), x)
    (expected,) = torch.autograd.grad(linear(x).relu_().sum(), x)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(torch.func.grad(lambda x: tiled(x).relu().sum())(x), expected, rtol=1e-12, atol=1e-13)


def test_autocast_applies_to_the_tiles() -> None:
    tiled = smp.nn.TiledLinear(6, 4, in_splits=2, out_splits=2, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert tiled(torch.ones(2, 6, dtype=torch.float32)).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("splits", "text"), [({"in_splits": 0}, "in_splits is 0"), ({"out_splits": 4}, "1 to 3 parts")]
)
def test_numbers_of_parts_that_cannot_be_are_refused(splits: dict[str, int], text: str) -> None:
    with pytest.raises(smp.ConfigError, match=text):
        smp.nn.TiledLinear(2, 3, **splits)
    with pytest.raises(smp.ConfigError, match=text):
        smp.nn.TiledLinear.from_linear(nn.Linear(2, 3), **splits)


@pytest.mark.parametrize("shape", [(), (3,), (4, 3)])
def test_an_input_of_another_size_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(smp.ConfigError, match=re.escape("expected [..., 2]")):
        smp.nn.TiledLinear(2, 3, in_splits=2)(torch.ones(shape))


@pytest.mark.parametrize(
    ("ranks", "pipeline", "scenarios"),
    [
        (2, 2, ("small", "large", "small,checkpointed", "large,checkpointed", "large,tiles_checkpointed")),
        (2, 2, ("small,automatic", "large,automatic", "small,delayed", "large,delayed")),
        (3, 3, ("small", "large", "large,tiles_checkpointed")),
        (4, 2, ("small,sharded", "large,sharded", "large,sharded,checkpointed")),
    ],
)
def test_tiles_of_several_ranks_train_as_linear_in_one_process(
    ranks: int, pipeline: int, scenarios: tuple[str, ...]
) -> None:
    """Tensors above 4 KiB go through shared memory, others in messages."""
    for output in outputs_of_ranks(PROGRAM, str(pipeline), *scenarios, ranks=ranks):
        rows = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
        assert [row["scenario"] for row in rows] == list(scenarios)
        for row in rows:
            assert row["worst"] < 1e-12
            # An input and a gradient of each tile that is called from another rank: at least two tiles of a rank
            # with other tiles than the caller's, two microbatches and four steps.
            way = row["scenario"].partition(",")[0]
            least = 1 if "automatic" in row["scenario"] else 2 * 2 * 2 * 4
            assert row[way] >= least, row
