"""More cases: what is kept in float32, mixed precision, refusals, failures, odd parameters."""

from __future__ import annotations

import math
from typing import Any

import shardwright as smp
import torch
from torch import nn

from tests.half_precision.cases import (
    DYNAMIC,
    case,
    divided,
    dtype,
    is_float16,
    masters_of,
    optimizer_of,
    static_scale,
)
from tests.half_precision.model import Language, batch, loss_of, made, train


@case
def layerwise_norms_are_of_whole_parameters(kind: str) -> Any:
    """LAMB or NovoGrad over tensor- and pipeline-parallel ranks, beside one process, in double precision."""

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        if kind == "lamb":
            return smp.optimizers.FusedLamb(parameters, lr=0.05, max_grad_norm=0.1)
        return smp.optimizers.FusedNovoGrad(parameters, lr=0.01, weight_decay=0.1)

    plain = made().double()
    reference = optimizer(plain.parameters())
    model = divided(made(marked=True).double())
    assert smp.tp_size() == 1 or sum(bool(one.substitute) for one in model.tensor_parallelism_report()) == 17
    ours = smp.DistributedOptimizer(optimizer(model.parameters()))
    for number in range(4):
        ours.zero_grad()
        train(model, batch(number, smp.dp_rank()))
        ours.step()
        reference.zero_grad()
        every = torch.cat([batch(number, replica) for replica in range(smp.dp_size())])
        loss_of(plain(every[:, :-1]), every).backward()
        reference.step()
    expected = plain.state_dict()
    worst = max(float((value - expected[name]).abs().max()) for name, value in model.state_dict().items())
    assert worst < 1e-9, worst
    return worst


class Router(nn.Module):
    """Computes with a weight that must not be rounded."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0001, 0.9999]))
        self.register_buffer("places", torch.tensor([1000.5, 2000.25]))
        self.seen: torch.dtype | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.dtype == torch.float32 or not is_float16(), x.dtype
        return x * self.weight


class Mixed(nn.Module):
    """A module in float32 between two in half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 2)
        self.router = smp.keep_float32(Router())
        self.last = nn.Linear(2, 1)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.dtype == dtype(), x.dtype
        hidden = self.router(self.first(x))
        assert hidden.dtype == dtype(), hidden.dtype
        return self.last(hidden)


@case
def modules_are_kept_in_float32() -> Any:
    torch.manual_seed(0)
    module = Mixed()
    if smp.pp_size() > 1:
        smp.set_partition(module, 0)
        smp.set_partition(module.router, 1)
    before = list(module.parameters())
    model = smp.DistributedModel(module)
    assert all(a is b for a, b in zip(before, module.parameters(), strict=True))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def step(model: Any, x: torch.Tensor) -> torch.Tensor:
        out = model(x)
        assert out.dtype == torch.float32
        model.backward(out.sum())
        return out

    step(model, torch.ones(4, 4))
    kinds = {name: one.dtype for name, one in model.local_named_parameters()}
    assert all((kind == torch.float32) == name.startswith("router") for name, kind in kinds.items()), kinds
    buffers = {name: one.dtype for name, one in model.local_named_buffers()}
    assert buffers.get("router.places", torch.float32) == torch.float32
    assert buffers.get("count", torch.int64) == torch.int64
    weights = {name: one.detach().clone() for name, one in model.local_named_parameters()}
    optimizer.step()
    moved = [name for name, one in model.local_named_parameters() if not torch.equal(one, weights[name])]
    assert len(moved) == len(weights), moved
    state = optimizer.local_state_dict()["state"]
    names = [name for name, _ in module.named_parameters()]
    assert all(("master_weight" in state.get(names.index(name), {})) == ("router" not in name) for name in weights)
    return sorted(moved)


@case
def a_grad_scaler_agrees_over_ranks(bad: int, marked: bool = False) -> Any:
    """Float32 under autocast: an infinity on one rank, and the same scale and weights as in one process."""
    plain, model = made(), divided(made(marked=marked))
    ours, theirs = smp.amp.GradScaler(init_scale=2.0**8, growth_interval=2), torch.amp.GradScaler("cpu", 2.0**8)
    theirs.set_growth_interval(2)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)

    @smp.step
    def step(model: Any, ids: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model(ids[:, :-1]).float(), ids)
        model.backward(ours.scale(loss))
        return loss

    for number in range(5):
        optimizer.zero_grad()
        step(model, batch(number, smp.dp_rank()))
        reference.zero_grad()
        for replica in range(smp.dp_size()):
            for part in batch(number, replica).chunk(2):
                with torch.autocast("cpu", torch.bfloat16):
                    loss = loss_of(plain(part[:, :-1]).float(), part)
                theirs.scale(loss / 2 / smp.dp_size()).backward()
        if number == 2:
            plain.head.bias.grad[0] = math.inf
            if smp.rank() == bad:
                next(iter(model.local_parameters())).grad.fill_(math.inf)
        before = [one.detach().clone() for one in model.local_parameters()]
        ours.step(optimizer)
        ours.update()
        theirs.step(reference)
        theirs.update()
        same = all(torch.equal(a, b) for a, b in zip(before, model.local_parameters(), strict=True))
        assert same == (number == 2), number
        assert ours.get_scale() == theirs.get_scale(), (
            number,
            ours.get_scale(),
            theirs.get_scale(),
        )
    expected = plain.state_dict()
    worst = max(float((value - expected[name]).abs().max()) for name, value in model.state_dict().items())
    assert worst < (0.02 if marked else 1e-3), worst
    return worst


