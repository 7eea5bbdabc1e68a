"""Checks that weights are whole: updated alike on all ranks, and not loaded in part. Else no step may run."""

from __future__ import annotations

import contextlib
import socket
import weakref
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch

from shardwright.data_parallel.shards import ParameterShards
from shardwright.errors import ConfigError, PartialUpdateError, RemoteError
from shardwright.job.runtime import Runtime, current_runtime
from shardwright.model.models import Models
from shardwright.model.sentinel import ReleasedParameter, is_sentinel
from shardwright.sharded_data_parallel.parameters import ShardedParameters
from shardwright.tensor_parallel.replaced import ReplacedParameters

_HINT = (
    "the weights of ranks may differ, so no step can run. Load weights on every rank (model.load_state_dict), with the "
    "optimizer's state that belongs to them (optimizer.load_state_dict); or call smp.resume_after_failure(error) on "
    "every rank to continue with the current weights"
)


_IN_PART_HINT = (
    "no step can run, and nothing be saved, before all of it is loaded: a checkpoint (smp.resume_from_checkpoint), or "
    "weights (model.load_state_dict) with the optimizer's state that belongs to them (optimizer.load_state_dict); or "
    "call smp.resume_after_failure(error) on every rank to continue with what is there"
)


class UpdateStatus(NamedTuple):
    """What a rank sends to the others at the end of a step, about the time since the last one.

    Attributes:
        updated: Whether an optimizer has updated weights of this rank; None if this rank has none to update.
        interrupted: Whether a signal arrived, so that part of the script may have been skipped.
        calls: The number of calls of ``step()`` of distributed optimizers, which must be the same on every rank; None
            from a rank that has no batches left.
        loaded: Whether the last ``load_state_dict()`` of a distributed optimizer has loaded all; None without one.
    """

    updated: bool | None
    interrupted: bool
    calls: int | None = 0
    loaded: bool | None = None


