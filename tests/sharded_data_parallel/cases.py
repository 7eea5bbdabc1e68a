"""What holds of training with shards: a function for each case, which the ranks of a running job call."""

from __future__ import annotations

from typing import Any

import pytest
import shardwright as smp
import torch
from shardwright.data_parallel.collectives import ReplicaCollectives
from shardwright.job.runtime import current_runtime
from shardwright.sharded_data_parallel import groups
from shardwright.sharded_data_parallel.parameters import ShardedParameters, shard_of
from torch import nn

from tests.optimizer_sharding.problems import batch, loss_of
from tests.parity.models_language import gpt2, t5

from .problems import Pair, close, predict, train, whole


def parity(model: str = "blocks", optimizer: str = "adamw", steps: int = 4) -> None:
    """Gradients and weights are those of one process."""
    Pair(model, optimizer).run(steps)


def clipped(max_norm: float) -> None:
    """Gradients are clipped in ``step()``, over all ranks, and the norm is kept."""
    pair = Pair("blocks", "sgd")
    for step in range(3):
        pair.zero_grad()
        pair.train(step)
        pair.optimizer.step()
        norm = nn.utils.clip_grad_norm_(pair.reference.module.parameters(), max_norm)
        assert norm > max_norm, "nothing is clipped"
        close(pair.optimizer._global_grad_norm.double(), norm, "norm")
        pair.reference.optimizer.step()
        pair.check(f"step {step}")


def norms() -> None:
    """Norms of other orders are those of one process."""
    pair = Pair("blocks")
    for step, order in enumerate((2.0, 1.0, float("inf"), 0.5)):
        pair.zero_grad()
        pair.train(step)
        found = smp.clip_grad_norm_(pair.model.parameters(), 0.1, order)
        close(found, nn.utils.clip_grad_norm_(pair.reference.module.parameters(), 0.1, order), f"order {order}")
        pair.check_gradients(f"order {order}")
        pair.step()


def accumulation() -> None:
    """Gradients of several steps add up, with either way of clearing them, and over passes."""
    for passes in (1, 2):
        pair = Pair("odd", backward_passes_per_step=passes)
        for update in range(3):
            pair.zero_grad(set_to_none=update != 1)
            for part in range(2):
                pair.train(10 * update + part)
            pair.check_gradients(f"update {update}")
            pair.step()
            pair.check(f"update {update}")


def closures() -> None:
    """A closure is called once, before the update."""
    pair = Pair("odd")
    for step in range(3):

        def closure(step: int = step) -> torch.Tensor:
            pair.zero_grad()
            pair.train(step)
            return torch.tensor(2.0)

        assert pair.optimizer.step(closure) == 2.0
        pair.reference.optimizer.step()
        pair.check(f"step {step}")


def evaluations() -> None:
    """Whoever looks between steps finds the weights of the last update."""
    pair = Pair("blocks")
    for step in range(3):
        pair.zero_grad()
        pair.train(step)
        pair.step()
        inputs = batch(50 + step, 0)
        with torch.no_grad():
            expected = pair.reference.module(inputs)
            found = predict(pair.model, inputs)
            if smp.pp_rank() == 0:
                close(found.concat(), expected, "a step without gradients")
            if smp.pp_size() == 1:
                close(pair.model(inputs), expected, "outside steps")
    pair.check("at the end")


def inference_first() -> None:
    """A model whose first call is in inference mode trains afterwards."""
    pair = Pair("blocks")
    for step in range(2):
        with torch.inference_mode():
            found = predict(pair.model, batch(5, 0))
            if smp.pp_rank() == 0:
                close(found.concat(), pair.reference.module(batch(5, 0)), "a step in inference mode")
            if smp.pp_size() == 1:
                close(pair.model(batch(5, 0)), pair.reference.module(batch(5, 0)), "outside steps")
        pair.run(1, first=step)


def generated() -> None:
    """Models of ``transformers`` generate, whichever of their parts that calls by themselves."""
    for make in (gpt2, t5):
        torch.manual_seed(2)
        plain = make()
        torch.manual_seed(2)
        model = smp.DistributedModel(make())
        ids = torch.arange(6).reshape(1, 6) % 5 + 3
        for _ in range(2):
            expected = plain.generate(ids, max_new_tokens=5, do_sample=False)
            assert torch.equal(model.generate(ids, max_new_tokens=5, do_sample=False), expected)
        assert any(map(current_runtime()[ShardedParameters].is_sharded, model.parameters()))


