"""Whether all ranks have updated their weights alike; no step may run where some may have and others not."""

from __future__ import annotations

import socket
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch

from shardwright.errors import ConfigError, PartialUpdateError, RemoteError
from shardwright.job.runtime import current_runtime
from shardwright.model.models import Models
from shardwright.model.sentinel import ReleasedParameter, is_sentinel

if TYPE_CHECKING:
    from shardwright.job.runtime import Runtime

_HINT = (
    "the weights of ranks may differ, and no step runs. Load weights on every rank (model.load_state_dict), with the "
    "optimizer's state that belongs to them (optimizer.load_state_dict); or call smp.resume_after_failure(error) on "
    "every rank to go on as they are"
)


class UpdateStatus(NamedTuple):
    """What ranks tell each other at the end of a step, of the time since the last one.

    Attributes:
        updated: Whether an optimizer has updated weights of this rank; None where it has none to update.
        interrupted: Whether a signal came, so that part of the script may have been left out.
        calls: How often ``step()`` of distributed optimizers was called, which every rank has to call; None from a rank
            that has no batches left.
    """

    updated: bool | None
    interrupted: bool
    calls: int | None = 0


class Updates:
    """Watches optimizers of one rank's models."""

    def __init__(self, runtime: Runtime) -> None:
        """Nothing has happened."""
        self._runtime = runtime
        self._begun: dict[int, str] = {}
        self._known: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        self._updated = self._interrupted = False
        self._calls: int | None = 0
        #: Why no step may run; None where one may.
        self.refusal: str | None = None

    def interrupted(self) -> None:
        """A signal came, after which the script may go on elsewhere than on other ranks."""
        self._interrupted = True

    def begins(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer's step begins."""
        if self._trains(optimizer):
            self._begun[id(optimizer)] = type(optimizer).__name__

    def ends(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer's step has ended well."""
        if self._trains(optimizer):
            self._begun.pop(id(optimizer), None)
            self._updated = True
            if self._runtime.step.running:
                self._interrupted = True  # in a hook: where the step is undone, this is not

    def has_updated(self) -> None:
        """A distributed optimizer's step has ended, which may have had nothing to update here."""
        self._updated = True
        if self._calls is not None:
            self._calls += 1

    def skip_updates(self) -> None:
        """This rank has no batches left, and only takes part in the others' reductions."""
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
        """Before a step.

        Raises:
            PartialUpdateError: An optimizer's step has begun on this rank and not ended, or ranks differ since.
        """
        if self._runtime.place.launch.world_size == 1:
            return
        if self._begun:
            name = next(iter(self._begun.values()))
            self.refuse(f"{name}.step() failed on rank {self._runtime.place.rank} on host {socket.gethostname()!r}")
            self._begun.clear()
        if self.refusal is not None:
            raise PartialUpdateError(self.refusal)

    def refuse(self, why: str, hint: str = _HINT) -> None:
        """Let no step run, and say what lets it run again."""
        if self.refusal is None:
            self.refusal = f"{why}: {hint}"

    def status(self) -> UpdateStatus:
        """What this rank tells the others."""
        owns = any(placement.owned_parameters() for placement in self._runtime[Models].placements)
        return UpdateStatus(self._updated if owns else None, self._interrupted, self._calls)

    def compare(self, statuses: Mapping[int, UpdateStatus]) -> None:
        """Compare what all ranks of the job have sent, at the end of a step that is well so far.

        Raises:
            PartialUpdateError: A signal was caught between the steps, and only some ranks have updated their weights
                since; or ranks have called ``step()`` of distributed optimizers unequally often. All ranks raise it.
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
        self._updated = self._interrupted = False
        self._calls = 0

    def forget(self) -> None:
        """Weights are equal again, or are to count as equal."""
        self._begun.clear()
        self._updated = self._interrupted = False
        self._calls = 0
        self.refusal = None


def _times(number: int) -> str:
    return "not at all" if number == 0 else "once" if number == 1 else f"{number} times"


def resume_after_failure(error: BaseException) -> None:
    """Let steps run again after weights were updated on some ranks only, with the weights as they are.

    Every rank calls it. Weights are made equal by ``model.load_state_dict``, which lets steps run as well.

    Args:
        error: What the refused step raised: a ``PartialUpdateError``, or a ``RemoteError`` that carries one.

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
    runtime.logger.warning("rank %d goes on, although weights may differ: %s", runtime.place.rank, error)
    runtime[Updates].forget()
