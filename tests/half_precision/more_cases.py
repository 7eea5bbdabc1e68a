"""More cases: what is kept in float32, mixed precision, refusals, failures, odd parameters."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import shardwright as smp
import torch
from torch import nn

from tests.half_precision.cases import case, divided, dtype, is_float16, masters_of, optimizer_of
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
        assert ours.get_scale() == theirs.get_scale(), (number, ours.get_scale(), theirs.get_scale())
    expected = plain.state_dict()
    worst = max(float((value - expected[name]).abs().max()) for name, value in model.state_dict().items())
    assert worst < (0.02 if marked else 1e-3), worst
    return worst


@case
def a_step_that_fails_leaves_everything() -> Any:
    """Steps that are undone between others: the same weights, masters and scale as without them."""
    results = []
    for fails in (False, True):
        model = divided(made())
        optimizer = optimizer_of(model)

        @smp.step
        def failing(model: Any, ids: torch.Tensor) -> None:
            model.backward(loss_of(model(ids[:, :-1]), ids))
            raise ValueError("a bad batch")

        for number in range(10):
            optimizer.zero_grad()
            train(model, batch(number, smp.dp_rank()))
            if fails:
                with pytest.raises((ValueError, smp.RemoteError), match="a bad batch"):
                    failing(model, batch(99, smp.dp_rank()))
            optimizer.step()
        masters = {number: one.clone() for number, one in masters_of(optimizer).items()}
        results.append((optimizer.loss_scale, masters))
        del model
    (scale, masters), (other_scale, other_masters) = results
    assert scale == other_scale, (scale, other_scale)
    assert all(torch.equal(master, other_masters[number]) for number, master in masters.items())
    return scale


@case
def odd_parameters(zeros: bool) -> Any:
    """Frozen ones, ones without gradient, sparse gradients, groups, a schedule; shared ones; a rank without any."""

    sparse = not is_float16()  # on the CPU torch does not add sparse tensors in float16

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(50, 8, sparse=sparse)
            self.first, self.frozen, self.unused = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
            self.again = nn.Linear(8, 8)
            self.again.weight = self.first.weight
            self.plain = nn.GELU()
            self.frozen.requires_grad_(False)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.again(self.plain(self.frozen(self.first(self.table(ids).mean(1)))))

    torch.manual_seed(0)
    module = Odd()
    if smp.pp_size() > 1:  # the last rank has no parameters
        smp.set_partition(module, 0)
        smp.set_partition(module.plain, 1)
    model = smp.DistributedModel(module)
    parameters = [parameter for name, parameter in model.named_parameters() if name != "table.weight"]
    groups = [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.05}]
    dense = smp.DistributedOptimizer(torch.optim.SGD(groups, lr=0.1, momentum=0.5), static_loss_scale=scale())
    kind = torch.optim.SparseAdam if sparse else torch.optim.Adam
    table = kind([dict(model.named_parameters())["table.weight"]], lr=0.01)
    of_table = smp.DistributedOptimizer(table, static_loss_scale=scale())
    schedule = torch.optim.lr_scheduler.StepLR(dense.optimizer, 2, 0.5)

    @smp.step
    def step(model: Any, ids: torch.Tensor) -> None:
        model.backward(model(ids).square().mean())

    before: dict[str, torch.Tensor] = {}
    for number in range(5):
        for optimizer in (dense, of_table):
            optimizer.zero_grad(set_to_none=not zeros or optimizer is of_table)
        step(model, batch(number, smp.dp_rank(), 8) % 50)
        if not before:
            before = {name: one.detach().clone() for name, one in model.local_named_parameters()}
        for optimizer in (dense, of_table):
            optimizer.step()
        schedule.step()
    assert [group["lr"] for group in dense.param_groups] == [0.025, 0.0125]
    moved = {name for name, one in model.local_named_parameters() if not torch.equal(one, before[name])}
    expected = {"table.weight", "first.weight", "first.bias", "again.bias"} & {*before, "again.weight"}
    assert moved == expected, moved
    assert bool(before) == (smp.pp_rank() == 0)
    kept = masters_of(dense)
    assert len(kept) == 3, list(kept)
    mine = [float(one.float().sum()) for one in model.local_parameters()]
    assert all(one == mine for one in smp.allgather(mine, smp.DP_GROUP))
    return sorted(moved)


def scale() -> float:
    return 64.0 if is_float16() else 1.0


@case
def weights_that_are_written_reach_the_masters() -> Any:
    """In place, by ``load_state_dict``, by ``.data`` with ``reload_model_params``; equal values keep their masters."""
    model = divided(made())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), static_loss_scale=scale())
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
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), static_loss_scale=scale())
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
def refusals() -> Any:
    """Bad input, by name."""
    model = divided(made())

    def sgd() -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    wrap = smp.DistributedOptimizer
    bad: list[tuple[dict[str, Any], str]]
    if is_float16():
        bad = [
            ({"static_loss_scale": 0.0}, "static_loss_scale is 0.0"),
            ({"static_loss_scale": "4"}, "static_loss_scale is '4'"),
            ({"static_loss_scale": math.inf}, "static_loss_scale is inf"),
            ({"static_loss_scale": 4.0, "dynamic_loss_scale": True}, "static_loss_scale and dynamic_loss_scale"),
            ({"dynamic_loss_scale": "yes"}, "dynamic_loss_scale is 'yes'"),
            ({"dynamic_loss_args": {"init_scale": 4.0}}, "without dynamic_loss_scale=True"),
            (
                {"dynamic_loss_scale": True, "dynamic_loss_args": {"windows": 1}},
                "has no 'windows'; allowed: 'init_scale'",
            ),
            ({"dynamic_loss_scale": True, "dynamic_loss_args": {"scale_window": 1.5}}, "'scale_window' 1.5"),
            ({"dynamic_loss_scale": True, "dynamic_loss_args": {"scale_window": 0}}, "'scale_window' 0"),
            ({"dynamic_loss_scale": True, "dynamic_loss_args": {"scale_factor": 1}}, "scale_factor is 1"),
            ({"dynamic_loss_scale": True, "dynamic_loss_args": {"init_scale": 0.5}}, "init_scale is 0.5"),
            (
                {"dynamic_loss_scale": True, "dynamic_loss_args": {"consecutive_hysteresis": 1}},
                "'consecutive_hysteresis' 1",
            ),
            ({"dynamic_loss_scale": True, "dynamic_loss_args": 3}, "dynamic_loss_args is a int"),
            ({"dynamic_loss_scale": True, "min_scale": -1}, "min_scale is -1"),
        ]
    else:
        bad = [
            ({"static_loss_scale": 4.0}, "given static_loss_scale; losses are scaled in a job with fp16 only"),
            ({"dynamic_loss_scale": True}, "given dynamic_loss_scale"),
            ({"dynamic_loss_args": {"init_scale": 4.0}}, "given dynamic_loss_args"),
        ]
    for keys, words in bad:
        with pytest.raises(smp.ConfigError, match=words):
            wrap(sgd(), **keys)
    with pytest.raises(smp.ConfigError, match=r"torch.optim.LBFGS"):
        wrap(torch.optim.LBFGS(model.parameters()))
    with pytest.raises(smp.ConfigError, match=r"smp.keep_float32 was given a str"):
        smp.keep_float32("head")  # type: ignore[arg-type]
    with pytest.raises(smp.ConfigError, match=r"smp.verify in a job with fp16 or bf16"):
        smp.verify(train, model, batch(0, 0))

    optimizer = wrap(sgd(), static_loss_scale=scale())
    train(model, batch(0, smp.dp_rank()))
    with pytest.raises(smp.ConfigError, match="step was given a closure"):
        optimizer.step(lambda: 0.0)

    @smp.step
    def steps_inside(model: Any, ids: torch.Tensor) -> None:
        model.backward(loss_of(model(ids[:, :-1]), ids))
        optimizer.step()

    with pytest.raises((smp.FrameError, smp.RemoteError), match=r"SGD.step was called inside a step function"):
        steps_inside(model, batch(0, smp.dp_rank()))
    if is_float16():
        with pytest.raises(smp.ConfigError, match=r"smp.amp.GradScaler in a job with fp16"):
            smp.amp.GradScaler()
        with pytest.raises(smp.ConfigError, match=r"multiplied by the loss scale, 64, .*clip_master_grads"):
            smp.clip_grad_norm_(model.parameters(), 1.0)
        with pytest.raises(smp.ConfigError, match=r"multiplied by the loss scale, 64"):
            nn.utils.clip_grad_norm_(list(model.local_parameters()), 1.0)
        with pytest.raises(smp.ConfigError, match=r"SGD.step of an optimizer that smp.DistributedOptimizer does not"):
            sgd().step()
    _gradients_that_are_changed(model, optimizer)
    return len(bad)


def _gradients_that_are_changed(model: Any, optimizer: Any) -> None:
    train(model, batch(1, smp.dp_rank()))
    optimizer.clip_master_grads(1.0)
    if smp.rank() == 0:
        next(iter(model.local_parameters())).grad.mul_(2)
    if is_float16() or smp.size() == 1:
        with pytest.raises(smp.ShardwrightError, match="changed after clip_master_grads"):
            optimizer.step()
    optimizer.update_master_grads()
    optimizer.clip_master_grads(1.0)
    optimizer.step()
    if is_float16():
        later = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), dynamic_loss_scale=True)
        train(model, batch(2, smp.dp_rank()))
        with pytest.raises(smp.ShardwrightError, match=r"a later smp.DistributedOptimizer scales the losses"):
            optimizer.step()
        assert later.loss_scale == 2.0**32


@case
def unscaled_gradients_are_refused() -> Any:
    """With one pipeline rank ``loss.backward()`` works, but scales nothing."""
    model = smp.DistributedModel(nn.Linear(4, 1))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), static_loss_scale=16.0)
    model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(smp.ShardwrightError, match=r"were not made by model.backward"):
        optimizer.step()
    optimizer.zero_grad()
    model.backward(model(torch.ones(2, 4)).sum())
    assert float(model.module.weight.grad[0, 0]) == 32.0
    before = model.module.weight.detach().clone()
    optimizer.step()
    assert torch.allclose(before - model.module.weight, torch.full((1, 4), 0.2, dtype=torch.float16), atol=1e-3)
    return optimizer.loss_scale


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
    """Data-parallel ranks with one and three batches."""
    model = divided(made())
    optimizer = optimizer_of(model, dynamic_loss_args={"init_scale": 2.0**10})
    with model.join():
        for number in range(1 + 2 * smp.dp_rank()):
            optimizer.zero_grad()
            train(model, batch(number, smp.dp_rank()))
            optimizer.step()
    mine = {name: one.detach().float().sum().item() for name, one in model.local_named_parameters()}
    assert all(one == mine for one in smp.allgather(mine, smp.DP_GROUP))
    return copy.copy(len(mine))
