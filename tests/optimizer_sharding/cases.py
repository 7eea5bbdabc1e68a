"""What holds of sharded optimizer state: a function for each case, which the ranks of a running job call."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import shardwright as smp
import torch
from shardwright.data_parallel.reducer import Reducer
from shardwright.data_parallel.shards import ParameterShards
from shardwright.job.runtime import current_runtime
from torch import nn

from .problems import OPTIMIZERS, Reference, batch, built, groups_of, loss_of

#: Of a weight after some steps.
TOLERANCE = 1e-10


@smp.step
def train(model: Any, inputs: torch.Tensor) -> torch.Tensor:
    loss = loss_of(model(inputs))
    model.backward(loss)
    return loss


class Pair:
    """A model over the ranks of the job, and the same in one process."""

    def __init__(self, model: str, optimizer: str, **options: Any) -> None:
        make = OPTIMIZERS[optimizer]
        module = built(model)
        self.reference = Reference(module, make(groups_of(module.parameters())), smp.dp_size(), _microbatches())
        self.model = smp.DistributedModel(built(model), **options)
        self.optimizer: Any = smp.DistributedOptimizer(make(groups_of(list(self.model.parameters()))))

    def train(self, step: int) -> None:
        train(self.model, batch(step, smp.dp_rank()))
        self.reference.accumulate(step)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in (self.optimizer, self.reference.optimizer):
            optimizer.zero_grad(set_to_none=set_to_none)

    def step(self) -> None:
        self.optimizer.step()
        self.reference.optimizer.step()

    def check(self, what: str) -> None:
        check_weights(self.model, self.reference.module, what)

    def run(self, steps: int, first: int = 0) -> None:
        for step in range(first, first + steps):
            self.zero_grad()
            self.train(step)
            self.check_gradients(f"step {step}")
            self.step()
            self.check(f"step {step}")

    def check_gradients(self, what: str) -> None:
        """Every element's gradient is on its owner, and nowhere else."""
        shards = current_runtime()[ParameterShards]
        expected = dict(self.reference.module.named_parameters())
        for name, parameter in self.model.local_named_parameters():
            slices = shards.of(parameter)
            if slices is None:
                continue
            wanted, own = expected[name].grad, shards.own(parameter, smp.rank())
            if own is None or wanted is None:
                assert parameter.grad is None, f"{what}: gradient of {name}"
                continue
            masked = torch.zeros_like(wanted)
            own.of(masked).copy_(own.of(wanted))
            close(parameter.grad, masked, f"{what}: gradient of {name}")


def _microbatches() -> int:
    return int(current_runtime().place.cfg.microbatches)


def close(found: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    scale = max(1e-3, wanted.abs().max().item()) if wanted.numel() else 1.0
    torch.testing.assert_close(found, wanted, rtol=0, atol=TOLERANCE * scale, msg=lambda text: f"{what}: {text}")


def check_weights(model: Any, plain: nn.Module, what: str) -> None:
    """All weights of this rank, and those of the others, are those of one process."""
    expected = dict(plain.named_parameters())
    for name, parameter in model.local_named_parameters():
        close(parameter.detach(), expected[name].detach(), f"{what}: {name}")


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """The bytes of an optimizer's state without its scalars."""
    values = [value for state in optimizer.state.values() for value in state.values()]
    return sum(value.nbytes for value in values if isinstance(value, torch.Tensor) and value.dim() > 0)


def parity(model: str, optimizer: str, steps: int = 5) -> None:
    """Training is that of one process."""
    pair = Pair(model, optimizer)
    pair.run(steps)
    owners = {
        piece.owner
        for parameter in pair.model.local_parameters()
        for piece in current_runtime()[ParameterShards].of(parameter) or ()
    }
    assert len(owners) > 1, "one rank owned everything"


def tensor_parallel(optimizer: str, steps: int = 5) -> None:
    """Modules that are divided over tp ranks train as in one process."""

    def build() -> nn.Sequential:
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 3))

    plain, module = build(), build()
    smp.set_tensor_parallelism(module[0])
    smp.set_tensor_parallelism(module[2])
    reference = Reference(plain, OPTIMIZERS[optimizer](plain.parameters()), smp.dp_size(), _microbatches())
    model = smp.DistributedModel(module)
    assert len(list(model.distributed_modules())) == 2
    distributed: Any = smp.DistributedOptimizer(OPTIMIZERS[optimizer](model.parameters()))
    for step in range(steps):
        reference.optimizer.zero_grad()
        distributed.zero_grad()
        train(model, batch(step, smp.dp_rank()))
        reference.accumulate(step)
        found = smp.clip_grad_norm_(model.parameters(), 1.0)
        close(found, nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None]), "norm")
        torch.nn.utils.clip_grads_with_norm_(plain.parameters(), 1.0, found)
        distributed.step()
        reference.optimizer.step()
        whole = model.state_dict()
        for name, parameter in plain.named_parameters():
            close(whole[name], parameter.detach(), f"step {step}: {name}")
    saved = [distributed.local_state_dict(), copy.deepcopy(distributed.local_state_dict(gather_if_shard=False))]
    weights = copy.deepcopy(model.state_dict())
    for state in saved:  # what comes after a load is what came before it
        results = []
        for _ in range(2):
            model.load_state_dict(weights)
            distributed.load_state_dict(state)
            distributed.zero_grad()
            train(model, batch(9, smp.dp_rank()))
            distributed.step()
            results.append(copy.deepcopy(model.state_dict()))
        for name, value in results[0].items():
            assert torch.equal(value, results[1][name]), name


