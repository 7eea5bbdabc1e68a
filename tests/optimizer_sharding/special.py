"""Unusual optimizers, parameters and scripts: a function for each case, which the ranks of a running job call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import shardwright as smp
import torch
from shardwright.data_parallel.shards import ParameterShards
from shardwright.job.runtime import current_runtime
from torch import nn

from .cases import Pair, check_weights, close, loss_of, state_bytes, train
from .problems import OPTIMIZERS, Reference, batch, built


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
    reference = Reference(plain, references[0], smp.dp_size(), 2)
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
    reference = Reference(plain, makes[optimizer](plain.parameters()), smp.dp_size(), 2)
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


def _train_both(model: Any, optimizer: Any, reference: Reference, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        reference.optimizer.zero_grad()
        train(model, batch(step, smp.dp_rank()))
        reference.accumulate(step)
        optimizer.step()
        reference.optimizer.step()
        check_weights(model, reference.module, f"step {step}")


class Images(nn.Module):
    """A convolution whose weight is not contiguous, a tensor without elements, and two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.convolution = nn.Conv2d(2, 5, (1, 3)).to(memory_format=torch.channels_last)
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.single = nn.Linear(5, 3).to(torch.float32)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        images = inputs.view(-1, 2, 1, 3)
        features = self.convolution(images).flatten(1) + self.empty.sum()
        return self.single(features.float()).double()


def layouts(optimizer: str) -> None:
    """Parameters that are not contiguous, are empty, or have another dtype."""
    make = OPTIMIZERS[optimizer]
    plain, model = Images(), smp.DistributedModel(Images(), gradient_as_bucket_view=True)
    reference = Reference(plain, make(plain.parameters()), smp.dp_size(), 2)
    distributed: Any = smp.DistributedOptimizer(make(model.parameters()))
    for step in range(5):
        distributed.zero_grad()
        reference.optimizer.zero_grad()
        train(model, batch(step, smp.dp_rank()))
        reference.accumulate(step)
        distributed.step()
        reference.optimizer.step()
        for name, parameter in model.local_named_parameters():
            wanted = plain.get_parameter(name)
            torch.testing.assert_close(parameter, wanted, rtol=1e-5, atol=1e-6, msg=name)
    every = smp.allgather([one.detach() for one in model.local_parameters()], smp.DP_GROUP)
    assert all(torch.equal(one, other) for one, other in zip(every[0], every[-1], strict=True))


@smp.step
def evaluate(model: Any, inputs: torch.Tensor) -> torch.Tensor:
    return model(inputs)


def readers(optimizer: str) -> None:
    """Evaluations, averages, verifications and plain reads between updates see whole weights, and disturb nothing."""
    pair = Pair("odd", optimizer)
    averaged = smp.AveragedModel(pair.model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    wanted = torch.optim.swa_utils.AveragedModel(
        pair.reference.module, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
    )
    pair.run(1)
    averaged.update_parameters()
    wanted.update_parameters(pair.reference.module)
    held = list(pair.model.local_parameters())
    for step in range(1, 4):
        pair.zero_grad()
        pair.train(step)
        with torch.no_grad():
            found = evaluate(pair.model, batch(99, 0)).concat()
            close(found, pair.reference.module(batch(99, 0)), "evaluation")
        pair.check_gradients("after an evaluation")
        pair.optimizer.load_state_dict(pair.optimizer.state_dict())
        pair.check_gradients("after a load")
        smp.verify(train, pair.model, batch(98, smp.dp_rank()), raise_on_difference=True)
        pair.check_gradients("after a verification")
        pair.step()
        assert all(one is other for one, other in zip(held, pair.model.local_parameters(), strict=True))
        pair.check("held")
        averaged.update_parameters()
        wanted.update_parameters(pair.reference.module)
        with averaged.applied():
            check_weights(pair.model, wanted.module, "average")
        if step == 1:  # in other memory
            for parameter in held:
                parameter.data = parameter.data.clone()


def scaler() -> None:
    """All ranks skip an update in which one rank's gradients overflow."""
    plain, model = built("odd"), smp.DistributedModel(built("odd"))
    make = OPTIMIZERS["adamw"]
    reference, distributed = make(plain.parameters()), smp.DistributedOptimizer(make(model.parameters()))
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0) for _ in range(2)]

    @smp.step
    def train_scaled(model: Any, inputs: torch.Tensor) -> None:
        model.backward(scalers[0].scale(loss_of(model(inputs))))

    for step in range(4):
        batches = [batch(step, replica) for replica in range(smp.dp_size())]
        if step == 1:
            batches[-1][0, 0] = torch.inf
        distributed.zero_grad()
        reference.zero_grad()
        train_scaled(model, batches[smp.dp_rank()])
        for one in batches:
            for part in one.chunk(2):
                scalers[1].scale(loss_of(plain(part)) / (2 * smp.dp_size())).backward()
        for each, optimizer in zip(scalers, (distributed, reference), strict=True):
            each.step(optimizer)
            each.update()
        assert scalers[0].get_scale() == scalers[1].get_scale()
        check_weights(model, plain, f"step {step}")


