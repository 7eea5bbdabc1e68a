"""Divided transformer modules beside the whole ones on the batches of all ranks, in every mode."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from cases import close, like, random
from plain import PlainAttention, PlainLayer, PlainOutput, PlainTransformer
from shardwright.nn import (
    DistributedAttentionLayer,
    DistributedLayerNorm,
    DistributedRMSNorm,
    DistributedTransformer,
    DistributedTransformerLayer,
    DistributedTransformerOutputLayer,
)
from shardwright.tensor_parallel.group import TensorGroup
from shardwright.tensor_parallel.module import DistributedModule, named_shardings
from torch import nn

TOLERANCE = 1e-10
SIZES = {
    "num_attention_heads": 8,
    "attention_head_size": 4,
    "hidden_size": 12,
    "intermediate_size": 20,
    "layernorm_epsilon": 1e-5,
    "attention_dropout_prob": 0.0,
    "hidden_dropout_prob": 0.0,
    "pre_layernorm": True,
    "post_layernorm": False,
}
POST = {"pre_layernorm": False, "post_layernorm": True}
BOTH = {"pre_layernorm": True, "post_layernorm": True}
#: Arguments of a layer, and what is given with each call.
LAYERS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({}, ()),
    (POST, ("mask",)),
    (BOTH, ("wide mask",)),
    ({"causal_mask_size": 8}, ()),
    ({"causal_mask_size": 8, "activation": "gelu_new"}, ("mask", "position_bias")),
    ({"add_cross_attention": True, "causal_mask_size": 8, **POST}, ("cross_states", "mask", "cross_mask")),
    ({"add_cross_attention": True, "num_key_value_heads": 4}, ("cross_states",)),
    (
        {
            "num_key_value_heads": 4,
            "normalization": "rms_norm",
            "gated": True,
            "activation": "silu",
            "query_key_value_bias": False,
            "dense_bias": False,
            "mlp_bias": False,
            "query_key_norm": True,
            "causal_mask_size": 8,
        },
        ("rotary",),
    ),
    ({"rotary_interleaved": True, "parallel_residual": True, "shared_layernorm": True}, ("partial rotary", "mask")),
    ({"parallel_residual": True, "activation": "quick_gelu"}, ("partial rotary of each",)),
    ({"use_alibi": True, "alibi_bias_max": 4, "causal_mask_size": 8, "activation": "relu"}, ("mask",)),
    ({"use_alibi": True, "num_key_value_heads": 4, "scale": 0.3}, ("shared position_bias",)),
    ({"window_size": 2, "causal_mask_size": 8, "fp32_residual_addition": False}, ("position_bias of each",)),
]


def check(group: TensorGroup) -> None:
    for optimize in ("speed", "memory"):
        for prescaled in (False, True):
            mode = like(group, optimize=optimize, prescaled_batch=prescaled)
            check_mode(mode)


def batches_of(group: TensorGroup) -> Iterator[list[int]]:
    """Of the ranks: unequal with an empty one, one sample each, none at all."""
    if group.prescaled_batch:
        yield from ([3] * group.size, [0] * group.size)
    else:
        yield from ([[2], [0]] if group.size == 1 else [[3, 0, 1, 2][: group.size], [1] * group.size, [0] * group.size])


def check_mode(group: TensorGroup) -> None:
    batches = list(batches_of(group))
    some = (LAYERS[1], LAYERS[4], LAYERS[7], LAYERS[8], LAYERS[11])
    # What can differ between arguments shows at a degree of 2 as at 4.
    for options, names in LAYERS if group.size < 4 else some:
        layer(group, batches[0], options, names)
    for sizes in batches[1:]:
        for options, names in some[1:3]:
            layer(group, sizes, options, names)
    layer(group, batches[0], *LAYERS[4], length=1)
    for sizes in batches:
        parts(group, sizes)
        norms(group, sizes)
    for options, names in (LAYERS[4], LAYERS[5], (BOTH, ("shared position_bias",))):
        transformer(group, batches[0], options, names)
    transformer(group, batches[0], {"causal_mask_size": 8, "window_sizes": [None, 2], "final_layernorm": True}, ())


def inputs_of(
    batch: int, seed: int, names: Sequence[str], options: dict[str, Any], length: int = 5
) -> dict[str, torch.Tensor]:
    """Of one rank."""
    heads, hidden = options["num_attention_heads"], options["hidden_size"]
    given = {"hidden": random(seed, (batch, length, hidden))}
    for place, name in enumerate(names):
        here = seed + 1000 * (place + 1)
        of = 1000 * (place + 1) if name.startswith("shared") else here
        if name == "cross_states":
            given[name] = random(here, (batch, 3, hidden))
        elif name == "cross_mask":
            given[name] = random(here, (batch, 1, 1, 3))
        elif "mask" in name:
            given["mask"] = random(here, (batch, 1, length if "wide" in name else 1, length))
        elif "position_bias" in name:
            each = batch if "of each" in name else 1
            of = of if "of each" in name else 1000 * (place + 1)
            given["position_bias"] = random(of, (each, heads, length, length))
        else:
            width = 2 if "partial" in name else 4
            angles = random(here if "of each" in name else 77, (batch if "of each" in name else 1, length, width // 2))
            twice = angles.repeat_interleave(2, -1) if options.get("rotary_interleaved") else angles.repeat(1, 1, 2)
            given["cos"], given["sin"] = twice.cos(), twice.sin()
    return given


def initialized(module: nn.Module) -> nn.Module:
    """With numbers that leave no weight at a value that hides a fault."""
    module.double()
    with torch.no_grad():
        for place, parameter in enumerate(module.parameters()):
            parameter.copy_(random(500 + place, parameter.shape) * 0.4 + (parameter.dim() == 1))
    return module


def compare(
    group: TensorGroup,
    what: str,
    whole: nn.Module,
    divided: DistributedModule,
    given: list[dict[str, torch.Tensor]],
    order: Sequence[str] | None,
) -> None:
    """Output and every gradient of a divided module, from the inputs of all ranks.

    Args:
        group: Of the divided module.
        what: For messages.
        whole: Takes tensors by name; its weights have the names of the divided one's.
        divided: Takes them as a tuple, or the hidden states alone.
        given: The tensors of each rank.
        order: Of the tuple; None for hidden states alone.
    """
    n, rank = group.size, group.rank
    what = f"{what} ({group.optimize}, prescaled {group.prescaled_batch}, degree {n})"
    divided.load_whole_state_dict(whole.state_dict())
    batches = [one["hidden"].shape[0] for one in given]
    ranks = [0] if group.prescaled_batch else list(range(n))
    leaves, joined = {}, {}
    for name in given[0]:
        per_rank = [given[r][name] for r in ranks]
        shared = name != "hidden" and [one.shape[0] for one in per_rank] != [batches[r] for r in ranks]
        leaves[name] = (per_rank[0] if shared else torch.cat(per_rank)).clone().requires_grad_()
        joined[name] = shared
    expected = whole(**leaves)
    weights = [random(900 + r, (batches[r], *expected.shape[1:])) for r in ranks]
    (torch.cat(weights) * expected.sin()).sum().backward()

    own = {name: one.clone().requires_grad_() for name, one in given[rank].items()}
    taken = own["hidden"] if order is None else tuple(own.get(name) for name in order)
    output = divided(taken)
    if isinstance(output, tuple):
        assert len(output) == len(taken)
        assert all(after is before for after, before in zip(output[1:], taken[1:], strict=True)), what
        output = output[0]
    mine = 0 if group.prescaled_batch else rank
    close(output, expected.split([batches[r] for r in ranks])[mine], f"output of {what}", TOLERANCE)
    (weights[mine] * output.sin()).sum().backward()
    for name, leaf in leaves.items():
        wanted, found = leaf.grad, own[name].grad
        if wanted is None:
            continue
        if joined[name] and not group.prescaled_batch:  # each rank's own use of it; their sum is the whole
            (found,) = group.all_reduce([torch.zeros_like(own[name]) if found is None else found])
        elif not group.prescaled_batch:
            wanted = wanted.split(batches)[rank]
        close(found, wanted, f"gradient of {name} of {what}", TOLERANCE)
    shardings = named_shardings(divided)
    parameters = dict(divided.named_parameters())
    assert {*parameters} == {name for name, _ in whole.named_parameters()}, what
    for name, parameter in whole.named_parameters():
        wanted = shardings[name].shard(parameter.grad, rank, n)
        found = parameters[name].grad
        if not shardings[name].scaled_batch and not group.prescaled_batch:
            (found,) = group.all_reduce([found])
        close(found, wanted, f"gradient of {name} of {what}", TOLERANCE)


def layer(
    group: TensorGroup, batches: list[int], options: dict[str, Any], names: Sequence[str], length: int = 5
) -> None:
    options = {**SIZES, **options}
    seeds = [0] * group.size if group.prescaled_batch else range(group.size)
    given = [inputs_of(batch, seed, names, options, length) for batch, seed in zip(batches, seeds, strict=True)]
    divided = DistributedTransformerLayer(**options, group=group, dtype=torch.float64)
    compare(group, f"layer {options} {batches}", initialized(PlainLayer(**options)), divided, given, order_of(options))


def order_of(options: dict[str, Any]) -> list[str]:
    cross = ["cross_states", "mask", "cross_mask"] if options.get("add_cross_attention") else ["mask"]
    return ["hidden", *cross, "position_bias", "cos", "sin"]


def transformer(group: TensorGroup, batches: list[int], options: dict[str, Any], names: Sequence[str]) -> None:
    options = {**SIZES, **options}
    seeds = [0] * group.size if group.prescaled_batch else range(group.size)
    given = [inputs_of(batch, seed, names, options) for batch, seed in zip(batches, seeds, strict=True)]
    divided = DistributedTransformer(2, **options, group=group, dtype=torch.float64)
    whole = initialized(PlainTransformer(2, **options))
    compare(group, f"transformer {options} {batches}", whole, divided, given, order_of(options))


def parts(group: TensorGroup, batches: list[int]) -> None:
    """Attention and output blocks by themselves."""
    seeds = [0] * group.size if group.prescaled_batch else range(group.size)
    output = {name: value for name, value in SIZES.items() if "attention" not in name}
    attention = {name: value for name, value in SIZES.items() if name != "intermediate_size"}
    given = [inputs_of(batch, seed, (), SIZES) for batch, seed in zip(batches, seeds, strict=True)]
    divided = DistributedTransformerOutputLayer(**output, group=group, dtype=torch.float64)
    compare(group, f"output {batches}", initialized(PlainOutput(**output)), divided, given, None)
    for cross, names in ((False, ("mask", "position_bias")), (True, ("cross_states", "cross_mask"))):
        given = [inputs_of(batch, seed, names, SIZES) for batch, seed in zip(batches, seeds, strict=True)]
        block = DistributedAttentionLayer(**attention, cross_attention=cross, group=group, dtype=torch.float64)
        order = ["hidden", *names]
        if cross:
            given = [{name.replace("cross_mask", "mask"): one for name, one in of.items()} for of in given]
            order = ["hidden", "cross_states", "mask"]
        whole = initialized(PlainAttention(cross, **attention))
        compare(group, f"attention {cross} {batches}", whole, block, given, order)


class Named(nn.Module):
    """A norm whose argument has the name that :func:`compare` gives."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.norm(hidden)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self.norm.state_dict()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.norm.named_parameters()


def norms(group: TensorGroup, batches: list[int]) -> None:
    for middle in ((), (3,), (2, 3)):
        for whole, kind in ((nn.LayerNorm(12), DistributedLayerNorm), (nn.RMSNorm(12, eps=1e-5), DistributedRMSNorm)):
            seeds = [0] * group.size if group.prescaled_batch else range(group.size)
            given = [{"hidden": random(s, (b, *middle, 12))} for b, s in zip(batches, seeds, strict=True)]
            divided = kind(12, group=group, dtype=torch.float64)
            compare(group, f"{kind.__name__} {batches}", Named(initialized(whole)), divided, given, None)