def scripts(model: str, optimizer: str) -> None:
    """What scripts do between a step and an update: accumulate, clip, schedule, change gradients, freeze."""
    pair = Pair(model, optimizer)
    both = (pair.optimizer, pair.reference.optimizer)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.8) for each in both]
    for update in range(4):
        pair.zero_grad(set_to_none=update % 2 == 0)
        for part in range(3):  # gradients of several steps add up
            pair.train(10 * update + part)
        pair.check_gradients(f"update {update}")
        for parameters in (list(pair.model.local_parameters()), list(pair.reference.module.parameters())):
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad *= 0.5
                    parameter.grad = parameter.grad.clamp(-0.2, 0.2)
        norm = smp.clip_grad_norm_(pair.model, 0.1)
        plain = list(pair.reference.module.parameters())
        wanted = nn.utils.get_total_norm([one.grad for one in plain if one.grad is not None])
        close(norm, wanted, "norm")
        nn.utils.clip_grads_with_norm_(plain, 0.1, wanted)
        pair.step()
        for scheduler in schedulers:
            scheduler.step()
        pair.check(f"update {update}")
    for step, frozen in enumerate((True, True, False)):
        for module in (pair.model.module, pair.reference.module):
            next(module.children()).requires_grad_(not frozen)
        pair.zero_grad()
        pair.train(100 + step)
        pair.step()
        pair.check(f"frozen {frozen}")


def added_groups(optimizer: str) -> None:
    """A group that is added later is divided too, and what was divided stays where it is."""
    pair = Pair("odd", optimizer)
    for each, module in ((pair.optimizer, pair.model.module), (pair.reference.optimizer, pair.reference.module)):
        last = list(module.children())[-2]
        for group in each.param_groups:
            group["params"] = [one for one in group["params"] if all(one is not other for other in last.parameters())]
    pair.run(2)
    before = {id(tensor) for tensor in pair.optimizer.state}
    for each, module in ((pair.optimizer, pair.model.module), (pair.reference.optimizer, pair.reference.module)):
        each.add_param_group({"params": list(list(module.children())[-2].parameters()), "lr": 0.003})
    pair.run(3, first=2)
    assert before <= {id(tensor) for tensor in pair.optimizer.state}


def late_optimizer(optimizer: str) -> None:
    """An optimizer that is created after the first step has the gradients of that step."""
    module = built("odd")
    plain = built("odd")
    reference = Reference(plain, OPTIMIZERS[optimizer](plain.parameters()), smp.dp_size(), _microbatches())
    model = smp.DistributedModel(module)
    for step in range(3):
        train(model, batch(step, smp.dp_rank()))
        reference.accumulate(step)
        if step == 0:
            distributed: Any = smp.DistributedOptimizer(OPTIMIZERS[optimizer](model.parameters()))
    distributed.step()
    reference.optimizer.step()
    check_weights(model, plain, "late")


def accumulation(optimizer: str) -> None:
    """Gradients that are reduced in every second step only."""
    pair = Pair("odd", optimizer, backward_passes_per_step=2)
    for update in range(3):
        pair.zero_grad(set_to_none=update != 1)
        for part in range(2):
            pair.train(10 * update + part)
        pair.check_gradients(f"update {update}")
        pair.step()
        pair.check(f"update {update}")
    pair.model.placement.replicas._passes = 0
    refused(smp.ShardwrightError, "gradients of the last reduction", lambda: train(pair.model, batch(0, smp.dp_rank())))
    pair.zero_grad()
    train(pair.model, batch(0, smp.dp_rank()))