def scaled() -> None:
    """A scaler of ``torch.amp`` unscales shards, and no rank updates where any has an infinity."""
    pair = Pair("blocks", "sgd")
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    @smp.step
    def scaled_step(model: Any, inputs: torch.Tensor, factor: float) -> None:
        model.backward(scaler.scale(loss_of(model(inputs)) * factor))

    for step in range(3):
        pair.zero_grad()
        scaled_step(pair.model, batch(step, smp.dp_rank()), 1.0)
        pair.reference.accumulate(step)
        scaler.unscale_(pair.optimizer)
        pair.check_gradients(f"step {step}")
        scaler.step(pair.optimizer)
        scaler.update()
        pair.reference.optimizer.step()
        pair.check(f"step {step}")
    pair.zero_grad()
    scaled_step(pair.model, batch(0, smp.dp_rank()), float("inf") if smp.dp_rank() else 1.0)
    scaler.step(pair.optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0
    pair.check("after an infinity")


def used_by_some() -> None:
    """Parameters that some replicas use and others not, some of them never."""
    pair = Pair("experts", "sgd")
    for step in range(5):
        pair.zero_grad()
        pair.train(step)
        chosen = [parameter.grad is not None for parameter in pair.model.parameters()]
        assert not all(chosen)
        pair.check_gradients(f"step {step}")
        pair.step()
        pair.check(f"step {step}")


def weighted() -> None:
    """Microbatches count by their weights, over replicas."""

    @smp.step
    def weighted_step(model: Any, inputs: torch.Tensor) -> None:
        model.backward(loss_of(model(inputs)), weight=1 + float(inputs[0, 0].abs()))

    pair = Pair("blocks", "sgd")
    for step in range(3):
        pair.zero_grad()
        weighted_step(pair.model, batch(step, smp.dp_rank()))
        total, parts = 0.0, []
        for replica in range(smp.dp_size()):
            for part in batch(step, replica).chunk(2):
                weight = 1 + float(part[0, 0].abs())
                total += weight
                parts.append((weight, part))
        for weight, part in parts:
            (loss_of(pair.reference.module(part)) * (weight / total)).backward()
        pair.check_gradients(f"step {step}")
        pair.step()


def hooks() -> None:
    """Hooks of parameters see the gradient of the step once, in the form of shards."""
    seen: list[torch.Tensor] = []
    pair = Pair("blocks", "sgd")
    train(pair.model, batch(9, smp.dp_rank()))
    parameter = next(one for one in pair.model.local_parameters() if one.dim() > 1)
    name = next(name for name, one in pair.model.local_named_parameters() if one is parameter)

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        seen.append(gradient)
        return gradient * 2

    parameter.register_hook(hook)
    pair.zero_grad()
    pair.train(0)
    (gradient,) = seen
    assert gradient.shape == parameter.shape
    assert parameter.grad is not None
    expected = dict(pair.reference.module.named_parameters())[name].grad
    assert expected is not None
    close(whole(parameter, parameter.grad), 2 * expected, "hook")


def hooks_before() -> None:
    """A hook of a parameter that is sharded later goes with it."""
    seen: list[int] = []
    module = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 6))
    module[0].weight.register_hook(lambda gradient: seen.append(gradient.numel()))
    model = smp.DistributedModel(module)
    for step in range(3):
        train(model, batch(step, smp.dp_rank()))
        is_here = "0.weight" in dict(model.local_named_parameters())
        assert len(seen) == (step + 1 if is_here else 0)


def failures() -> None:
    """A step that fails on one rank is undone on all, and the next one is exact, whenever it failed."""

    @smp.step
    def failing(model: Any, inputs: torch.Tensor, when: int) -> None:
        output = model(inputs)
        if when == 0 and smp.dp_rank() == 1:
            raise ValueError("on purpose")
        if when == 1 and smp.dp_rank() == 1:
            output.register_hook(_fail)
        model.backward(loss_of(output))
        if when == 2 and smp.dp_rank() == 1:
            raise ValueError("on purpose")

    pair = Pair("blocks")
    pair.run(1)
    for when in range(3 if smp.pp_size() == 1 else 1):
        with pytest.raises((ValueError, smp.RemoteError), match="on purpose"):
            failing(pair.model, batch(0, smp.dp_rank()), when)
        pair.check(f"after failure {when}")
        pair.run(2, first=1 + 2 * when)