def alien_parameter() -> None:
    """A parameter of no model is updated by every rank."""
    plain, model = built("odd"), smp.DistributedModel(built("odd"))
    own, whole = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    make = OPTIMIZERS["adamw"]
    distributed: Any = smp.DistributedOptimizer(make([own, *model.parameters()]))
    reference = Reference(plain, make([whole, *plain.parameters()]), smp.dp_size(), 2)
    for step in range(3):
        distributed.zero_grad()
        reference.optimizer.zero_grad()
        own.grad, whole.grad = torch.full((3,), 0.5), torch.full((3,), 0.5)
        train(model, batch(step, smp.dp_rank()))
        reference.accumulate(step)
        _ = distributed.state[next(iter(model.parameters()))]  # a look that leaves an empty entry
        distributed.step()
        reference.optimizer.step()
        check_weights(model, plain, f"step {step}")
        close(own.detach(), whole.detach(), "parameter of no model")
    assert list(distributed.state_dict()["state"]) == list(reference.optimizer.state_dict()["state"])


def two_models() -> None:
    """One optimizer for two models, of which a step uses one."""
    plain = [built("odd"), built("tiny")]
    models = [smp.DistributedModel(built("odd")), smp.DistributedModel(built("tiny"))]
    make = OPTIMIZERS["sgd"]
    reference = make([one for module in plain for one in module.parameters()])
    distributed: Any = smp.DistributedOptimizer(make([one for model in models for one in model.parameters()]))
    for step in range(5):
        which = step % 2
        distributed.zero_grad()
        reference.zero_grad()
        train(models[which], batch(step, smp.dp_rank()))
        Reference(plain[which], reference, smp.dp_size(), 2).accumulate(step)
        distributed.step()
        reference.step()
        for model, module in zip(models, plain, strict=True):
            check_weights(model, module, f"step {step}")


