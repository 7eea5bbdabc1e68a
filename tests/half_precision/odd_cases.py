"""Cases of failures and odd parameters."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import shardwright as smp
import torch
from shardwright.optimizer.master_state import without_half_precision
from torch import nn

from tests.half_precision.cases import case, divided, is_float16, masters_of, optimizer_of, static_scale
from tests.half_precision.model import batch, loss_of, made, train


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
    dense = smp.DistributedOptimizer(torch.optim.SGD(groups, lr=0.1, momentum=0.5), static_loss_scale=static_scale())
    kind = torch.optim.SparseAdam if sparse else torch.optim.Adam
    table = kind([dict(model.named_parameters())["table.weight"]], lr=0.01)
    of_table = smp.DistributedOptimizer(table, static_loss_scale=static_scale())
    schedule = torch.optim.lr_scheduler.StepLR(dense.optimizer, 2, 0.5)

    @smp.step
    def step(model: Any, ids: torch.Tensor) -> None:
        model.backward(model(ids).square().mean())

    before: dict[str, torch.Tensor] = {}
    for number in range(5):
        for optimizer in (dense, of_table):
            optimizer.zero_grad(set_to_none=not zeros or optimizer is of_table)
        step(model, batch(number, smp.dp_rank(), 8) % 50)
        if number == 1:
            dense.clip_master_grads(1.0)
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


@case
def an_update_that_fails_on_one_rank() -> Any:
    """The next step is refused on all ranks; with the state from before, training goes on as if nothing had been."""

    class Failing(torch.optim.SGD):
        fails = False

        def step(self, closure: Any = None) -> Any:
            if self.fails and smp.rank() == 1:
                raise RuntimeError("out of memory")
            return super().step(closure)

    model = divided(made())
    inner = Failing(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = smp.DistributedOptimizer(inner, static_loss_scale=static_scale())

    def step(number: int) -> None:
        optimizer.zero_grad()
        train(model, batch(number, smp.dp_rank()))
        optimizer.step()

    step(0)
    weights, state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    step(1)
    expected = {name: one.clone() for name, one in model.state_dict().items()}
    model.load_state_dict(weights)
    optimizer.load_state_dict(copy.deepcopy(state))  # torch takes tensors over as they are
    Failing.fails = True
    if smp.rank() == 1:
        with pytest.raises(RuntimeError, match="out of memory"):
            step(1)
    else:
        step(1)
    Failing.fails = False
    with pytest.raises((smp.PartialUpdateError, smp.RemoteError), match="failed on rank 1"):
        train(model, batch(2, smp.dp_rank()))
    model.load_state_dict(weights)
    optimizer.load_state_dict(copy.deepcopy(state))  # torch takes tensors over as they are
    step(1)
    assert all(torch.equal(one, expected[name]) for name, one in model.state_dict().items())
    return len(expected)


@case
def state_dicts_of_other_kinds() -> Any:
    """Of float32 into half precision, and of half precision into float32; a bad one changes nothing."""
    model = divided(made())
    optimizer = optimizer_of(model, **({"dynamic_loss_args": {"init_scale": 2.0**10}} if is_float16() else {}))
    train(model, batch(0, smp.dp_rank()))
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    plain = made()
    of_float32 = torch.optim.AdamW(plain.parameters())
    loss_of(plain(batch(0, 0)[:, :-1]), batch(0, 0)).backward()
    of_float32.step()
    wrapped = without_half_precision(state)
    of_float32.load_state_dict(copy.deepcopy(wrapped))  # torch takes tensors over as they are
    of_float32.step()
    bad = copy.deepcopy(state)
    for entry in bad["state"].values():
        entry["master_weight"] = torch.zeros(3, 3, 3)
        entry["exp_avg"].zero_()
    with pytest.raises(ValueError, match=r"master weight of shape \(3, 3, 3\)"):
        optimizer.load_state_dict(bad)
    for number, entry in optimizer.state_dict()["state"].items():
        for name, value in entry.items():
            assert torch.equal(value, state["state"][number][name]), name
    with torch.no_grad():
        for parameter in model.local_parameters():
            parameter.mul_(3)
    optimizer.load_state_dict(copy.deepcopy(wrapped))
    for number, entry in optimizer.local_state_dict()["state"].items():
        assert torch.equal(entry["exp_avg"], state["state"][number]["exp_avg"])
        assert entry["exp_avg"].dtype == torch.float32
    train(model, batch(0, smp.dp_rank()))
    optimizer.update_master_grads()
    masters = [one for _, one in sorted(masters_of_rank(optimizer).items())]
    assert all(torch.equal(a, b.float()) for a, b in zip(masters, model.local_parameters(), strict=True))
    return len(masters)


def masters_of_rank(optimizer: Any) -> dict[int, torch.Tensor]:
    return {number: one["master_weight"] for number, one in optimizer.local_state_dict()["state"].items()}


@case
def gradients_are_accumulated_and_weighted() -> Any:
    """Two steps to an update, with weights of microbatches: those of one step over all of them."""
    model = divided(made())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), static_loss_scale=static_scale())

    @smp.step
    def weighted(model: Any, ids: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model(ids[:, :-1]), ids)
        model.backward(loss, weight=3)
        return loss

    def gradients(steps: Any) -> list[torch.Tensor]:
        optimizer.zero_grad()
        for step in steps:
            step(model, batch(0, smp.dp_rank()))
        optimizer.update_master_grads()
        norm = optimizer.clip_master_grads(math.inf)
        return [torch.tensor(norm), *(one.grad.clone() for one in model.local_parameters())]

    once, twice, with_weights = gradients([train]), gradients([train, train]), gradients([weighted])
    for one, two, three in zip(once, twice, with_weights, strict=True):
        torch.testing.assert_close(2 * one.float(), two.float(), rtol=0.01, atol=0.01)
        torch.testing.assert_close(one.float(), three.float(), rtol=0.02, atol=0.02)
    return float(once[0])


@case
def a_model_of_transformers(marked: bool) -> Any:
    """GPT-2 with its own loss: results keep their type, in float32; whole layers are replaced where they are marked."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"n_layer": 4, "n_head": 4, "n_embd": 32, "vocab_size": 64, "n_positions": 16}
    config = GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    with smp.tensor_parallelism(enabled=marked):
        whole = GPT2LMHeadModel(config)
    torch.manual_seed(0)
    plain = GPT2LMHeadModel(config)
    reference = torch.optim.AdamW(plain.parameters(), lr=3e-3)
    model = smp.DistributedModel(whole)
    optimizer = optimizer_of(model, "adamw", **({"dynamic_loss_args": {"init_scale": 2.0**10}} if is_float16() else {}))

    @smp.step
    def step(model: Any, ids: torch.Tensor) -> torch.Tensor:
        result = model(ids, labels=ids, use_cache=False)
        assert type(result).__name__ == "CausalLMOutputWithCrossAttentions", type(result)
        assert result.loss.dtype == result.logits.dtype == torch.float32
        model.backward(result.loss)
        return result.loss

    worst = 0.0
    for number in range(20):
        optimizer.zero_grad()
        loss = float(step(model, batch(number, smp.dp_rank())).reduce_mean())
        losses = smp.allgather(loss, smp.DP_GROUP)
        assert optimizer.clip_master_grads(1.0) >= 0
        optimizer.step()
        reference.zero_grad()
        every = torch.cat([batch(number, replica) for replica in range(smp.dp_size())])
        expected = plain(every, labels=every, use_cache=False).loss
        expected.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        reference.step()
        worst = max(worst, abs(sum(losses) / len(losses) - float(expected.detach())))
    if marked:
        assert any(one.substitute for one in model.tensor_parallelism_report())
    assert worst < 0.05, worst
    return worst
