"""Cases of what is refused, by name."""

from __future__ import annotations

import math
from typing import Any

import pytest
import shardwright as smp
import torch
from torch import nn

from tests.half_precision.cases import case, divided, is_float16, static_scale
from tests.half_precision.model import batch, loss_of, made, train


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
    with pytest.raises(smp.ConfigError, match=r"smp.keep_float32 came too late for this LayerNorm"):
        smp.keep_float32(model.module.norm)
    with pytest.raises(smp.ConfigError, match=r"smp.verify in a job with fp16 or bf16"):
        smp.verify(train, model, batch(0, 0))

    optimizer = wrap(sgd(), static_loss_scale=static_scale())
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
        with pytest.raises(smp.ConfigError, match=r"multiplied by the loss scale, 64; .*clip_master_grads"):
            smp.clip_grad_norm_(model.parameters(), 1.0)
        with pytest.raises(smp.ConfigError, match=r"multiplied by the loss scale, 64"):
            nn.utils.clip_grad_norm_(list(model.local_parameters()), 1.0)
        with pytest.raises(smp.ConfigError, match=r"clip_grad_value_ in a job with fp16"):
            nn.utils.clip_grad_value_(list(model.local_parameters()), 1.0)
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