class Stages(nn.Module):
    """Two stages, the second without parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        with smp.partition(0):
            self.first = nn.Linear(6, 5)
        with smp.partition(1):
            self.second = nn.Tanh()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(inputs))


def stage_without_parameters() -> None:
    """A stage that has nothing to update."""
    plain, model = Stages(), smp.DistributedModel(Stages())
    make = OPTIMIZERS["adamw"]
    distributed: Any = smp.DistributedOptimizer(make(model.parameters()))
    _train_both(model, distributed, Reference(plain, make(plain.parameters()), smp.dp_size(), 2), 3)
    assert len(distributed.state_dict()["state"]) == 2
    distributed.load_state_dict(distributed.local_state_dict())
    smp.clip_grad_norm_(model.parameters(), 1.0)


def user_hooks() -> None:
    """Hooks of parameters change gradients before they are reduced."""
    pair = Pair("odd", "sgd")
    for module in (pair.model.module, pair.reference.module):
        module[0].weight.register_hook(lambda gradient: gradient * 0.5)
    pair.run(3)


def subclass() -> None:
    """A subclass of a known optimizer may do anything, and gets whole parameters."""

    class Normalised(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.add_(parameter.grad / parameter.grad.norm(), alpha=-0.01)

    plain, model = built("large"), smp.DistributedModel(built("large"))
    distributed: Any = smp.DistributedOptimizer(Normalised(model.parameters(), lr=0.1))
    _train_both(model, distributed, Reference(plain, Normalised(plain.parameters(), lr=0.1), smp.dp_size(), 2), 3)


def verified_first() -> None:
    """A verification that divides the model, before the first step."""
    pair = Pair("large", "adamw")
    smp.verify(train, pair.model, batch(98, smp.dp_rank()), raise_on_difference=True)
    pair.run(3)
    shards = current_runtime()[ParameterShards]
    assert all(shards.of(parameter) is not None for parameter in pair.model.local_parameters())
    assert sum(smp.allgather(state_bytes(pair.optimizer), smp.WORLD)) == state_bytes(pair.reference.optimizer)


def delayed() -> None:
    """Parameters that are made where they are owned."""
    plain = built("large")
    with smp.delay_param_initialization(enabled=True):
        module = built("large")
    model = smp.DistributedModel(module)
    make = OPTIMIZERS["adamw"]
    distributed: Any = smp.DistributedOptimizer(make(model.parameters()))
    _train_both(model, distributed, Reference(plain, make(plain.parameters()), smp.dp_size(), 2), 3)


def stale_graph() -> None:
    """A backward pass through weights that were updated meanwhile is an error, as in plain PyTorch."""
    model = smp.DistributedModel(built("large"))
    optimizer: Any = smp.DistributedOptimizer(OPTIMIZERS["adamw"](model.parameters()))
    outputs = model.module(batch(0, 0))
    train(model, batch(0, smp.dp_rank()))
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss_of(outputs).backward()


def language_model() -> None:
    """A GPT-2 whose embedding is tied to its head, which a pipeline keeps on one rank."""
    from transformers import GPT2Config, GPT2LMHeadModel

    def build() -> nn.Module:
        torch.manual_seed(3)
        config = GPT2Config(vocab_size=97, n_positions=8, n_embd=24, n_layer=4, n_head=2, resid_pdrop=0, embd_pdrop=0)
        config.attn_pdrop = 0.0
        return GPT2LMHeadModel(config).double()

    @smp.step
    def train_on(model: Any, tokens: torch.Tensor) -> None:
        model.backward(model(input_ids=tokens, labels=tokens, use_cache=False).loss)

    plain, model = build(), smp.DistributedModel(build())
    make = OPTIMIZERS["adamw"]
    reference, distributed = make(plain.parameters()), smp.DistributedOptimizer(make(model.parameters()))
    for step in range(5):
        batches = [
            torch.randint(97, (4, 8), generator=torch.Generator().manual_seed(10 * step + replica))
            for replica in range(smp.dp_size())
        ]
        distributed.zero_grad()
        reference.zero_grad()
        train_on(model, batches[smp.dp_rank()])
        for tokens in batches:
            for part in tokens.chunk(2):
                loss = plain(input_ids=part, labels=part, use_cache=False).loss
                (loss / (2 * smp.dp_size())).backward()
        distributed.step()
        reference.step()
        for name, parameter in model.local_named_parameters():
            wanted = plain.get_parameter(name).detach()
            torch.testing.assert_close(parameter.detach(), wanted, rtol=1e-5, atol=1e-7, msg=f"step {step}: {name}")


def wrapped_late(optimizer: str) -> None:
    """An optimizer that has state when it is wrapped keeps its share of it."""
    make = OPTIMIZERS[optimizer]
    plain, model = built("large"), smp.DistributedModel(built("large"))
    reference = Reference(plain, make(plain.parameters()), smp.dp_size(), 2)
    own: Any = make(model.parameters())
    for step in range(6):
        if step == 3:
            before = state_bytes(own)
            own = smp.DistributedOptimizer(own)
            assert sum(smp.allgather(state_bytes(own), smp.DP_GROUP)) == before
        own.zero_grad()
        reference.optimizer.zero_grad()
        train(model, batch(step, smp.dp_rank()))
        reference.accumulate(step)
        own.step()
        reference.optimizer.step()
        check_weights(model, plain, f"step {step}")


def wide_gradients() -> None:
    """Gradients of another dtype than their parameters'."""
    module = built("large").to(torch.bfloat16)
    for parameter in module.parameters():
        parameter.grad_dtype = torch.float32
    model = smp.DistributedModel(module)
    optimizer: Any = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    train(model, batch(0, smp.dp_rank()).bfloat16())
    owned = [parameter for parameter in model.parameters() if parameter.grad is not None]
    assert all(parameter.grad.dtype is torch.float32 for parameter in owned)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer.step()
    changed = [not torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True)]
    assert all(changed)
