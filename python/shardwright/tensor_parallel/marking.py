"""Saying which modules are divided: ``smp.tensor_parallelism`` and its relatives (paper, appendix E.2)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shardwright.creation import watch_creation
from shardwright.delayed.creation import delay_param_initialization
from shardwright.errors import ConfigError
from shardwright.job.runtime import find_runtime
from shardwright.job.wrapped import WrappedModels

#: Kept in the module itself, so that a mark goes with copies of it and away with it.
_MARK = "_smp_tensor_parallelism"


@dataclass(frozen=True)
class TensorParallelMark:
    """What was said of a module.

    Attributes:
        enabled: Whether it is to be divided, where that is possible.
        options: Arguments for its substitute, by their names there; they win over those of the module.
    """

    enabled: bool
    options: Mapping[str, Any] = field(default_factory=dict)


_OPEN: ContextVar[tuple[TensorParallelMark, ...]] = ContextVar("shardwright_tensor_parallelism", default=())


def _note_mark(module: nn.Module) -> None:
    marks = _OPEN.get()
    if marks:
        module.__dict__[_MARK] = marks[-1]


def mark_of(module: nn.Module) -> TensorParallelMark | None:
    """What was said of a module last; None if nothing."""
    return module.__dict__.get(_MARK)


@contextlib.contextmanager
def tensor_parallelism(enabled: bool = True, **kwargs: Any) -> Iterator[None]:
    """Mark the modules created inside: ``smp.DistributedModel`` divides them where it can (paper, appendix E.2).

    The innermost context wins, with its own arguments alone. Only modules created on the calling thread are marked;
    copies of them are marked as well.

    Args:
        enabled: False leaves what is created inside whole.
        **kwargs: Arguments for the distributed modules that take the marked ones' places, by their names there. They
            win over those that the module itself was made with; one that a class does not take is left out for it.

    Raises:
        ConfigError: ``enabled`` is no bool.
    """
    mark = TensorParallelMark(_checked(enabled, "smp.tensor_parallelism"), dict(kwargs))
    token = _OPEN.set((*_OPEN.get(), mark))
    try:
        with watch_creation(_note_mark):
            yield
    finally:
        _OPEN.reset(token)


def set_tensor_parallelism(module: nn.Module, enabled: bool = True, **kwargs: Any) -> None:
    """Mark a module and all in it, or take their marks away (paper, appendix E.2).

    What is said last counts, whether by this or by :func:`tensor_parallelism`. Call it on every rank alike, before
    ``smp.DistributedModel``.

    Args:
        module: A module of the model to be, or the model itself.
        enabled: False leaves it and all in it whole.
        **kwargs: As for :func:`tensor_parallelism`.

    Raises:
        ConfigError: ``enabled`` is no bool, or the module belongs to a ``smp.DistributedModel`` already.
    """
    mark = TensorParallelMark(_checked(enabled, "smp.set_tensor_parallelism"), dict(kwargs))
    if not isinstance(module, nn.Module):
        raise ConfigError(f"smp.set_tensor_parallelism was given a {type(module).__name__}; allowed: an nn.Module")
    runtime = find_runtime()
    for model in runtime[WrappedModels].alive if runtime is not None else ():
        if any(part is module for part in model.modules()):
            raise ConfigError(
                f"smp.set_tensor_parallelism came too late for this {type(module).__name__}: modules are replaced when "
                "smp.DistributedModel is made; call it before"
            )
    for part in module.modules():
        part.__dict__[_MARK] = mark


@contextlib.contextmanager
def model_creation(
    tensor_parallelism: bool = False, dtype: torch.dtype | None = None, **tp_config: Any
) -> Iterator[None]:
    """Create a model inside: marked for tensor parallelism or not, in a dtype of its own.

    It does what :func:`tensor_parallelism` does, sets torch's default dtype meanwhile, and with the configuration key
    ``delayed_parameter_initialization`` what ``smp.delay_param_initialization`` does.

    Args:
        tensor_parallelism: Whether the modules created inside are marked.
        dtype: Of floating-point parameters created inside; None leaves torch's default dtype as it is.
        **tp_config: As ``kwargs`` of :func:`tensor_parallelism`.

    Raises:
        ConfigError: ``tensor_parallelism`` is no bool, or ``dtype`` no floating-point dtype.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ConfigError(f"smp.model_creation: dtype is {dtype!r}; allowed: None and torch's floating-point dtypes")
    before = torch.get_default_dtype()
    runtime = find_runtime()
    delayed = runtime is not None and runtime.place.cfg.delayed_parameter_initialization
    delaying = delay_param_initialization() if delayed else contextlib.nullcontext()
    with _context(tensor_parallelism, **tp_config), delaying:
        if dtype is not None:
            torch.set_default_dtype(dtype)
        try:
            yield
        finally:
            if dtype is not None:
                torch.set_default_dtype(before)


#: Under another name for functions with an argument of that name.
_context = tensor_parallelism


def _checked(enabled: object, function: str) -> bool:
    if not isinstance(enabled, bool):
        raise ConfigError(f"{function}: enabled is {enabled!r}; allowed: True and False")
    return enabled
