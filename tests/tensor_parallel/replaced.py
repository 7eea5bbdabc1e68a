"""One of the tp ranks of a job: ``smp.DistributedModel`` replaces marked modules, and the model computes the same."""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Callable
from functools import partial

import pytest
import shardwright as smp
import torch
from cases import close, random
from torch import nn
from torch.nn.utils import parametrizations

DOUBLE = torch.float64


class Model(nn.Module):
    """With everything that is replaced, and everything that is not."""

    def __init__(self) -> None:
        super().__init__()
        n = smp.tp_size()
        self.embedding = nn.Embedding(11, 8, padding_idx=3)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
        self.twice = nn.Linear(8, 8, bias=False)
        self.again = self.twice
        self.tied = nn.Linear(8, 11)
        self.tied_to = nn.Embedding(11, 8)
        self.tied.weight = self.tied_to.weight
        self.by_address = nn.Linear(8, 8)
        self.of_one_address = nn.Linear(8, 8)
        self.odd = nn.Linear(8, n * 4 + 1)
        self.odd_again = nn.Linear(n * 4 + 1, 8)
        self.hooked = nn.Linear(8, 8)
        self.hooked.register_forward_hook(lambda module, args, output: output * 2)
        self.watched = nn.Linear(8, 8)
        self.watched.weight.register_hook(lambda gradient: gradient * 1.0)
        self.normed = parametrizations.weight_norm(nn.Linear(8, 8))
        self.listed = nn.Linear(8, 8)
        self.list = [{"held": self.listed}]
        self.patched = nn.Linear(8, 8)
        self.patched.forward = partial(nn.Linear.forward, self.patched)
        self.off = nn.Linear(8, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.attention = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True)
        self.last = nn.Linear(8, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        x = self.again(self.twice(x)) + self.tied_to(ids)
        x = x + self.tied(x) @ self.tied_to.weight
        for name in ("by_address", "of_one_address", "odd", "odd_again", "hooked", "watched", "normed", "listed"):
            x = getattr(self, name)(x)
        return self.last(self.attention(self.frozen(self.off(self.patched(x)))))


SKIPPED = {
    "": "no distributed implementation",
    "tied": "its parameter 'weight' is one of 'tied_to' as well",
    "tied_to": "its parameter 'weight' is one of 'tied' as well",
    "by_address": "its parameter 'weight' is one of 'of_one_address' as well",
    "of_one_address": "its parameter 'weight' is one of 'by_address' as well",
    "odd_again": "does not divide by the tensor parallelism degree",
    "hooked": "it has hooks",
    "watched": "its parameter 'weight' has hooks",
    "normed": "it has a parametrization",
    "listed": "attribute 'list' of the model itself refers to it",
    "patched": "its forward is set by an attribute",
    "attention.linear1": "nn.TransformerEncoderLayer computes with its weights past it",
    "attention.self_attn.out_proj": "no distributed implementation",
    "layers.0.1": "no distributed implementation",
}
REPLACED = {"embedding", "layers.0.0", "layers.1.0", "twice", "odd", "frozen", "last"}


def whole_model(seed: int, **options: object) -> nn.Module:
    torch.manual_seed(seed)
    with smp.tensor_parallelism(**options):
        model = Model().double()
    smp.set_tensor_parallelism(model.off, False)
    model.of_one_address.weight.data = model.by_address.weight.data
    return model


def check_replacement() -> None:
    rank, n = smp.tp_rank(), smp.tp_size()
    whole = whole_model(0)
    # Scripts often seed by rank; what counts is tp rank 0's model, where a module is replaced.
    own = whole_model(0)
    with torch.no_grad():
        for name in REPLACED:
            for parameter in own.get_submodule(name).parameters():
                parameter.add_(rank)
    own.last.eval()
    state = torch.random.get_rng_state()
    model = smp.DistributedModel(own)
    assert torch.equal(state, torch.random.get_rng_state())
    told = {each.name: each for each in model.tensor_parallelism_report()}
    assert {name for name, each in told.items() if each.substitute} == REPLACED, told
    for name, reason in SKIPPED.items():
        assert reason in told[name].reason, (name, told[name])
    assert "off" not in told
    module = model.module
    assert module.twice is module.again
    assert not module.last.training
    assert module.layers[0][0].training
    assert module.last.weight.dtype == DOUBLE
    assert [p.requires_grad for p in module.frozen.parameters()] == [False] * (2 if rank == 0 else 1)

    ids = [torch.randint(0, 11, (1 + r, 5), generator=torch.Generator().manual_seed(r)) for r in range(n)]
    weights = [random(r, (1 + r, 5, 8)) for r in range(n)]
    expected = [whole(each) for each in ids]
    sum((w * output.sin()).sum() for w, output in zip(weights, expected, strict=True)).backward()
    output = model(ids[rank])
    close(output, expected[rank], "output", 1e-10)
    (weights[rank] * output.sin()).sum().backward()
    for name in REPLACED - {"frozen"}:
        gradient = whole.get_submodule(name).weight.grad
        close(module.get_submodule(name).weight.grad, gradient.chunk(n, 1)[rank], name, 1e-10)
    check_methods(model)
    with pytest.raises(smp.ConfigError, match="came too late for this DistributedLinear"):
        smp.set_tensor_parallelism(module.last)
    with pytest.raises(smp.ConfigError, match="came too late"):
        smp.set_tensor_parallelism(model, False)


def check_methods(model: smp.DistributedModel) -> None:
    first, module = smp.tp_rank() == 0, model.module
    assert [type(m).__name__ for m in model.distributed_modules()] == [
        "DistributedEmbedding",
        *["DistributedLinear"] * 6,
    ]
    names = {f"{name}.{kind}" for name in REPLACED for kind in ("weight", "bias")}
    have = {name for name, _ in module.named_parameters()}
    assert {name for name, _ in model.scaled_batch_reducer_named_parameters()} == names & have
    assert ("last.bias" in have) == first
    assert {name for name, _ in model.default_reducer_named_parameters()} == have - names
    for name, parameter in module.named_parameters():
        assert (
            model.is_distributed_parameter(parameter) == model.is_scaled_batch_parameter(parameter) == (name in names)
        )
    for buffer in module.buffers():
        assert not model.is_distributed_buffer(buffer)
        assert not model.is_scaled_batch_buffer(buffer)
    assert not model.is_distributed_parameter(nn.Parameter(torch.ones(1)))


class Scaled(nn.Module):
    """With a registered substitute, and a part that could be replaced alone."""

    def __init__(self, size: int, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.inner = nn.Linear(size, size) if inner is None else inner

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (self.inner(x),)


def register() -> None:
    smp.tp_register_with_module(
        Scaled,
        smp.nn.DistributedLinear,
        init_hook=lambda size, inner=None: ((size, size), {}),
        return_hook=lambda output: (output,),
        weights_hook=lambda module: {"weight": module.inner.weight, "bias": module.inner.bias},
    )


def check_ancestors() -> None:
    """Of nested modules the outermost is replaced, with all in it; the model itself as well."""
    n, rank = smp.tp_size(), smp.tp_rank()
    with smp.tensor_parallelism():
        whole = Scaled(8).double()
    expected = copy.deepcopy(whole)
    with torch.no_grad():
        whole.inner.weight.add_(rank)
        expected.load_state_dict(smp.allgather(dict(expected.state_dict()), smp.TP_GROUP)[0])
    model = smp.DistributedModel(whole)
    assert isinstance(model.module, smp.nn.DistributedLinear)
    assert [(each.name, each.substitute, each.reason) for each in model.tensor_parallelism_report()] == [
        ("", "DistributedLinear", ""),
        ("inner", None, "the model itself was replaced, which it is a part of"),
    ]
    x = random(rank, (2, 8))
    close(model(x)[0], expected(x)[0], "output")

    # What a part has to do with the rest keeps the outer module, not the part, from being replaced.
    shared = nn.Linear(8, 8)
    with smp.tensor_parallelism():
        outer = nn.ModuleList([Scaled(8, shared), Scaled(8, shared), Scaled(2 * n + 1), Scaled(8)])
    smp.set_tensor_parallelism(outer[3].inner, False)
    smp.set_tensor_parallelism(shared)
    told = {each.name: each for each in smp.DistributedModel(outer).tensor_parallelism_report()}
    assert told["0"].reason == "its part 'inner' is used by '1' as well"
    assert told["0.inner"].substitute == "DistributedLinear"
    assert outer[0].inner is outer[1].inner is not shared
    assert "does not divide" in told["2"].reason
    assert "does not divide" in told["2.inner"].reason
    assert told["3"].reason == "tensor parallelism is disabled for its part 'inner'"


def check_fresh_weights() -> None:
    """Ranks with different seeds hold parts of one fresh whole."""
    torch.manual_seed(100 + smp.tp_rank())
    smp.tp_register_with_module(Scaled, smp.nn.DistributedLinear, init_hook=lambda size, inner=None: ((size, 4), {}))
    with smp.tensor_parallelism(out_features=6, unheard_of=True):
        model = smp.DistributedModel(nn.Sequential(Scaled(8)).bfloat16())
    layer = model.module[0]
    assert layer.weight.shape == (6, 8 // smp.tp_size())
    assert layer.weight.dtype == torch.bfloat16
    assert model.tensor_parallelism_report()[1].fresh == ("bias", "weight")
    draws = smp.allgather(layer.weight.detach(), smp.TP_GROUP)
    assert not torch.equal(draws[0], draws[1])
    register()


def check_differences() -> None:
    """Ranks that mark other modules are told so, all of them, and go on."""
    rank = smp.tp_rank()

    def refused(
        pattern: str, make: Callable[[], nn.Module], kind: type[smp.ShardwrightError] = smp.ConfigError
    ) -> None:
        with pytest.raises(kind, match=pattern) as caught:
            smp.DistributedModel(make())
        print(f"refused: {caught.value}")
        smp.barrier(smp.TP_GROUP)

    def on_some(size: int = 8) -> nn.Module:
        with smp.tensor_parallelism(enabled=rank == 0):
            return nn.Sequential(nn.Linear(size, size))

    refused("Sequential '' not to be replaced .* on tp rank 0 and no further marked module on tp rank 1", on_some)

    def of_other_sizes() -> nn.Module:
        with smp.tensor_parallelism():
            return nn.Linear(8 if rank == 0 else 2 * smp.tp_size() + 1, 8)

    refused("rank 1 built a different model than rank 0: parameter 'weight' is", of_other_sizes, smp.PartitionError)


def main() -> None:
    logging.basicConfig(stream=sys.stdout, format="log: %(message)s", level=logging.INFO)
    smp.init({"tensor_parallel_degree": int(sys.argv[1]), "ddp": True})
    register()
    if smp.tp_size() == 1:
        model = smp.DistributedModel(whole_model(0))
        assert not model.tensor_parallelism_report()
        assert type(model.module.last) is nn.Linear
    else:
        check_replacement()
        check_ancestors()
        check_fresh_weights()
        check_differences()
    print("replacement holds")
    smp.shutdown()


if __name__ == "__main__":
    main()