def _fail(_: torch.Tensor) -> None:
    raise ValueError("on purpose")


def failing_forward() -> None:
    """A module that fails between its gathers, on one rank, leaves nothing behind."""

    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.fails = nn.Linear(6, 6), False

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            if self.fails:
                raise ValueError("on purpose")
            return torch.as_tensor(self.inner(inputs))

    torch.manual_seed(4)
    model = smp.DistributedModel(nn.Sequential(nn.Linear(6, 6), Fails(), nn.Linear(6, 6)))
    train(model, batch(0, smp.dp_rank()))
    before = [whole(one, one.grad).clone() for one in model.parameters() if one.grad is not None]
    model.zero_grad()
    model.module[1].fails = smp.dp_rank() == 0
    with pytest.raises((ValueError, smp.RemoteError), match="on purpose"):
        train(model, batch(0, smp.dp_rank()))
    model.module[1].fails = False
    assert all(one.grad is None for one in model.parameters())
    train(model, batch(0, smp.dp_rank()))
    after = [whole(one, one.grad) for one in model.parameters() if one.grad is not None]
    for one, other in zip(before, after, strict=True):
        close(one, other, "gradient")


def memory() -> None:
    """The account of memory counts shards."""
    pair = Pair("blocks")
    pair.run(2)
    parameters = list(pair.model.local_parameters())
    held = sum(shard_of(one).numel() for one in parameters)
    elements = sum(one.numel() for one in parameters)
    assert held < 0.6 * elements
    assert all(shard_of(one).shape[0] == one.shape[0] // 2 for one in parameters if one.shape[0] == 32)
    report = smp.memory_report()[smp.rank()]
    assert report["measured"]["parameters"] == held * 8
    assert report["predicted"]["optimizer_state"] == 2 * held * 8
    assert abs(report["measured"]["optimizer_state"] - 2 * held * 8) < 8 * 2 * len(parameters)
    assert not any("shard_optimizer_state" in setting for setting, _, _ in report["advice"])


def before_two_levels() -> None:
    """Have four ranks look as if they were on two hosts."""
    groups.by_host = lambda ranks, _: [list(ranks[:2]), list(ranks[2:])]  # type: ignore[assignment]


def two_levels(used: bool = True) -> None:
    """Parameters are gathered between hosts, and then within them."""
    levels = current_runtime()[ReplicaCollectives].gathers
    assert bool(levels) == used
    Pair("blocks").run(3)
    shards = current_runtime()[ReplicaCollectives].shards
    assert shards is not None
    assert [one.begun > 0 for one in levels] == [True] * len(levels)
    if used:
        assert levels[0].ranks == [smp.rank() % 2, smp.rank() % 2 + 2]
        assert levels[1].ranks == [smp.rank() // 2 * 2, smp.rank() // 2 * 2 + 1]


def averaged() -> None:
    """Averages of weights are those of one process, and stand in for them."""
    pair = Pair("blocks")
    average = smp.AveragedModel(pair.model)
    expected = torch.optim.swa_utils.AveragedModel(pair.reference.module)
    for step in range(3):
        pair.run(1, first=step)
        average.update_parameters()
        expected.update_parameters(pair.reference.module)
    state = average.state_dict()
    for name, value in expected.state_dict().items():
        close(torch.as_tensor(state[name]).double(), value.double(), name)
    with average.applied(), torch.no_grad():
        found = predict(pair.model, batch(7, 0))
        if smp.pp_rank() == 0:
            close(found.concat(), expected(batch(7, 0)), "with averaged weights")
    pair.check("afterwards")
    pair.run(1, first=3)


def two_models() -> None:
    """Two models train by turns, each with an optimizer of its own."""
    pairs = [Pair("blocks", "adamw"), Pair("odd", "sgd")]
    for step in range(4):
        pairs[step % 2].run(1, first=step)


def checkpointed(strategy: str) -> None:
    """A checkpoint of several units is computed again with what is gathered then, not with what was there before."""
    pair = Pair("blocks")
    smp.set_activation_checkpointing(pair.model.module, strategy=strategy)
    pair.run(3)
