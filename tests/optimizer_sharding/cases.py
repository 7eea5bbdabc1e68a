"""What holds of sharded optimizer state: a function for each case, which the ranks of a running job call."""

from __future__ import annotations

import copy
from typing import Any

import shardwright as smp
import torch
from shardwright.data_parallel.reducer import Reducer
from shardwright.data_parallel.shards import ParameterShards
from shardwright.job.runtime import current_runtime
from torch import nn

from .problems import OPTIMIZERS, Reference, batch, built, groups_of, loss_of
from .shares import whole_gradients

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
        expected = dict(self.reference.module.named_parameters())
        for name, found in whole_gradients(self.model).items():
            wanted = expected[name].grad
            assert (found is None) == (wanted is None), f"{what}: gradient of {name}"
            if found is not None and wanted is not None:
                close(found, wanted, f"{what}: gradient of {name}")


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


def check_prediction(optimizer: torch.optim.Optimizer, tolerance: float = 0.0) -> None:
    """The account of memory predicts that each rank has an even share of the state."""
    even = sum(smp.allgather(state_bytes(optimizer), smp.WORLD)) / smp.size()
    predicted = smp.memory_report()[smp.rank()]["predicted"]["optimizer_state"]
    assert predicted is not None
    assert abs(predicted - even) < 1 + tolerance * even, (predicted, even)


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
    prescaled = current_runtime().place.cfg.prescaled_batch  # tp ranks have the same batch
    replicas, replica = (smp.rdp_size(), smp.rdp_rank()) if prescaled else (smp.dp_size(), smp.dp_rank())
    reference = Reference(plain, OPTIMIZERS[optimizer](plain.parameters()), replicas, _microbatches())
    model = smp.DistributedModel(module)
    assert len(list(model.distributed_modules())) == 2
    distributed: Any = smp.DistributedOptimizer(OPTIMIZERS[optimizer](model.parameters()))
    for step in range(steps):
        reference.optimizer.zero_grad()
        distributed.zero_grad()
        train(model, batch(step, replica))
        reference.accumulate(step)
        found = smp.clip_grad_norm_(model.parameters(), 1.0)
        close(found, nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None]), "norm")
        torch.nn.utils.clip_grads_with_norm_(plain.parameters(), 1.0, found)
        distributed.step()
        reference.optimizer.step()
        whole = model.state_dict()
        for name, parameter in plain.named_parameters():
            close(whole[name], parameter.detach(), f"step {step}: {name}")
    if smp.pp_size() == 1:
        check_prediction(distributed, 0.1)  # a bias is on the first tp rank only
    saved = [distributed.local_state_dict(), copy.deepcopy(distributed.local_state_dict(gather_if_shard=False))]
    weights = copy.deepcopy(model.state_dict())
    for state in saved:  # what comes after a load is what came before it
        results = []
        for _ in range(2):
            model.load_state_dict(weights)
            distributed.load_state_dict(state)
            distributed.zero_grad()
            train(model, batch(9, replica))
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
        check_prediction(pair.optimizer)


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
