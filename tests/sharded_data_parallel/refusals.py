"""What is refused by name: a function for each case, which the ranks of a running job call."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import shardwright as smp
import torch
from torch import nn

from tests.optimizer_sharding.problems import batch

from .problems import Pair, built, train


def refused(kind: type[Exception], words: str, call: Callable[[], Any]) -> None:
    """A call is refused with these words, here or on another rank."""
    with pytest.raises((kind, smp.RemoteError), match=re.escape(words)):
        call()


def refusals() -> None:
    """Features that cannot work with shards are refused with the reason, and training goes on."""
    pair = Pair("blocks")
    pair.run(1)
    model = pair.model
    refused(smp.ConfigError, "sharded_data_parallel_degree", model.join)
    refused(smp.ConfigError, "sharded_data_parallel_degree", lambda: model.register_comm_hook(None, lambda *_: None))
    refused(smp.ConfigError, "sharded_data_parallel_degree", model.cpu)
    refused(smp.ConfigError, "keep_vars", lambda: model.state_dict(keep_vars=True))
    for kind in (smp.optimizers.FusedLamb, smp.optimizers.FusedNovoGrad, torch.optim.LBFGS):
        optimizer = kind(list(model.local_parameters()))
        refused(smp.ConfigError, "not update each", lambda optimizer=optimizer: smp.DistributedOptimizer(optimizer))
    refused(smp.ConfigError, "norm_type", lambda: smp.clip_grad_norm_(model.parameters(), 1.0, -1.0))
    refused(smp.ConfigError, "smp.verify", lambda: smp.verify(train, model, batch(0, 0)))
    gradients = list(model.local_parameters())
    refused(smp.NotOwnedError, "smp.clip_grad_norm_", lambda: nn.utils.clip_grad_norm_(gradients, 1.0))
    pair.run(1, first=1)


def old_parameters() -> None:
    """An optimizer with the parameters of before is refused, or gets those of now when it is wrapped."""
    module = built("blocks")
    plain = torch.optim.SGD(module.parameters(), lr=0.1)
    model = smp.DistributedModel(module)
    train(model, batch(0, smp.dp_rank()))
    refused(smp.ConfigError, "from before", plain.step)
    wrapped = smp.DistributedOptimizer(plain)
    held = {id(one) for group in wrapped.param_groups for one in group["params"]}
    assert held == {id(one) for one in model.local_parameters()}
    train(model, batch(0, smp.dp_rank()))


def in_a_step() -> None:
    """An update in the code of a step is refused."""
    pair = Pair("blocks")

    @smp.step
    def updating(model: Any, inputs: torch.Tensor) -> None:
        model.backward(model(inputs).sum())
        pair.optimizer.step()

    refused(smp.FrameError, "outside the step function", lambda: updating(pair.model, batch(0, smp.dp_rank())))
    pair.run(2)


def too_many_live() -> None:
    """A stage of a pipeline with more parameters than may be whole is refused in the first step."""
    pair = Pair("blocks")
    refused(smp.ConfigError, "sdp_max_live_parameters", lambda: pair.train(0))


def assigned_data() -> None:
    """A tensor assigned to a shard's ``data``, which PyTorch ignores, is an error in the next step."""
    pair = Pair("blocks")
    pair.run(1)
    for parameter in pair.model.local_parameters():
        parameter.data.mul_(0.5)
    for parameter in pair.reference.module.parameters():
        parameter.data.mul_(0.5)
    pair.run(1, first=1)
    parameter = next(one for one in pair.model.local_parameters() if one.dim() > 1)
    parameter.data = parameter.data * 0.5
    smp.barrier()  # a rank that still gathers what it compares would learn of the refusal there
    refused(smp.ShardwrightError, "`data` of parameter", lambda: train(pair.model, batch(0, smp.dp_rank())))
