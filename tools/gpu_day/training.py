"""One training script, as plain PyTorch in one process and as ranks run it, and how far both are apart."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import shardwright as smp
import torch
from torch import nn
from transformers import GPT2LMHeadModel

from benches.gpt2.model import VOCABULARY, loss_of_logits, make_batch, make_model
from tests.parity.compare import Comparison
from tools.gpu_day.figures import synchronize

#: Of losses, gradients and weights, each relative to its own size: sums have another order.
TOLERANCES = {"float64": 1e-10, "float32": 1e-4}

Optimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
Loss = Callable[[Any, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Size:
    """Of a GPT-2 and its batch."""

    blocks: int
    width: int
    heads: int
    sequence: int
    batch: int
    microbatches: int
    vocabulary: int = VOCABULARY


@dataclass
class Trained:
    """What training gave.

    Attributes:
        losses: The mean over the microbatches of each step.
        gradients: Those of the last step, of the parameters that this process holds.
        weights: All at the end.
        seconds: Of each step, from its begin until the device is done.
    """

    losses: list[torch.Tensor] = field(default_factory=list)
    gradients: dict[str, torch.Tensor | None] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)


def make_gpt2(size: Size, device: str, dtype: torch.dtype) -> GPT2LMHeadModel:
    """The same numbers in every process with such a device; attention is computed by operations that are repeatable."""
    with torch.device(device):
        model = make_model(size.blocks, size.width, size.heads, size.sequence, size.vocabulary)
    model.set_attn_implementation("eager")
    return model.to(dtype)


def make_ids(size: Size, device: str) -> torch.Tensor:
    """Token ids, the same in every process."""
    return make_batch(size.batch, size.sequence, size.vocabulary).to(device)


def language_loss(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """In the dtype of the logits, where the model's own is in single precision."""
    return loss_of_logits(model(input_ids=ids).logits, ids)


def sgd(parameters: Iterable[nn.Parameter], rate: float = 0.5) -> torch.optim.Optimizer:
    """Amplifies no error, as Adam would of a gradient that is truly zero."""
    return torch.optim.SGD(parameters, lr=rate)


def repeatable(on: bool = True) -> None:
    """Choose operations that give the same numbers for the same call, so that an error is the library's.

    New memory is filled with what shows in results, so that nothing is to be timed then.
    """
    torch.use_deterministic_algorithms(on, warn_only=True)


def begin_peak(device: str) -> int:
    """Give back what earlier training has left, and count the device's peak anew; the bytes that are in use."""
    if device == "cpu":
        return 0
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def train_plain(
    model: nn.Module,
    microbatches: Iterable[torch.Tensor],
    steps: int,
    optimizer_of: Optimizer,
    loss_of: Loss,
    *,
    with_values: bool = True,
) -> Trained:
    """Train in this process: the mean of the gradients of all microbatches, one after another.

    Without ``with_values``, neither gradients nor weights are kept.
    """
    parts = list(microbatches)
    optimizer = optimizer_of(model.parameters())
    trained = Trained()
    device = parts[0].device.type
    for _ in range(steps):
        began = _begin(device)
        optimizer.zero_grad()
        losses = []
        for part in parts:
            loss = loss_of(model, part)
            loss.backward()
            losses.append(loss.detach())
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(len(parts))
        optimizer.step()
        synchronize(device)
        trained.seconds.append(time.perf_counter() - began)
        trained.losses.append(torch.stack(losses).mean().cpu())
    if with_values:
        trained.gradients = _gradients(model.named_parameters())
        trained.weights = {name: _copy(parameter) for name, parameter in model.named_parameters()}
    return trained


