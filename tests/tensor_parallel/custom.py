"""Distributed modules that are made with ``smp.nn.utils`` from nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cases import close, random
from shardwright.errors import ConfigError
from shardwright.nn import DistributedLinear, DistributedModule
from shardwright.nn.utils import (
    bwd_allreduce_for_tp,
    fused_allgather_for_tp,
    fwd_allreduce_for_tp,
    initialize_with_input_partition,
    initialize_with_output_partition,
    parameter_creation_scope,
    reduce_scatter_for_tp,
)
from shardwright.tensor_parallel.group import TensorGroup
from shardwright.tensor_parallel.sharding import Sharding
from torch import nn

WIDTH, INNER = 4, 8


def check(group: TensorGroup) -> None:
    for scope in ({}, {"use_normal": True, "initializer_range": 3.0}):
        a_block(group, **scope)
    own_parameters(group)
    many_kinds(group)
    dtypes_and_generators(group)
    refused(group)


class Block(DistributedModule):
    """Two linear layers, the first divided over output channels, the second over input channels."""

    def __init__(self, group: TensorGroup, **scope: object) -> None:
        super().__init__(group)
        n = group.size
        with parameter_creation_scope(self, **scope):
            with initialize_with_output_partition(self):
                self.up = nn.Linear(WIDTH, INNER // n, dtype=torch.float64)
            with initialize_with_input_partition(self):
                self.down = nn.Linear(INNER // n, WIDTH, dtype=torch.float64)
            self.norm = nn.LayerNorm(WIDTH, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples = fused_allgather_for_tp(self.norm(x), 0, group=self.tp_group)
        inner = self.up(samples).tanh()
        return reduce_scatter_for_tp(self.down(inner), 0, group=self.tp_group)


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, INNER, dtype=torch.float64)
        self.down = nn.Linear(INNER, WIDTH, dtype=torch.float64)
        self.norm = nn.LayerNorm(WIDTH, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(self.norm(x)).tanh())


def a_block(group: TensorGroup, **scope: object) -> None:
    n, rank = group.size, group.rank
    torch.manual_seed(1)
    whole = Whole()
    torch.manual_seed(1)
    divided = Block(group, **scope)
    assert divided.shardings == {
        "up.weight": Sharding(dim=0),
        "up.bias": Sharding(dim=0),
        "down.weight": Sharding(dim=1),
        "down.bias": Sharding(owner=0),
        "norm.weight": Sharding(),
        "norm.bias": Sharding(),
    }
    assert (divided.down.bias is None) == (rank > 0)
    assert divided.norm.weight.eq(1).all()
    assert divided.norm.bias.eq(0).all()
    if not scope:  # the numbers that the whole has of one seed
        for name, parameter in divided.named_parameters():
            expected = divided.shardings[name].shard(whole.get_parameter(name), rank, n)
            assert torch.equal(parameter, expected), name
    else:
        assert divided.up.weight.abs().max() > 1  # deviation 3; torch's default stays below a half

    divided.load_whole_state_dict(whole.state_dict())
    xs = [random(r, (2, WIDTH)).requires_grad_() for r in range(n)]
    expected = whole(torch.cat(xs))
    expected.sin().sum().backward()
    own = xs[rank].detach().clone().requires_grad_()
    output = divided(own)
    close(output, expected.chunk(n)[rank], "block")
    output.sin().sum().backward()
    close(own.grad, xs[rank].grad, "gradient of the block's input")
    for name in ("up.weight", "up.bias", "down.weight"):
        wanted = divided.shardings[name].shard(whole.get_parameter(name).grad, rank, n)
        close(divided.get_parameter(name).grad, wanted, name)
    if rank == 0:
        close(divided.down.bias.grad, whole.down.bias.grad, "bias")


class Bare(DistributedModule):
    """Parameters of its own, for replicated samples, and constants."""

    def __init__(self, group: TensorGroup, scaled_batch: bool) -> None:
        super().__init__(group)
        n = group.size
        self.before = nn.Parameter(torch.ones(3))
        with parameter_creation_scope(self, scaled_batch):
            with initialize_with_output_partition(self):
                self.first = nn.Parameter(torch.empty(INNER // n, WIDTH))
                self.scale = nn.Parameter(torch.full((INNER // n,), 2.0))
            with initialize_with_input_partition(self):
                self.weight = nn.Parameter(torch.empty(WIDTH, INNER // n))
                self.bias = nn.Parameter(torch.ones(WIDTH))
            self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.linear(bwd_allreduce_for_tp(x, group=self.tp_group), self.first) * self.scale
        return fwd_allreduce_for_tp(nn.functional.linear(hidden, self.weight, self.bias), group=self.tp_group)


def own_parameters(group: TensorGroup) -> None:
    alone = TensorGroup(None)
    for scaled_batch in (True, False):
        torch.manual_seed(2)
        whole = Bare(alone, scaled_batch)
        torch.manual_seed(2)
        divided = Bare(group, scaled_batch)
        assert list(divided.shardings) == ["first", "scale", "weight", "bias", "steps"]
        assert {one.scaled_batch for one in divided.shardings.values()} == {scaled_batch}
        for name, parameter in divided.named_parameters():
            sharding = divided.shardings.get(name, Sharding())
            assert torch.equal(parameter, sharding.shard(whole.get_parameter(name), group.rank, group.size)), name
        x = random(3, (3, WIDTH), torch.float32)
        torch.testing.assert_close(divided(x), whole(x))
    state = {name: random(4, value.shape, value.dtype) for name, value in whole.state_dict().items()}
    divided.load_whole_state_dict(state)
    assert torch.equal(divided.weight, state["weight"].chunk(group.size, 1)[group.rank])


class Kinds(DistributedModule):
    def __init__(self, group: TensorGroup, use_normal: bool) -> None:
        super().__init__(group)
        n = group.size
        with parameter_creation_scope(self, use_normal=use_normal):
            with initialize_with_output_partition(self):
                self.words = nn.Embedding(6, 8 // n, padding_idx=2)
                self.conv = nn.Sequential(nn.Conv1d(3, 8 // n, 2), nn.BatchNorm1d(8 // n))
            with initialize_with_input_partition(self):
                self.rows = nn.Embedding(8 // n, 6)
                self.back = nn.ConvTranspose1d(8 // n, 3, 2)
                self.tied = nn.Linear(6, 8 // n, bias=False)
                self.tied.weight = self.rows.weight


def many_kinds(group: TensorGroup) -> None:
    for use_normal in (False, True):
        torch.manual_seed(5)
        whole = Kinds(TensorGroup(None), use_normal)
        torch.manual_seed(5)
        divided = Kinds(group, use_normal)
        dims = {name: sharding.dim for name, sharding in divided.shardings.items()}
        assert dims == {
            "words.weight": 1,
            "conv.0.weight": 0,
            "conv.0.bias": 0,
            "conv.1.weight": 0,
            "conv.1.bias": 0,
            "conv.1.running_mean": 0,
            "conv.1.running_var": 0,
            "conv.1.num_batches_tracked": None,
            "rows.weight": 0,
            "back.weight": 0,
            "back.bias": None,
            "tied.weight": 0,
        }
        for name, value in divided.state_dict().items():
            expected = divided.shardings[name].shard(whole.state_dict()[name], group.rank, group.size)
            assert torch.equal(value, expected), name
        assert whole.words.weight[2].eq(0).all()
        assert whole.conv[1].weight.eq(1).all()
        assert divided.tied.weight is divided.rows.weight
        assert (divided.back.bias is None) == (group.rank > 0)
        assert (whole.words.weight.std() < 0.1) == use_normal


def dtypes_and_generators(group: TensorGroup) -> None:
    """The generator moves on by what the whole draws, whatever the degree."""
    after = []
    for of in (TensorGroup(None), group):
        torch.manual_seed(6)
        module = DistributedModule(of)
        with parameter_creation_scope(module, dtype=torch.bfloat16), initialize_with_output_partition(module):
            module.layer = nn.Linear(3, 8 // of.size)
        assert module.layer.weight.dtype == torch.bfloat16
        assert torch.get_default_dtype() == torch.float32
        after.append(torch.rand(()))
    assert torch.equal(*after)
    module = DistributedModule(group)
    with pytest.raises(RuntimeError, match="negative"), parameter_creation_scope(module, dtype=torch.float64):
        module.layer = nn.Sequential(nn.Linear(3, 8), nn.Linear(3, -8))
    assert torch.get_default_dtype() == torch.float32
    assert not module.shardings


def refused(group: TensorGroup) -> None:
    def expect(pattern: str, run: Callable[[], object]) -> None:
        with pytest.raises(ConfigError, match=pattern) as caught:
            run()
        print(f"refused: {caught.value}")

    def enter(*scopes: Callable[[DistributedModule], object], make: Callable[[], nn.Module] = nn.Identity) -> None:
        module = DistributedModule(group)
        if scopes:
            with scopes[0](module):
                enter_rest(module, scopes[1:], make)

    def enter_rest(module: DistributedModule, scopes: tuple, make: Callable[[], nn.Module]) -> None:
        if not scopes:
            module.made = nn.Sequential(make())
            return
        with scopes[0](module):
            enter_rest(module, scopes[1:], make)

    expect(r"DistributedModule is in no parameter_creation_scope", lambda: enter(initialize_with_input_partition))
    expect(r"DistributedModule is in no parameter_creation_scope", lambda: enter(initialize_with_output_partition))
    expect(r"module is a Linear", lambda: enter(lambda _: parameter_creation_scope(nn.Linear(1, 1))))
    expect(
        r"made.0.weight was made by another distributed module",
        lambda: enter(parameter_creation_scope, make=lambda: DistributedLinear(4, 4, group=group)),
    )
    expect(
        r"has padding_idx 1, which is no id of all ranks",
        lambda: enter(
            parameter_creation_scope, initialize_with_input_partition, make=lambda: nn.Embedding(4, 4, padding_idx=1)
        ),
    )