@case
def weights_that_are_written_reach_the_masters() -> Any:
    """In place, by ``load_state_dict``, by ``.data`` with ``reload_model_params``; equal values keep their masters."""
    model = divided(made())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), static_loss_scale=static_scale())
    train(model, batch(0, smp.dp_rank()))
    optimizer.step()

    def masters() -> list[torch.Tensor]:
        train(model, batch(0, smp.dp_rank()))
        optimizer.step()
        return [one.clone() for _, one in sorted(optimizer.local_state_dict_masters())]

    def local() -> list[torch.Tensor]:
        return [one.detach().float() for one in model.local_parameters()]

    optimizer.local_state_dict_masters = lambda: [  # type: ignore[attr-defined]
        (number, entry["master_weight"]) for number, entry in optimizer.local_state_dict()["state"].items()
    ]
    fine = optimizer.local_state_dict()
    for entry in fine["state"].values():
        entry["master_weight"] = entry["master_weight"] * (1 + 2.0**-20)  # rounds to the same
    optimizer.load_state_dict(fine)
    model.load_state_dict(model.local_state_dict())
    kept = masters()
    assert any(not torch.equal(a, b) for a, b in zip(kept, local(), strict=True)), "masters were rounded"
    with torch.no_grad():
        for parameter in model.local_parameters():
            parameter.mul_(2)
    assert all(torch.equal(a, b) for a, b in zip(masters(), local(), strict=True))
    for parameter in model.local_parameters():
        parameter.data.mul_(2)
    optimizer.reload_model_params()
    assert all(torch.equal(a, b) for a, b in zip(masters(), local(), strict=True))
    model.load_state_dict({name: value * 0 + 0.5 for name, value in model.state_dict().items()})
    assert all(bool((one == 0.5).all()) for one in masters())
    return len(kept)


@case
def clipping_gives_the_norm_of_the_whole_model(marked: bool = False) -> Any:
    """Over pipeline and tensor ranks and replicas, beside that of one process, for several orders."""
    norms = []
    for order in (2.0, math.inf, 1.0):
        plain, model = made(), divided(made(marked=marked))
        optimizer = smp.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), static_loss_scale=static_scale()
        )
        every = torch.cat([batch(0, replica) for replica in range(smp.dp_size())])
        loss_of(plain(every[:, :-1]), every).backward()
        train(model, batch(0, smp.dp_rank()))
        found = optimizer.clip_master_grads(0.01, order)
        expected = float(nn.utils.clip_grad_norm_(plain.parameters(), 0.01, order))
        assert abs(found - expected) < 0.02 * expected, (order, found, expected)
        again = optimizer.clip_master_grads(1.0, order)
        assert abs(again - 0.01) < 1e-4, (order, again)
        norms.append(found)
    return norms


@case
def parameters_of_distributed_modules_are_float16() -> Any:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.outer = nn.Linear(8, 8)
            with smp.tensor_parallelism():
                self.inner = nn.Linear(8, 8)
            self.own = smp.nn.DistributedLinear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.own(self.inner(self.outer(x).half())).float()

    torch.manual_seed(0)
    module = Two()
    weight = module.inner.weight.detach().clone()
    model = smp.DistributedModel(module)
    kinds = {name: parameter.dtype for name, parameter in model.named_parameters()}
    assert all((kind == torch.float16) == (not name.startswith("outer")) for name, kind in kinds.items()), kinds
    assert torch.equal(model.state_dict()["inner.weight"], weight.half())
    with smp.delay_param_initialization():
        delayed = smp.nn.DistributedLinear(8, 4)
    assert delayed.weight.dtype == torch.float16

    @smp.step
    def step(model: Any, x: torch.Tensor) -> None:
        model.backward(model(x).sum())

    step(model, torch.ones(4, 8))
    return sorted(str(kind) for kind in set(kinds.values()))