def train_ranks(
    keys: dict[str, Any],
    make: Callable[[], nn.Module],
    batch: torch.Tensor,
    steps: int,
    optimizer_of: Optimizer,
    loss_of: Loss,
    *,
    translate: Callable[[dict[str, Any]], dict[str, Any]] = dict,
    look: Callable[[], None] = lambda: None,
    with_values: bool = True,
) -> Trained:
    """Train as a rank, from ``smp.init`` to ``smp.shutdown``.

    Args:
        keys: Of the configuration.
        make: Makes the model, after ``smp.init``, and marks what is to be placed, divided or checkpointed.
        batch: Of all replicas; each takes its part.
        steps: How many.
        optimizer_of: Makes the optimizer.
        loss_of: Of the model and a microbatch.
        translate: Gives the state dict the names and shapes of the plain model.
        look: Called at the end, before ``smp.shutdown``.
        with_values: Whether gradients and weights are kept, for which weights are gathered.
    """
    smp.init(keys)
    try:
        model: Any = smp.DistributedModel(make())
        optimizer = smp.DistributedOptimizer(optimizer_of(model.parameters()))
        own = batch.chunk(smp.dp_size())[smp.dp_rank()]

        @smp.step
        def step(model: Any, part: torch.Tensor) -> torch.Tensor:
            loss = loss_of(model, part)
            model.backward(loss)
            return loss.detach()

        trained = Trained()
        device = batch.device.type
        for _ in range(steps):
            smp.barrier()
            began = _begin(device)
            optimizer.zero_grad()
            losses = step(model, own)
            optimizer.step()
            synchronize(device)
            trained.seconds.append(time.perf_counter() - began)
            loss = losses.reduce_mean().cpu()
            if smp.dp_size() > 1:
                loss = torch.stack(smp.allgather(loss, smp.DP_GROUP)).mean()
            trained.losses.append(loss)
        look()
        if with_values:
            trained.gradients = _gradients(model.local_named_parameters())
            weights = translate(model.state_dict())
            trained.weights = {name: _copy(weight) for name, weight in weights.items()}
        return trained
    finally:
        smp.shutdown()


def difference(found: Trained, expected: Trained, dtype: str) -> dict[str, Any]:
    """How far what ranks trained is from what one process trained.

    Returns:
        The largest ``error``, where it was, and what is wrong besides; whether all numbers are the same bits; and
        whether ``exact``: within the dtype's tolerance.
    """
    compared = Comparison()
    for number, (own, other) in enumerate(zip(found.losses, expected.losses, strict=True)):
        compared.tensor(own, other, 0.0, f"the loss of step {number}")
    weights = {name: found.weights[name] for name in expected.weights if name in found.weights}
    if len(weights) < len(expected.weights):
        compared.fail(f"weights are missing: {sorted(expected.weights.keys() - weights.keys())[:3]}")
    compared.gradients(weights, expected.weights, "weights")
    held = {name: one for name, one in found.gradients.items() if name in expected.gradients}
    compared.gradients(held, expected.gradients, "gradients")
    pairs = [
        *zip(found.losses, expected.losses, strict=True),
        *((weight, expected.weights[name]) for name, weight in weights.items()),
        *((one, expected.gradients[name]) for name, one in held.items()),
    ]
    return {
        "error": compared.worst,
        "where": compared.where,
        "wrong": "; ".join(compared.failures),
        "bitwise": all(_same(one, other) for one, other in pairs),
        "gradients": len(held),
        "exact": compared.worst <= TOLERANCES[dtype] and not compared.failures,
    }


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The error of a tensor, relative to its largest element."""
    compared = Comparison()
    compared.tensor(found, expected, 0.0, "it")
    return compared.worst


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is other if one is None or other is None else torch.equal(one, other)


def _begin(device: str) -> float:
    synchronize(device)
    return time.perf_counter()


def _gradients(named: Iterable[tuple[str, nn.Parameter]]) -> dict[str, torch.Tensor | None]:
    """Copies on the host. Of sharded parameters, whose gradients are shards, there are none."""
    return {
        name: None if parameter.grad is None else _copy(parameter.grad)
        for name, parameter in named
        if type(parameter.grad) in (torch.Tensor, type(None))
    }


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)
