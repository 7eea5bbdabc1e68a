"""Divided transformer modules: dropout, refusals, half precision, and what they start with."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from cases import close, like, random
from divided import SIZES, initialized
from plain import PlainLayer, PlainTransformer
from shardwright.errors import ConfigError
from shardwright.nn import (
    DistributedLayerNorm,
    DistributedTransformer,
    DistributedTransformerLayer,
    DistributedTransformerOutputLayer,
    FlashAttentionLayer,
)
from shardwright.tensor_parallel.group import TensorGroup
from shardwright.tensor_parallel.module import named_shardings
from torch import nn


def check(group: TensorGroup) -> None:
    for mode in list(modes(group))[:: 1 if group.size == 2 else 3]:
        starts_alike_at_every_degree(mode)
        half_precision(mode)
        inputs_without_gradient(mode)
        without_gradients(mode)
        dropout_is_shared_where_activations_are(mode)
        what_lies_between_is_dropped_too(mode)
        layers_computed_again_drop_the_same(mode)
        copies_and_training(mode)
        refusals(mode)
    moments_keep_their_digits(group)
    flash_attention()


def modes(group: TensorGroup) -> Iterator[TensorGroup]:
    for optimize in ("speed", "memory"):
        for prescaled in (False, True):
            yield like(group, optimize=optimize, prescaled_batch=prescaled)


def alone(group: TensorGroup) -> TensorGroup:
    return TensorGroup(None, optimize=group.optimize, prescaled_batch=group.prescaled_batch)


def sample_seed(group: TensorGroup) -> int:
    return 0 if group.prescaled_batch else group.rank


def starts_alike_at_every_degree(group: TensorGroup) -> None:
    for normal in (False, True):
        options = {**SIZES, "use_normal_initialization": normal, "gated": True, "num_key_value_heads": 4}
        torch.manual_seed(5)
        whole = DistributedTransformer(2, **options, group=alone(group))
        torch.manual_seed(5)
        divided = DistributedTransformer(2, **options, group=group)
        shardings = named_shardings(divided)
        for (name, one), (same, part) in zip(whole.named_parameters(), divided.named_parameters(), strict=True):
            assert name == same
            assert torch.equal(part, shardings[name].shard(one, group.rank, group.size)), name
            assert part.untyped_storage().nbytes() == part.numel() * 4
    deviation = whole.seq_layers[0].output.dense1.weight.std()
    assert 0.015 < deviation < 0.025, deviation


def half_precision(group: TensorGroup) -> None:
    options = {**SIZES, "causal_mask_size": 8, "attention_in_fp32": True, "fp32_residual_addition": True}
    whole = initialized(PlainLayer(**options))
    for dtype in (torch.float16, torch.bfloat16):
        divided = DistributedTransformerLayer(**options, group=group, dtype=dtype)
        divided.load_whole_state_dict(whole.state_dict())
        x = random(sample_seed(group), (2, 5, 12), dtype).requires_grad_()
        mask = torch.zeros(2, 1, 1, 5)
        mask[:, :, :, 3:] = torch.finfo(torch.float32).min
        output, _ = divided((x, mask))
        assert output.dtype == dtype
        error = (output.double() - whole(x.detach().double(), mask=mask.double())).norm() / output.double().norm()
        assert error < (5e-3 if dtype == torch.float16 else 4e-2), (dtype, error)
        output.float().sum().backward()
        assert x.grad.isfinite().all()


def inputs_without_gradient(group: TensorGroup) -> None:
    """On one rank samples come from a layer before, on the others they are data: all take part in backward."""
    options = {**SIZES, "pre_layernorm": False, "post_layernorm": True}
    whole = initialized(PlainLayer(**options))
    divided = DistributedTransformerLayer(**options, group=group, dtype=torch.float64)
    divided.load_whole_state_dict(whole.state_dict())
    twin = random(0, (2, 5, 12)).requires_grad_()
    whole(twin).square().sum().backward()
    for frozen in (False, True):
        divided.requires_grad_(not frozen)
        x = random(sample_seed(group), (2, 5, 12)).requires_grad_(group.rank == 0)
        divided((x,))[0].square().sum().backward()
        assert (x.grad is not None) == (group.rank == 0)
        if x.grad is not None:
            close(x.grad, twin.grad, "gradient on one rank", 1e-10)


def without_gradients(group: TensorGroup) -> None:
    divided = DistributedTransformerLayer(**SIZES, group=group).eval()
    with torch.no_grad():
        assert not divided((random(sample_seed(group), (2, 5, 12), torch.float32),))[0].requires_grad


def dropout_is_shared_where_activations_are(group: TensorGroup) -> None:
    """Ranks are seeded differently; what is replicated is dropped alike all the same, and what is divided is not."""
    torch.manual_seed(group.rank)
    options = {**SIZES, "attention_dropout_prob": 0.3, "hidden_dropout_prob": 0.5, "layernorm_epsilon": 1e-5}
    whole = initialized(PlainTransformer(2, **options))
    divided = DistributedTransformer(2, **options, group=group, dtype=torch.float64)
    divided.load_whole_state_dict(whole.state_dict())
    seen: list[torch.Tensor] = []
    hook = divided.seq_layers[1].register_forward_hook(lambda module, args, result: seen.append(result[0].detach()))
    x = random(sample_seed(group), (2, 5, 12))
    first, second = divided((x,))[0], divided((x,))[0]
    assert not torch.equal(first, second)
    if group.optimize == "speed" or group.size == 1:
        parts = group.all_gather([seen[0]], [0], [[seen[0].shape[0]] * group.size])()[0].chunk(group.size)
        assert all(torch.equal(part, parts[0]) for part in parts)
    hook.remove()
    divided.eval()
    close(divided((x,))[0], whole(x), "in eval", 1e-10)

    # A block whose weights are zero gives its bias: where it is dropped shows in the output.
    options = {name: value for name, value in SIZES.items() if "attention" not in name}
    block = DistributedTransformerOutputLayer(**{**options, "hidden_dropout_prob": 0.5}, inside=True, group=group)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.zero_()
        block.dense2.bias.fill_(1.0)
    width = 12 // group.size if group.optimize == "memory" else 12
    output = block((torch.zeros(40, 5, width), None, None, None, None, None, None, 11))
    dropped = (output == 0).float().mean().item()
    assert set(output.unique().tolist()) == {0.0, 2.0}
    assert 0.4 < dropped < 0.6, dropped
    parts = group.all_gather([output], [0], [[40] * group.size])()[0].chunk(group.size)
    alike = [torch.equal(part, parts[0]) for part in parts[1:]]
    assert alike == [group.optimize == "speed"] * (group.size - 1)


def what_lies_between_is_dropped_too(group: TensorGroup) -> None:
    """Intermediate channels are divided, so each rank drops others."""
    options: dict[str, Any] = {name: value for name, value in SIZES.items() if "attention" not in name}
    options |= {"hidden_dropout_prob": 0.0, "intermediate_dropout_prob": 0.5}
    block = DistributedTransformerOutputLayer(**options, inside=True, group=group)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.zero_()
        block.dense1.bias.fill_(1.0)
    seen: list[torch.Tensor] = []
    block.dense2.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach()))
    width = 12 // group.size if group.optimize == "memory" else 12
    inputs = (torch.zeros(40, 5, width), None, None, None, None, None, None, 11)
    block(inputs)
    block.eval()
    block(inputs)
    between, undropped = seen
    assert set(between.unique().tolist()) == {0.0, 2 * undropped.unique().item()}
    assert 0.4 < (between == 0).float().mean().item() < 0.6
    parts = group.all_gather([between], [0], [[40] * group.size])()[0].chunk(group.size)
    assert not any(torch.equal(part, parts[0]) for part in parts[1:])


def layers_computed_again_drop_the_same(group: TensorGroup) -> None:
    """The seed goes in the layer's tuple: a layer that is computed again in backward draws the same numbers."""
    options = {**SIZES, "attention_dropout_prob": 0.3, "hidden_dropout_prob": 0.3, "add_cross_attention": True}
    divided = DistributedTransformer(2, **options, group=group, dtype=torch.float64)
    calls: list[tuple[nn.Module, tuple[object, ...], torch.Tensor]] = []
    hooks = [
        one.register_forward_hook(lambda module, args, result: calls.append((module, args[0], result[0])))
        for one in divided.seq_layers
    ]
    torch.manual_seed(4 + group.rank)
    x = random(sample_seed(group), (2, 5, 12))
    divided((x, x))
    for hook in hooks:
        hook.remove()
    state = torch.get_rng_state()
    for module, inputs, result in reversed(calls):
        assert type(inputs) is tuple
        assert torch.equal(module(inputs)[0], result)
    assert torch.equal(torch.get_rng_state(), state)
    module, inputs, _ = calls[0]
    assert not torch.equal(module(inputs)[0], calls[1][0](inputs)[0])