@case
def delayed_parameters_are_cast() -> Any:
    with smp.delay_param_initialization():
        module = Language(2)
    torch.manual_seed(3)
    with smp.delay_param_initialization():
        module = Language(2)
    torch.manual_seed(3)
    plain = Language(2)
    model = divided(module)
    optimizer = optimizer_of(model)
    train(model, batch(0, smp.dp_rank()))
    expected = dict(plain.named_parameters())
    for name, parameter in model.local_named_parameters():
        assert torch.equal(parameter, expected[name].to(dtype())), name
    optimizer.step()
    return optimizer.loss_scale


@case
def replicas_with_fewer_batches_join() -> Any:
    """Data-parallel ranks with one and five batches, of which the first overflow; afterwards all go on alike."""
    model = divided(made())
    scaling: dict[str, Any] = {"dynamic_loss_scale": True, "dynamic_loss_args": DYNAMIC} if is_float16() else {}
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), **scaling)

    def step(number: int) -> None:
        optimizer.zero_grad()
        train(model, batch(number, smp.dp_rank()))
        optimizer.step()

    for _ in range(9):  # until it fits, but for one
        step(0)
    with model.join():
        for number in range(1 + 4 * smp.dp_rank()):
            step(number)
    scales = smp.allgather(optimizer.loss_scale, smp.WORLD)
    assert len({*scales}) == 1, scales
    for number in range(3):
        step(number)
    masters = {number: one.double().sum().item() for number, one in masters_of(optimizer).items()}
    assert all(one == masters for one in smp.allgather(masters, smp.DP_GROUP))
    return scales[0]


@case
def gradients_of_divided_modules_are_as_exact(slack: float = 2.0) -> Any:
    """Gradients over tensor ranks are about as far from those of float32 as those of half precision in one process."""
    every = [batch(0, replica) for replica in range(smp.dp_size())]
    found: list[dict[str, torch.Tensor]] = []
    for kind in (torch.float32, dtype()):
        plain = made().to(kind)
        for of_replica in every:
            for part in of_replica.chunk(2):
                scaled = loss_of(plain(part[:, :-1]).float(), part) * static_scale() * 16
                (scaled / 2 / len(every)).backward()
        gradients = {name: one.grad.float() for name, one in plain.named_parameters() if one.grad is not None}
        found.append({name: one / static_scale() / 16 for name, one in gradients.items()})
    exact, half = found
    largest = max(float(one.abs().max()) for one in exact.values())

    def error(name: str, gradient: torch.Tensor, whole: torch.Tensor) -> float:
        """The measure of parity, relative to the whole parameter's gradient."""
        scale = max(float(exact[name].abs().max()), largest * 1e-3)
        return float((gradient - whole).abs().max()) / scale

    model = divided(made(marked=True))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), static_loss_scale=static_scale())
    train(model, batch(0, smp.dp_rank()))
    shardings = model.placement.sharded.by_name()
    divided_here, worst = 0, 0.0
    for name, parameter in model.local_named_parameters():
        whole = exact[name]
        sharding = shardings.get(name)
        if sharding is not None:
            divided_here += sharding.is_divided
            part = sharding.shard(whole, smp.tp_rank(), smp.tp_size())
            assert part is not None
        ours = error(name, parameter.grad.float() / optimizer.loss_scale, whole if sharding is None else part)
        theirs = error(name, half[name], whole)
        rounding = torch.finfo(dtype()).eps
        assert ours <= slack * theirs + 2 * rounding, (name, ours, theirs)
        worst = max(worst, ours)
    assert divided_here > 5, "nothing is divided"
    return worst


@case
def masters_are_of_the_share() -> Any:
    """Masters and state are those of a rank's share, and the account of memory expects as much."""
    model = divided(made())
    optimizer = optimizer_of(model, dynamic_loss_args={"init_scale": 2.0**8}) if is_float16() else optimizer_of(model)
    optimizer.init_master_params()
    train(model, batch(0, smp.dp_rank()))
    optimizer.step()
    assert not optimizer.overflow
    elements = sum(parameter.numel() for parameter in model.local_parameters())
    ranks = smp.dp_size() if smp.state.cfg.shard_optimizer_state else 1
    even = elements * 4 / ranks
    every = smp.allgather(optimizer.master_bytes, smp.DP_GROUP)
    assert sum(every) == elements * 4 * smp.dp_size() / ranks, every
    assert all(abs(one - even) <= 0.05 * even for one in every), (every, even)
    account = smp.memory_report()[smp.rank()]
    assert account["predicted"]["optimizer_state"] == 3 * even  # and two moments
    assert abs(account["measured"]["optimizer_state"] - 3 * even) <= 0.05 * 3 * even
    assert account["predicted"]["gradients"] == account["measured"]["gradients"] == 2 * elements
    return every
