"""What is registered for a class, and what modules of it keep of their arguments."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import shardwright as smp
import torch
from shardwright.nn.entries import built_in
from shardwright.tensor_parallel.group import TensorGroup
from shardwright.tensor_parallel.registry import registered
from shardwright.tensor_parallel.substitution import Substitution, substitution_of
from torch import nn


class Affine(nn.Module):
    """A linear layer with names, arguments and a result of its own."""

    def __init__(self, shape: tuple[int, int], /, *, offset: bool = True) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(shape))
        self.offset = nn.Parameter(torch.randn(shape[1])) if offset else None

    def forward(self, x: torch.Tensor, transposed: bool = False) -> dict[str, torch.Tensor]:
        product = (x.mT if transposed else x) @ self.scale
        return {"out": product if self.offset is None else product + self.offset}


def affine_init(shape: tuple[int, int], /, *, offset: bool = True) -> Any:
    return shape, {"bias": offset}


def affine_forward(x: torch.Tensor, transposed: bool = False) -> Any:
    return (x.mT if transposed else x,), {}


def affine_weights(module: nn.Module) -> dict[str, torch.Tensor]:
    return {"weight": module.scale.mT, **({"bias": module.offset} if module.offset is not None else {})}


def make(module: nn.Module, **options: Any) -> Substitution:
    entry = registered(type(module)) or built_in(type(module))
    assert entry is not None
    made = substitution_of(module, entry, {"group": TensorGroup(None), **options}, "seed")
    for name, weight in made.weights():
        made.take(name, weight)
    made.finish()
    return made


def fresh_class(**hooks: Any) -> type[Affine]:
    class Registered(Affine):
        pass

    hooks = {"init_hook": affine_init, "forward_hook": affine_forward, **hooks}
    smp.tp_register_with_module(Registered, smp.nn.DistributedLinear, return_hook=lambda out: {"out": out}, **hooks)
    return Registered


def test_the_substitute_has_the_originals_interface_and_weights() -> None:
    cls = fresh_class(weights_hook=affine_weights)
    for offset in (True, False):
        original = copy.deepcopy(cls((4, 6), offset=offset)).double().eval()
        substitute = make(original).substitute
        x = torch.randn(4, 5, dtype=torch.float64)
        assert isinstance(substitute, smp.nn.DistributedLinear)
        assert type(substitute).__name__ == "DistributedLinear"
        assert not substitute.training
        torch.testing.assert_close(substitute(x, transposed=True), original(x, transposed=True))
        torch.testing.assert_close(copy.deepcopy(substitute)(x.mT), original(x.mT))
        assert [name for name, _ in substitute.named_parameters()] == ["weight", "bias"][: 1 + offset]


def test_what_is_frozen_stays_frozen() -> None:
    cls = fresh_class(weights_hook=affine_weights)
    original = cls((4, 6))
    original.offset.requires_grad_(False)
    substitute = make(original).substitute
    assert substitute.weight.requires_grad
    assert not substitute.bias.requires_grad
    assert [p.requires_grad for p in original.parameters()] == [True, False]
    assert not any(p.requires_grad for p in make(original.requires_grad_(False)).substitute.parameters())

    detached = fresh_class(weights_hook=lambda module: {n: w.detach() for n, w in affine_weights(module).items()})
    mixed = detached((4, 6))
    mixed.offset.requires_grad_(False)
    with pytest.raises(smp.ConfigError, match="but not all or none of those that make 'weight'"):
        make(mixed)


def test_weights_without_a_known_name_are_fresh_and_leave_the_generator_alone() -> None:
    original = fresh_class()((4, 6))
    state = torch.random.get_rng_state()
    first, second = make(original), make(original)
    assert torch.equal(state, torch.random.get_rng_state())
    assert first.fresh == ("bias", "weight")
    assert torch.equal(first.substitute.weight, second.substitute.weight)
    part = fresh_class(weights_hook=lambda module: {"bias": module.offset})((4, 6))
    assert make(part).fresh == ("weight",)


def test_weights_that_do_not_fit_are_a_reason() -> None:
    wrong_shape = fresh_class(weights_hook=lambda module: {"weight": module.scale})
    with pytest.raises(smp.ConfigError, match=r"'weight' has shape \(4, 6\), that of DistributedLinear \(6, 4\)"):
        make(wrong_shape((4, 6)))
    extended = nn.Linear(2, 2)
    extended.extra = nn.Parameter(torch.ones(1))
    with pytest.raises(smp.ConfigError, match="it has a 'extra', which DistributedLinear has not"):
        make(extended)


def test_arguments_of_a_mark_win_where_they_are_known() -> None:
    made = make(nn.Linear(4, 6), dtype=torch.float64, unheard_of=1)
    assert made.options == {"dtype", "group"}
    assert made.substitute.weight.dtype == torch.float32  # the original's weights keep their own
    assert make(fresh_class()((4, 6)), dtype=torch.float64).substitute.weight.dtype == torch.float64


def test_arguments_of_a_mark_reach_what_a_class_passes_on() -> None:
    class Layer(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    class Divided(smp.nn.DistributedTransformerLayer):
        def __init__(self, **options: Any) -> None:
            super().__init__(2, 4, 8, 16, **options)

    for dist_module, sizes in ((Divided, ()), (smp.nn.DistributedTransformerLayer, (2, 4, 8, 16))):
        smp.tp_register_with_module(Layer, dist_module, lambda sizes=sizes: (sizes, {}))
        made = make(Layer(), activation="relu", attention_in_fp32=True, fused_softmax=True)
        assert made.options == {"activation", "attention_in_fp32", "group"}
        assert made.substitute.output.activation == "relu"
        assert made.substitute.attention.attention_in_fp32


def test_a_class_registered_too_late_needs_from_module() -> None:
    class Early(Affine):
        pass

    early = Early((4, 6))
    smp.tp_register(smp.nn.DistributedLinear, affine_init)(Early)
    with pytest.raises(smp.ConfigError, match="made before its class was registered"):
        make(early)
    smp.tp_register_with_module(
        Early, smp.nn.DistributedLinear, from_module=lambda module: (tuple(module.scale.shape), {})
    )
    assert make(early).substitute.in_features == 4


def test_arguments_are_kept_by_modules_of_exactly_the_class() -> None:
    base = fresh_class()

    class Derived(base):
        def __init__(self) -> None:
            super().__init__((4, 6))

    assert registered(Derived) is None
    assert "_smp_made_with" not in Derived().__dict__
    assert base((4, 6), offset=False).__dict__["_smp_made_with"] == (((4, 6),), {"offset": False})


def test_a_class_without_an_init_of_its_own_is_still_seen_by_contexts() -> None:
    @smp.tp_register(smp.nn.DistributedLinear, lambda: ((4, 4), {}))
    class Bare(nn.Module):
        pass

    with smp.tensor_parallelism():
        bare = Bare()
    assert bare.__dict__["_smp_tensor_parallelism"].enabled
    assert make(bare).fresh == ("bias", "weight")


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(smp.ConfigError, match=r"dist_module is .*Linear.*; allowed: subclasses of smp.nn"):
        smp.tp_register(nn.Linear)(Affine)
    with pytest.raises(smp.ConfigError, match="3 was to be registered"):
        smp.tp_register_with_module(3, smp.nn.DistributedLinear)
    with pytest.raises(smp.ConfigError, match="return_hook is 1"):
        smp.tp_register_with_module(Affine, smp.nn.DistributedLinear, return_hook=1)
    with pytest.raises(smp.ConfigError, match="not both"):
        smp.tp_register_with_module(Affine, smp.nn.DistributedLinear, affine_init, from_module=affine_init)
    assert registered(Affine) is None
