"""A rank of a job: what parameters carry when their model is wrapped stays with them, in every layout."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import shardwright as smp
import torch
import transformers
from shardwright.model.sentinel import is_sentinel
from torch import nn

LAYOUTS: dict[str, dict[str, Any]] = {
    "replicas": {"ddp": True},
    "sharded state": {"ddp": True, "shard_optimizer_state": True},
    "pipeline": {"pipeline_parallel_degree": 2},
    "shards": {
        "ddp": True,
        "sharded_data_parallel_degree": 2,
        "sdp_param_persistence_threshold": 0,
        "sdp_gradient_clipping": 1e9,
    },
    "slices": {"ddp": True, "tensor_parallel_degree": 2},
}
SIZES = {"n_positions": 6, "n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 12}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def linears() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4, bias=False), nn.Tanh(), nn.Linear(4, 2))


def gpt2() -> nn.Module:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**SIZES, **NO_DROPOUT, bos_token_id=0, eos_token_id=0))


def neox() -> nn.Module:
    return transformers.GPTNeoXForCausalLM(
        transformers.GPTNeoXConfig(
            vocab_size=12,
            hidden_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
            max_position_embeddings=6,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


MODELS: dict[str, Callable[[], nn.Module]] = {"linears": linears, "gpt2": gpt2, "neox": neox}


def inputs(kind: str) -> torch.Tensor:
    return torch.randn(4, 4) if kind == "linears" else torch.randint(12, (4, 6))


def loss_of(model: Any, x: torch.Tensor) -> torch.Tensor:
    found = model(x)
    return (found if isinstance(found, torch.Tensor) else found.logits).square().mean()


@smp.step
def train(model: Any, x: torch.Tensor) -> torch.Tensor:
    loss = loss_of(model, x)
    model.backward(loss)
    return loss


@smp.step
def evaluate(model: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return loss_of(model, x)


def own(x: torch.Tensor) -> torch.Tensor:
    return x.chunk(smp.dp_size())[smp.dp_rank()]


def check(layout: str, kind: str, which: str) -> None:
    """Which ranks have gradients before: all alike, each of its own samples, or one of them; of some parameters."""
    smp.init({**LAYOUTS[layout], "microbatches": 1})
    torch.manual_seed(3)
    net = MODELS[kind]()
    plain = copy.deepcopy(net)
    first, second = inputs(kind), inputs(kind)
    for index, (mine, theirs) in enumerate(zip(net.parameters(), plain.parameters(), strict=True)):
        mine.number = index  # type: ignore[attr-defined]
        if index == 2:
            mine.requires_grad_(False)
            theirs.requires_grad_(False)
    before = own(first) if which == "each" else first
    if which != "first" or smp.rank() == 0:
        loss_of(net, before).backward()
        next(net.parameters()).grad = None
    loss_of(plain, first).backward()
    next(plain.parameters()).grad = None
    share = 1 / smp.dp_size() if which == "first" and layout != "pipeline" else 1.0
    for parameter in plain.parameters():
        if parameter.grad is not None:
            parameter.grad *= share
    if layout == "slices":
        smp.set_tensor_parallelism(net)
    numbers = {name: index for index, (name, _) in enumerate(net.named_parameters())}
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    train(model, own(second))
    optimizer.step()
    loss_of(plain, second).backward()
    reference.step()
    there, expected = float(evaluate(model, second).reduce_mean()), float(loss_of(plain, second))
    # What is left of a gradient has to show in the loss.
    assert abs(there - expected) <= 1e-12 * abs(expected), (layout, kind, which, there, expected)
    if kind == "linears":
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-12, atol=1e-14)
        for name, parameter in model.named_parameters():
            if is_sentinel(parameter):
                continue
            assert getattr(parameter, "number", None) == numbers[name], (layout, name)
            assert parameter.requires_grad == (numbers[name] != 2), (layout, name)
    smp.shutdown()


def main() -> None:
    torch.set_default_dtype(torch.float64)
    for layout in LAYOUTS:
        for kind in MODELS if layout == "slices" else ["linears"]:
            for which in ("all", "each", "first"):
                if layout not in ("replicas", "slices") and which != "all":
                    continue
                check(layout, kind, which)
    print("carried holds")


if __name__ == "__main__":
    sys.exit(main())
