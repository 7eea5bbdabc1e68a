"""The step of an optimizer whose state is sharded: each rank updates its share, then all get all parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shardwright.data_parallel.collectives import Collectives, ReplicaCollectives
from shardwright.data_parallel.divisor import check_digests
from shardwright.data_parallel.shards import ParameterShards
from shardwright.errors import ConfigError, FrameError, PartialUpdateError, RemoteError
from shardwright.job.objects import gathered, tell_gathering
from shardwright.job.ranks import DP_GROUP
from shardwright.job.runtime import Runtime
from shardwright.model.models import Models
from shardwright.model.updates import Updates
from shardwright.optimizer.half_precision import HalfPrecision
from shardwright.optimizer.sharding.elementwise import changes_without_gradient
from shardwright.optimizer.sharding.gather import gather_parameters
from shardwright.optimizer.sharding.share import Share

Update = Callable[[Callable[[], Any] | None], Any]


def sharded_step(
    runtime: Runtime,
    optimizer: Optimizer,
    share: Share,
    closure: Callable[[], Any] | None,
    update: Update,
) -> Any:
    """Update this rank's share, and exchange updated parameters. All ranks of DP_GROUP must call this.

    Args:
        runtime: The rank.
        optimizer: The optimizer.
        share: Its share.
        closure: Computes gradients, or None; it is called once.
        update: The wrapped optimizer's ``step``.

    Returns:
        The result of the closure.

    Raises:
        PartialUpdateError: The update, or the exchange after it, has failed on another rank.
        FrameError: Called in a step.
        ConfigError: The optimizer calls its closure several times.
    """
    name = f"{type(optimizer).__name__}.step"
    if runtime.step.running:
        raise FrameError(
            f"{name} was called in step {runtime.step.number}, with shard_optimizer_state, which sends updated "
            "parameters to other ranks: step optimizers outside the step function, and not in hooks"
        )
    operation = f"{name} (smp.DistributedOptimizer {_number(runtime, optimizer)})"
    updates, digests = runtime[Updates], runtime[ParameterShards].digests
    over_dp, over_rdp = share.divided(optimizer)
    if isinstance(optimizer, HalfPrecision):
        optimizer.refuse_closure(closure)
    try:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        share.check(optimizer)
        always = changes_without_gradient(optimizer)
        changed = [_changed(parameters, share, always) for parameters in (over_dp, over_rdp)]
        updates.begins_share(optimizer)
        with share.updating(optimizer):
            update(None if closure is None else Called(loss, name))
        if isinstance(optimizer, HalfPrecision) and optimizer.overflow:
            changed = [bytes(len(parameters)) for parameters in (over_dp, over_rdp)]
    except BaseException:
        tell_gathering(operation, None, DP_GROUP)
        raise
    said = dict(zip(runtime.place.dp_ranks, gathered(operation, (digests, *changed), DP_GROUP), strict=True))
    _check_said(runtime, name, said)
    of_replicas = runtime[ReplicaCollectives]
    end = f"the end of {operation}"
    try:
        for collectives, parameters, which in ((of_replicas.dp, over_dp, 1), (of_replicas.rdp, over_rdp, 2)):
            if parameters:
                assert collectives is not None, "they are divided over several ranks"
                _gather(collectives, parameters, share, {rank: said[rank][which] for rank in collectives.ranks})
    except BaseException:
        tell_gathering(end, None, DP_GROUP)
        raise
    updates.ends_share(optimizer)
    # A rank that went on while others still receive would end their waits if its next step failed. If it ends this one,
    # everything is here and the failure is that of the next step, which raises it.
    with contextlib.suppress(RemoteError):
        ended = gathered(end, True, DP_GROUP)
        _check_failed(runtime, name, dict(zip(runtime.place.dp_ranks, ended, strict=True)))
    return loss


def _number(runtime: Runtime, optimizer: Optimizer) -> int | None:
    """The number of the optimizer in order of creation, which is the same on all ranks."""
    return next((number for number, one in enumerate(runtime[Models].optimizers) if one is optimizer), None)


class Called:
    """A closure that has been called already, before the groups held this rank's share only."""

    def __init__(self, loss: Any, name: str) -> None:
        """Have its result, and the name of the ``step`` that may call it once."""
        self._loss = loss
        self._name = name
        self._is_called = False

    def __call__(self) -> Any:
        """Return the result; raise :class:`ConfigError` the second time."""
        if self._is_called:
            raise ConfigError(
                f"{self._name} calls its closure several times, between which the ranks have different weights: "
                "an optimizer that does so cannot be used with shard_optimizer_state or sharded_data_parallel_degree"
            )
        self._is_called = True
        return self._loss


def _changed(parameters: list[nn.Parameter], share: Share, always: bool) -> bytes:
    """Whether this rank updates each of these parameters, as one byte; perhaps also those without a gradient."""
    return bytes(share.is_here(one) and (always or one.grad is not None) for one in parameters)


def _check_said(runtime: Runtime, name: str, said: dict[int, Any]) -> None:
    _check_failed(runtime, name, said)
    check_digests(runtime, {rank: each[0] for rank, each in said.items()})


def _check_failed(runtime: Runtime, name: str, said: dict[int, Any]) -> None:
    failed = [rank for rank, each in said.items() if each is None]
    if failed:
        runtime[Updates].refuse(f"{name}() failed on ranks {failed}")
        raise PartialUpdateError(runtime[Updates].refusal or "")


def _gather(collectives: Collectives, parameters: list[nn.Parameter], share: Share, changed: dict[int, bytes]) -> None:
    of_group = []
    for index, parameter in enumerate(parameters):
        slices = share.slices(parameter) or ()
        owned = tuple(one for one in slices if one.owner in changed and changed[one.owner][index])
        if owned:
            of_group.append((parameter, owned))
    gather_parameters(collectives, of_group)