def copies_and_training(group: TensorGroup) -> None:
    """Steps of an optimizer change the divided model as the whole one."""
    options = {**SIZES, "causal_mask_size": 8, "query_key_norm": True}
    whole = initialized(PlainTransformer(2, **options))
    divided = DistributedTransformer(2, **options, group=group, dtype=torch.float64)
    divided.load_whole_state_dict(whole.state_dict())
    divided = copy.deepcopy(divided)
    ranks = [0] if group.prescaled_batch else list(range(group.size))
    xs = [random(r, (1 + r, 5, 12)) for r in ranks]
    mine = 0 if group.prescaled_batch else group.rank
    for model, run in ((whole, lambda: whole(torch.cat(xs))), (divided, lambda: divided((xs[mine],))[0])):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(2):
            optimizer.zero_grad()
            run().square().mean(-1).sum().backward()
            optimizer.step()
    expected = whole(torch.cat(xs)).split([x.shape[0] for x in xs])[mine]
    close(divided((xs[mine],))[0], expected, "after training", 1e-10)


def refusals(group: TensorGroup) -> None:
    first = group.rank == 0

    def refused(pattern: str, run: Callable[[], object]) -> None:
        with pytest.raises(ConfigError, match=pattern):
            run()
        assert group.all_reduce([torch.ones(1)])[0].item() == group.size

    def ones(*shape: int) -> torch.Tensor:
        return torch.ones(shape, dtype=torch.float64)

    def layer(**options: Any) -> DistributedTransformerLayer:
        return DistributedTransformerLayer(**{**SIZES, **options}, group=group, dtype=torch.float64)

    if group.size > 1:
        refused("num_attention_heads is 3; .* degree", lambda: layer(num_attention_heads=3))
        refused("num_key_value_heads is 1; .* degree", lambda: layer(num_key_value_heads=1))
        refused("does not divide by", lambda: layer(intermediate_size=21))
    refused("has to be a multiple", lambda: layer(num_attention_heads=4, num_key_value_heads=8))
    refused("both False", lambda: layer(pre_layernorm=False))
    refused("activation is 'tanh'; allowed: 'gelu', 'gelu_new'", lambda: layer(activation="tanh"))
    refused("normalization is 'batch'", lambda: layer(normalization="batch"))
    refused("hidden_dropout_prob is 2", lambda: layer(hidden_dropout_prob=2))
    refused("attention_dropout_prob is -1", lambda: layer(attention_dropout_prob=-1))
    refused("window_size is 0", lambda: layer(window_size=0))
    refused(
        "parallel_residual is True with pre_layernorm=True, post_layernorm=True",
        lambda: layer(parallel_residual=True, post_layernorm=True),
    )
    refused("shared_layernorm is True", lambda: layer(shared_layernorm=True))
    refused("layer_idx is None", lambda: layer(scale_attn_by_layer_idx=True))
    refused("num_layers is 0", lambda: DistributedTransformer(0, group=group))
    refused("window_sizes are", lambda: DistributedTransformer(2, **SIZES, window_sizes=[1], group=group))
    refused("allowed: one dim", lambda: DistributedLayerNorm((3, 4), group=group))

    one = layer(causal_mask_size=8)
    refused("the input is Tensor", lambda: one(ones(2, 5, 12)))
    refused(r"the input is \['Tensor', 'int'\]", lambda: one((ones(2, 5, 12), 3)))
    refused(r"hidden has shape \(2, 5, 8\) on tp rank 0; expected \[any, any, 12\]", lambda: one((ones(2, 5, 8),)))
    refused("dim 0 is out of range|hidden has shape", lambda: one((ones(),)))
    refused("causal_mask_size allows up to 8", lambda: one((ones(2, 9, 12),)))
    refused(
        r"mask has shape \(2, 5\).*expected \[2 or 1, 1 or 8, 5 or 1, 5\]", lambda: one((ones(2, 5, 12), ones(2, 5)))
    )
    refused("mask is torch.bool", lambda: one((ones(2, 5, 12), ones(2, 1, 1, 5).bool())))
    refused("both are needed", lambda: one((ones(2, 5, 12), None, None, ones(1, 5, 4))))
    refused("cross_states", lambda: layer(add_cross_attention=True)((ones(2, 5, 12),)))
    if group.size > 1:  # ranks that differ
        refused("same on all tp ranks", lambda: one((ones(2, 5 if first else 4, 12),)))
        refused(
            r"DistributedTransformerLayer\(hidden, mask\) .*on tp rank 0; DistributedTransformerLayer\(hidden\)",
            lambda: one((ones(2, 5, 12), ones(2, 1, 1, 5) if first else None)),
        )
        refused(
            "mask with gradient",
            lambda: one((ones(2, 5, 12), ones(2, 1, 1, 5).requires_grad_(first))),
        )
        refused("dtypes", lambda: one((ones(2, 5, 12) if first else ones(2, 5, 12).float(),)))
        if not group.prescaled_batch:
            refused(
                r"mask has shape \(3, 1, 1, 5\) on tp rank 0",
                lambda: one((ones(2, 5, 12), ones(3 if first else 2, 1, 1, 5))),
            )


