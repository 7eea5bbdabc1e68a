"""What fails or is refused: a function for each case, which the ranks of a running job call."""

from __future__ import annotations

import copy
import math
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import shardwright as smp
import torch
from shardwright.data_parallel.collectives import Collectives
from shardwright.optimizer.sharding import gather
from torch import nn

from .cases import Pair, close, train
from .problems import batch, built, loss_of


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
    lamb = smp.optimizers.FusedLamb(model.parameters())
    refused(smp.ConfigError, "FusedLamb exchanges norms", lambda: smp.DistributedOptimizer(lamb))
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


class Late:
    """A collective whose end is noticed late."""

    def __init__(self, work: Any) -> None:
        self._work, self._noticed = work, time.monotonic() + 0.3

    def is_completed(self) -> bool:
        return time.monotonic() > self._noticed and bool(self._work.is_completed())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def failure_after_others_gathered() -> None:
    """A step that fails at once on a rank does not end the update in which another still receives parameters."""
    pair = Pair("odd", "adamw")
    pair.run(2)
    pair.zero_grad()
    pair.train(2)
    original, begun = Collectives.start_broadcast, [0]

    def start_broadcast(self: Collectives, tensor: torch.Tensor, source: int) -> Any:
        begun[0] += 1
        work = original(self, tensor, source)
        if smp.dp_rank() == 0:
            self.works[-1] = work = Late(work)
        return work

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Collectives, "start_broadcast", start_broadcast)
        pair.step()
    assert begun[0] > 0
    refused(ValueError, "on purpose", lambda: failing(pair.model, batch(0, smp.dp_rank()), smp.dp_rank() == 1))
    pair.check("after the update")
    pair.run(2, first=3)


def interrupted_gather(rank: int) -> None:
    """A gather that fails on one rank while messages are under way leaves nothing that later collectives meet."""
    pair = Pair("odd", "adamw")
    pair.run(2)
    weights, state = copy.deepcopy(pair.model.state_dict()), pair.optimizer.state_dict()
    pair.zero_grad()
    pair.train(2)
    original, begun = Collectives.start_broadcast, [0]

    def start_broadcast(self: Collectives, tensor: torch.Tensor, source: int) -> Any:
        begun[0] += 1
        if begun[0] == 2 and smp.rank() == rank:
            raise OSError("on purpose")
        return original(self, tensor, source)

    Collectives.start_broadcast = start_broadcast  # type: ignore[method-assign]
    chunk_bytes, gather.CHUNK_BYTES = gather.CHUNK_BYTES, 200

    def update() -> None:
        pair.optimizer.step()
        train(pair.model, batch(2, smp.dp_rank()))  # where the others' messages do not need this rank

    try:
        with pytest.raises((OSError, smp.RemoteError, smp.PartialUpdateError)):
            update()
    finally:
        Collectives.start_broadcast = original  # type: ignore[method-assign]
        gather.CHUNK_BYTES = chunk_bytes
    with pytest.raises((smp.PartialUpdateError, smp.RemoteError)):
        train(pair.model, batch(2, smp.dp_rank()))
    pair.model.load_state_dict(weights)
    pair.optimizer.load_state_dict(state)
    pair.zero_grad()
    pair.run(3, first=2)


def undone_reduction() -> None:
    """A step that fails on one rank while the others reduce is undone, with gradients of earlier steps kept."""
    pair = Pair("large", "adamw", bucket_cap_mb=1e-3)
    pair.run(3)
    pair.zero_grad()
    pair.train(3)
    pair.check_gradients("before")
    _, parameter = next(iter(pair.model.local_named_parameters()))
    for repeat in range(2):
        handle = parameter.register_hook(fail_in_hook) if smp.dp_rank() == 1 else None
        with pytest.raises((OSError, smp.RemoteError)):
            train(pair.model, batch(4, smp.dp_rank()))
        if handle is not None:
            handle.remove()
        pair.check_gradients(f"after failure {repeat}")
    pair.train(4)
    pair.check_gradients("after the step")
    pair.step()
    pair.check("after the update")
    pair.run(2, first=5)


def fail_in_hook(_: torch.Tensor) -> None:
    raise OSError("on purpose")