class Updates:
    """Monitors the optimizers of one rank's models."""

    def __init__(self, runtime: Runtime) -> None:
        """Start without any update."""
        self._runtime = runtime
        self._begun: dict[int, str] = {}
        self._known: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        self._updated = self._interrupted = False
        self._calls: int | None = 0
        self._loaded: bool | None = None
        #: Why no step may run; None if steps may run.
        self.refusal: str | None = None
        #: What a load that failed has left partly new and partly old, and why.
        self._in_part: dict[str, str] = {}

    def interrupted(self) -> None:
        """Record a signal, after which the script may continue differently than on other ranks."""
        self._interrupted = True

    def begins(self, optimizer: torch.optim.Optimizer) -> None:
        """Record that an optimizer's step begins.

        Raises:
            ConfigError: It is not distributed, and trains parameters whose gradients only their owners have, or it
                trains parameters of modules that tensor parallelism has replaced.
        """
        self._check_owners(optimizer)
        if self._trains(optimizer):
            self._begun[id(optimizer)] = type(optimizer).__name__

    def ends(self, optimizer: torch.optim.Optimizer) -> None:
        """Record that an optimizer's step has succeeded."""
        if self._trains(optimizer):
            self._begun.pop(id(optimizer), None)
            self._updated = True
            if self._runtime.step.running:
                self._interrupted = True  # called in a hook: undoing the step does not undo this update

    def begins_share(self, optimizer: torch.optim.Optimizer) -> None:
        """Record that a step begins which ends only when the other ranks' shares are here."""
        if self._trains(optimizer):
            self._begun[-id(optimizer)] = type(optimizer).__name__

    def ends_share(self, optimizer: torch.optim.Optimizer) -> None:
        """Record that the shares of all ranks are here."""
        self._begun.pop(-id(optimizer), None)

    def _check_owners(self, optimizer: torch.optim.Optimizer) -> None:
        self.refuse_replaced(optimizer)
        registry = self._runtime[ShardedParameters]
        trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if registry and any(registry.now(parameter) is not parameter for parameter in trained):
            raise ConfigError(
                f"{type(optimizer).__name__}.step() of an optimizer with parameters from before their model was "
                "sharded (sharded_data_parallel_degree), which nobody uses any more: wrap it, optimizer = "
                "smp.DistributedOptimizer(optimizer), or create it from model.parameters() afterwards"
            )
        shards = self._runtime[ParameterShards]
        if not shards or any(one is optimizer for one in self._runtime[Models].optimizers):
            return
        if any(shards.of(parameter) is not None for group in optimizer.param_groups for parameter in group["params"]):
            raise ConfigError(
                f"{type(optimizer).__name__}.step() of an optimizer that smp.DistributedOptimizer does not wrap: a "
                "smp.DistributedOptimizer trains its parameters too, so that with shard_optimizer_state each gradient "
                "is on one rank only. Wrap it, optimizer = smp.DistributedOptimizer(optimizer)"
            )

    def refuse_replaced(self, optimizer: torch.optim.Optimizer) -> None:
        """Check that an optimizer is not from before a model's modules were replaced for tensor parallelism.

        Raises:
            ConfigError: It trains parameters that no model uses any more.
        """
        placements = self._runtime[Models].placements
        used = (parameter for placement in placements for parameter in placement.module.parameters())
        self._runtime[ReplacedParameters].refuse(optimizer, used)

    def has_updated(self) -> None:
        """Record the end of a distributed optimizer's step, even if it had nothing to update on this rank."""
        self._updated = True
        if self._calls is not None:
            self._calls += 1

    def has_loaded_state(self, *, all_of_it: bool) -> None:
        """Record the end of a ``load_state_dict()`` of a distributed optimizer, which has loaded all or refused."""
        self._loaded = all_of_it

    def skip_updates(self) -> None:
        """Record that this rank has no batches left, and only takes part in the reductions of the others."""
        self._calls = None

    def _trains(self, optimizer: torch.optim.Optimizer) -> bool:
        placements = self._runtime[Models].placements
        if self._known.get(optimizer) == len(placements):
            return True
        own = {id(parameter) for placement in placements for parameter in placement.module.parameters()}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                placed = parameter.released_to if isinstance(parameter, ReleasedParameter) else parameter
                if is_sentinel(parameter) or id(placed) in own:
                    self._known[optimizer] = len(placements)
                    return True
        return False

    def check(self) -> None:
        """Raise if steps are refused: an update has failed on this rank, or ranks may differ since an earlier step."""
        self.check_whole("smp.step")
        if self._begun and self._runtime.place.launch.world_size > 1:  # alone, an update is whole or has raised
            name = next(iter(self._begun.values()))
            self.refuse(f"{name}.step() failed on rank {self._runtime.place.rank} on host {socket.gethostname()!r}")
            self._begun.clear()
        if self.refusal is not None:
            raise PartialUpdateError(self.refusal)

    def refuse(self, why: str, hint: str = _HINT) -> None:
        """Refuse all further steps, for this reason and with this hint on how to continue. The first reason is kept."""
        if self.refusal is None:
            self.refusal = f"{why}: {hint}"

    def loaded_in_part(self, what: str, error: BaseException) -> None:
        """Refuse steps and saves, on one rank too, since a load of ``what`` has failed and may have changed some of it.

        Args:
            what: ``"weights"``, or ``"the optimizer's state"``.
            error: What ended the load.
        """
        self._in_part.setdefault(what, f"{error}; {what} may have been loaded in part")

    @contextlib.contextmanager
    def loading(self, *what: str) -> Iterator[None]:
        """Load something in the block: if it raises, steps and saves are refused until all of it is loaded."""
        try:
            yield
        except BaseException as error:
            for each in what:
                self.loaded_in_part(each, error)
            raise
        self.loaded(*what)

    def loaded(self, *what: str) -> None:
        """Record that all of something was loaded; with the weights, ranks agree again."""
        for each in what:
            self._in_part.pop(each, None)
        if "weights" in what:
            self._agree()

    def check_whole(self, operation: str) -> None:
        """Raise if a load that failed midway has left weights, or the optimizer's state, partly new and partly old.

        Raises:
            PartialUpdateError: It has.
        """
        if self._in_part:
            raise PartialUpdateError(f"{operation}: {next(iter(self._in_part.values()))}: {_IN_PART_HINT}")

    def status(self) -> UpdateStatus:
        """Return the status that this rank sends to the others."""
        owns = any(placement.owned_parameters() for placement in self._runtime[Models].placements)
        return UpdateStatus(self._updated if owns else None, self._interrupted, self._calls, self._loaded)

    def compare(self, statuses: Mapping[int, UpdateStatus]) -> None:
        """Compare the statuses of all ranks of the job, at the end of a step without errors so far.

        All ranks raise :class:`PartialUpdateError` if some have updated their weights and others have not after a
        signal, if they have called ``step()`` of distributed optimizers different numbers of times, or if some have
        loaded an optimizer's state dict and others have refused theirs.
        """
        interrupted = [rank for rank, each in statuses.items() if each.interrupted]
        with_update = [rank for rank, each in statuses.items() if each.updated is True]
        without = [rank for rank, each in statuses.items() if each.updated is False]
        if interrupted and with_update and without:
            self.refuse(
                f"a signal interrupted ranks {interrupted}, and since the last step ranks {with_update} "
                f"have updated their weights and ranks {without} have not"
            )
            raise PartialUpdateError(self.refusal or "")
        by_calls: dict[int, list[int]] = {}
        for rank, each in statuses.items():
            if each.calls is not None:
                by_calls.setdefault(each.calls, []).append(rank)
        if len(by_calls) > 1:
            counts = " and ".join(f"ranks {ranks} {_times(calls)}" for calls, ranks in sorted(by_calls.items()))
            self.refuse(f"since the last step, step() of distributed optimizers was called by {counts}")
            raise PartialUpdateError(self.refusal or "")
        refusing = [rank for rank, each in statuses.items() if each.loaded is False]
        if refusing and (loading := [rank for rank, each in statuses.items() if each.loaded]):
            self.refuse(
                f"load_state_dict() of a distributed optimizer has loaded on ranks {loading}, and refused what it was "
                f"given on ranks {refusing}"
            )
            raise PartialUpdateError(self.refusal or "")
        self._updated = self._interrupted = False
        self._calls, self._loaded = 0, None

    def forget(self) -> None:
        """Reset the status: weights are equal and whole again, or are to be treated as if they were."""
        self._in_part.clear()
        self._loaded = None
        self._agree()

    def _agree(self) -> None:
        self._begun.clear()
        self._updated = self._interrupted = False
        self._calls = 0
        self.refusal = None


def _times(number: int) -> str:
    return "not at all" if number == 0 else "once" if number == 1 else f"{number} times"


def resume_after_failure(error: BaseException) -> None:
    """Allow steps again after only some ranks have updated their weights, or a load has failed midway.

    Every rank must call this function. To make the weights equal instead, call ``model.load_state_dict``, which also
    allows steps again.

    Args:
        error: The error of the refused step: a ``PartialUpdateError``, or a ``RemoteError`` that carries one.

    Raises:
        ConfigError: It is another error.
    """
    kind = error.kind if isinstance(error, RemoteError) else type(error).__qualname__
    if kind != PartialUpdateError.__qualname__:
        raise ConfigError(
            f"smp.resume_after_failure was given {kind}; it takes the error of a step that was refused because weights "
            "may differ: a smp.PartialUpdateError, or the smp.RemoteError that carries one"
        )
    runtime = current_runtime()
    runtime.logger.warning("rank %d continues although weights may differ: %s", runtime.place.rank, error)
    runtime[Updates].forget()