def moments_keep_their_digits(group: TensorGroup) -> None:
    """A mean far from zero costs no digits that one rank would have kept."""
    group = like(group, optimize="memory")
    x = random(1, (3, 4, 64)) + 1000
    divided = DistributedLayerNorm(64, group=group)
    exact = nn.functional.layer_norm(x.float().double(), (64,))
    assert (divided(x.float()).double() - exact).abs().max() < 2e-3
    close(DistributedLayerNorm(64, group=group, dtype=torch.float64)(x), nn.functional.layer_norm(x, (64,)), "", 1e-9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        divided(x[:0].float())


def flash_attention() -> None:
    for heads in (4, 6):
        qkv, mask = random(1, (2, 5, 3, heads, 8)).requires_grad_(), random(2, (2, 1, 1, 5))
        query, key, value = qkv.unbind(2)
        scores = torch.einsum("bqhd,bkhd->bhqk", query, key)
        causal = torch.full((5, 5), -math.inf, dtype=torch.float64).triu(1)
        powers = {4: [2, 4, 6, 8], 6: [2, 4, 6, 8, 1, 3]}[heads]
        slopes = torch.tensor([2.0**-power for power in powers], dtype=torch.float64).view(-1, 1, 1)
        distance = (torch.arange(5)[:, None] - torch.arange(5)).abs()
        for options, scale, added in (
            ({}, 8**-0.5, 0),
            ({"scale_attention_scores": False}, 1, 0),
            ({"scale_attn_by_layer_idx": True, "layer_idx": 3}, 8**-0.5 / 4, 0),
            ({"scale": 0.7, "attention_head_size": 8}, 0.7, 0),
            ({"triton_flash_attention": True, "use_alibi": True}, 8**-0.5, -slopes * distance),
        ):
            layer = FlashAttentionLayer(**options)
            layer.train(options.get("triton_flash_attention", False))
            for with_mask in (False, True):
                for with_causal in (False, True):
                    total = scores * scale + added + (mask if with_mask else 0) + (causal if with_causal else 0)
                    wanted = torch.einsum("bhqk,bkhd->bhqd", total.softmax(-1), value)
                    found = layer(qkv, mask if with_mask else None, with_causal)
                    close(found, wanted, f"flash attention {options} {with_mask} {with_causal}", 1e-10)
    assert not torch.equal(FlashAttentionLayer()(qkv), FlashAttentionLayer()(qkv))
    with pytest.raises(ConfigError, match="qkv has shape"):
        FlashAttentionLayer(attention_head_size=4)(qkv)
    with pytest.raises(ConfigError, match="layer_idx is None"):
        FlashAttentionLayer(scale_attn_by_layer_idx=True)
