"""State that an optimizer gets once the models that it trains are divided."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch.optim import Optimizer

from shardwright.errors import ShardwrightError
from shardwright.job.runtime import find_runtime
from shardwright.model.updates import Updates
from shardwright.optimizer.offloading import StateStorage

P = ParamSpec("P")
T = TypeVar("T")
_NOT_OPTIONS = ("params", "param_names")
_STATE = "the optimizer's state"


def loads_state(method: Callable[P, T]) -> Callable[P, T]:
    """Refuse steps and saves after a method that loads state has failed midway, until all of it is loaded.

    A state dict that does not fit is mostly refused before anything is written, and then nothing has happened.
    """

    @functools.wraps(method)
    def load(*args: P.args, **kwargs: P.kwargs) -> T:
        if (runtime := find_runtime()) is None:
            return method(*args, **kwargs)
        optimizer: Any = args[0]
        before = _contents(optimizer)
        try:
            result = method(*args, **kwargs)
        except BaseException as error:
            # State that is kept elsewhere is written there.
            if runtime.find(StateStorage) is not None or not _are_same(before, _contents(optimizer)):
                runtime[Updates].loaded_in_part(_STATE, error)
            raise
        runtime[Updates].loaded(_STATE)
        return result

    return load


def tells_of_loading(method: Callable[P, T]) -> Callable[P, T]:
    """Let other ranks hear, at the end of the next step, whether a method has loaded a state dict or refused it."""

    @functools.wraps(method)
    def load(*args: P.args, **kwargs: P.kwargs) -> T:
        has_loaded = False
        try:
            result = method(*args, **kwargs)
            has_loaded = True
        finally:
            if (runtime := find_runtime()) is not None:
                runtime[Updates].has_loaded_state(all_of_it=has_loaded)
        return result

    return load


def _contents(optimizer: Optimizer) -> list[tuple[Any, Any]]:
    """Return all that an optimizer holds, with the versions of its tensors."""
    groups = [value for group in optimizer.param_groups for key, value in group.items() if key != "params"]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = [value for entry in optimizer.state.values() for value in entry.values()]
    return [(value, _version(value)) for value in (*groups, *parameters, *state)]


def _version(value: Any) -> int | None:
    return value._version if isinstance(value, torch.Tensor) and not value.is_inference() else None


def _are_same(one: Sequence[tuple[Any, Any]], other: Sequence[tuple[Any, Any]]) -> bool:
    return len(one) == len(other) and all(
        value is another and version == then for (value, version), (another, then) in zip(one, other, strict=True)
    )


class AwaitedState(Optimizer):
    """An optimizer whose state may come later. The options of its groups are loaded at once, as the script expects."""

    _pending: dict[str, Any] | None = None
    _awaited: object = None

    def awaits(self, load: object) -> bool:
        """Whether the state is to come from this load, the last one."""
        return self._awaited is load

    def wait_for(self, load: object, options: Iterable[Mapping[str, Any]]) -> None:
        """Take the options of groups, and expect state from a load, in place of earlier ones.

        Args:
            load: Calls :meth:`has_state` when it has set the state; its ``str`` says in errors what it is.
            options: Those of each group; none to leave all of them.
        """
        self._pending, self._awaited = None, load
        self._take_options(options)

    def has_state(self) -> None:
        """Expect no state any more."""
        self._pending = self._awaited = None

    def check_has_state(self, operation: str) -> None:
        """Raise if the state is still to come, or a load of it or of weights has failed midway."""
        if (runtime := find_runtime()) is not None:
            runtime[Updates].check_whole(operation)
        awaited = "the state dict that was loaded" if self._pending is not None else self._awaited
        if awaited is not None:
            raise ShardwrightError(
                f"{operation} before the first step: {type(self).__name__} gets its state, that of {awaited}, in the "
                "first step, when the model is divided; save and read it after that step"
            )

    def _wait_for_state_dict(self, whole: dict[str, Any]) -> None:
        """Expect the state of a state dict of the whole model."""
        self.wait_for(None, whole["param_groups"])
        self._pending = whole

    def _pending_state_dict(self) -> dict[str, Any] | None:
        """The state dict that is to be loaded, with options as the script has set them since; None without one."""
        if self._pending is None:
            return None
        groups = [
            {**group, **{key: value for key, value in own.items() if key not in _NOT_OPTIONS}}
            for group, own in zip(self._pending["param_groups"], self.param_groups, strict=True)
        ]
        return {**self._pending, "param_groups": groups}

    def _take_options(self, options: Iterable[Mapping[str, Any]]) -> None:
        for group, given in zip(self.param_groups, options, strict=False):
            group.update({key: value for key, value in given.items() if key not in _NOT_OPTIONS})