def half_the_bytes(model: str, optimizer: str) -> None:
    """Each rank's state is its share of that of one process, within a twentieth."""
    pair = Pair(model, optimizer)
    pair.run(1)
    whole, degree = state_bytes(pair.reference.optimizer), smp.dp_size()
    every = smp.allgather(state_bytes(pair.optimizer), smp.WORLD)
    assert sum(every) == whole, (every, whole)
    if smp.pp_size() == 1:
        even = whole / degree
        assert all(abs(one - even) <= 0.05 * even for one in every), (every, even)


def sent_early(model: str) -> None:
    """Gradients are reduced while backward runs, also where a guess was wrong."""
    sent: list[bool] = []
    original = Reducer._send

    def counting(self: Reducer, bucket: Any) -> None:
        sent.append(self._listening)
        original(self, bucket)

    Reducer._send = counting  # type: ignore[method-assign]
    try:
        pair = Pair(model, "adamw", bucket_cap_mb=1e-3)
        pair.run(3)
        assert any(sent), "no bucket was sent during backward"
        for step in range(3, 6):  # twice through the model in one step, and once
            pair.zero_grad()
            train_twice(pair.model, batch(step, smp.dp_rank()), step == 4)
            for replica in range(smp.dp_size()):
                for part in batch(step, replica).chunk(_microbatches()):
                    for _ in range(2 if step == 4 else 1):
                        scale = _microbatches() * smp.dp_size()
                        (loss_of(pair.reference.module(part)) / scale).backward()
            pair.check_gradients(f"step {step}")
            pair.step()
            pair.check(f"step {step}")
    finally:
        Reducer._send = original  # type: ignore[method-assign]


@smp.step
def train_twice(model: Any, inputs: torch.Tensor, twice: bool) -> None:
    for _ in range(2 if twice else 1):
        model.backward(loss_of(model(inputs)))


def refused(kind: type[Exception], words: str, call: Callable[[], Any]) -> None:
    """A call is refused with these words, here or on another rank."""
    with pytest.raises((kind, smp.RemoteError), match=re.escape(words)):
        call()


def unequal_steps() -> None:
    """A step that fails on one rank, and an update that does, leave what training goes on from."""
    pair = Pair("odd", "adamw")
    pair.run(2)
    refused(ValueError, "on purpose", lambda: failing(pair.model, batch(0, smp.dp_rank()), smp.dp_rank() == 1))
    pair.check("after a failed step")
    pair.run(2, first=2)
    weights, state = pair.model.state_dict(), pair.optimizer.state_dict()
    weights = {name: value.clone() for name, value in weights.items()}
    pair.zero_grad()
    pair.train(4)
    hook = pair.optimizer.register_step_pre_hook(fail_on_the_last_rank)
    try:
        pair.optimizer.step()
    except (OSError, smp.PartialUpdateError, smp.RemoteError):
        pass
    else:
        assert smp.size() - 1 not in smp.get_dp_group(), "an update that fails on one rank succeeded on another"
    hook.remove()
    try:
        train(pair.model, batch(4, smp.dp_rank()))
    except (smp.PartialUpdateError, smp.RemoteError):
        pass
    else:
        raise AssertionError("a step ran after ranks had updated their weights differently")
    pair.model.load_state_dict(weights)
    pair.optimizer.load_state_dict(state)
    pair.zero_grad()
    pair.run(3, first=4)


@smp.step
def failing(model: Any, inputs: torch.Tensor, fails: bool) -> None:
    model.backward(loss_of(model(inputs)))
    if fails:
        raise ValueError("on purpose")


def fail_on_the_last_rank(*_: Any) -> None:
    if smp.rank() == smp.size() - 1:
        raise OSError("on purpose")


def whole_norms(optimizer: str) -> None:
    """Norms of other orders, and what torch's own function says."""
    pair = Pair("odd", optimizer)
    pair.zero_grad()
    pair.train(0)
    gradients = [one.grad for one in pair.reference.module.parameters() if one.grad is not None]
    for order in (1.0, 2.0, 3.0, math.inf):
        found = smp.clip_grad_norm_(pair.model.parameters(), math.inf, order)
        close(found, nn.utils.get_total_norm(gradients, order), f"norm of order {order}")
    if any(one.grad is not None for one in pair.model.local_parameters()):
        refused(
            smp.NotOwnedError, "clip_grad_norm_", lambda: nn.utils.clip_grad_norm_(pair.model.local_parameters(), 1.0)
        )


def misuse() -> None:
    """What cannot be exact is refused by name."""
    module = built("odd")
    model = smp.DistributedModel(module)
    refused(smp.ConfigError, "LBFGS", lambda: smp.DistributedOptimizer(torch.optim.LBFGS(model.parameters())))
    refused(smp.ConfigError, "join", model.join)
    refused(smp.ConfigError, "register_comm_hook", lambda: model.register_comm_hook(None, None))
    optimizer: Any = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters()))
    plain = torch.optim.SGD(model.parameters())
    train(model, batch(0, smp.dp_rank()))
    refused(smp.ConfigError, "does not wrap", plain.step)
    refused(smp.ConfigError, "Adafactor", lambda: smp.DistributedOptimizer(torch.optim.Adafactor(model.parameters())))
    refused(smp.ConfigError, "list of shares", lambda: optimizer.load_state_dict([]))
    share = optimizer.local_state_dict(gather_if_shard=False)
    share["_smp_share"]["place"] = (0, 1, 0, smp.dp_size(), 0, 1)
    refused(ValueError, "missing", lambda: optimizer.load_state_dict(share))
    train(model, batch(0, smp.dp_rank()))
    optimizer.step()


def different_optimizers() -> None:
    """Ranks that create different optimizers are told so, before anything is reduced."""
    model = smp.DistributedModel(built("odd"))
    parameters = list(model.parameters())
    optimizer: Any = smp.DistributedOptimizer(torch.optim.Adam(parameters[smp.rank() % 2 :]))
    refused(smp.ShardwrightError, "do not shard the same", lambda: train(model, batch(0, smp.dp_rank())))
    refused(smp.ShardwrightError, "do not shard the same", optimizer.step)


def closures(optimizer: str) -> None:
    """A closure is called once, with all parameters in the groups."""
    pair = Pair("odd", optimizer)
    for step in range(3):

        def closure(step: int = step) -> torch.Tensor:
            pair.zero_grad()
            pair.train(step)
            return torch.tensor(2.0)

        assert pair.optimizer.step(closure) == 2.0
        pair.reference.optimizer.step()
        pair.check(f"step {step}")


def several_optimizers() -> None:
    """Two optimizers of one model, by turns, and two of the same parameters."""
    plain = built("odd")
    model = smp.DistributedModel(built("odd"))
    halves = []
    for module in (plain, model.module):
        listed = list(module.parameters())
        halves.append((listed[:3], listed[3:]))
    references = [torch.optim.SGD(halves[0][0], lr=0.1, momentum=0.9), torch.optim.Adam(halves[0][1], lr=0.01)]
    references.append(torch.optim.SGD(halves[0][0], lr=0.01))
    optimizers: list[Any] = [torch.optim.SGD(halves[1][0], lr=0.1, momentum=0.9)]
    optimizers += [torch.optim.Adam(halves[1][1], lr=0.01), torch.optim.SGD(halves[1][0], lr=0.01)]
    optimizers = [smp.DistributedOptimizer(one) for one in optimizers]
    reference = Reference(plain, references[0], smp.dp_size(), _microbatches())
    for step in range(5):
        model.zero_grad()
        plain.zero_grad()
        train(model, batch(step, smp.dp_rank()))
        reference.accumulate(step)
        for which in ((0, 1), (1, 2), (2, 0))[step % 3]:
            optimizers[which].step()
            references[which].step()
        check_weights(model, plain, f"step {step}")


def sparse(optimizer: str) -> None:
    """Sparse gradients stay sparse, on the owners of their weights."""

    class Tables(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.first = nn.Embedding(50, 8, sparse=True)
            self.second = nn.Embedding(40, 8, sparse=True)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            index = (inputs.abs() * 10).long()
            return self.first(index % 50) * self.second(index % 40)

    makes: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "sparse-adam": lambda parameters: torch.optim.SparseAdam(list(parameters), lr=0.05),
        "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.05),
        "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    }
    plain, model = Tables(), smp.DistributedModel(Tables())
    reference = Reference(plain, makes[optimizer](plain.parameters()), smp.dp_size(), _microbatches())
    distributed: Any = smp.DistributedOptimizer(makes[optimizer](model.parameters()))
    for step in range(5):
        reference.optimizer.zero_grad()
        distributed.zero_grad()
        for part in range(2):
            train(model, batch(2 * step + part, smp.dp_rank()))
            reference.accumulate(2 * step + part)
        here = [one.grad is not None for one in model.parameters()]
        assert all(one.grad is None or one.grad.is_sparse for one in model.parameters())
        assert smp.allgather(here, smp.DP_GROUP) == [[True, False], [False, True]][: smp.dp_size()]
        distributed.step()
        reference.optimizer.step()
        check_weights(model, plain, f"step {step}")
