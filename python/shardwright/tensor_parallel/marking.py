"""Mark modules for tensor parallelism: ``smp.tensor_parallelism`` and related functions (paper, appendix E.2)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shardwright.creation import CreationMark, default_dtype
from shardwright.delayed.creation import delay_param_initialization
from shardwright.errors import ConfigError
from shardwright.job.runtime import find_runtime
from shardwright.job.wrapped import WrappedModels
from shardwright.transformers_models.initialization import initialize_where_left

#: The mark is an attribute of the module, so that copies of the module have it too.
_MARK = "_smp_tensor_parallelism"


@dataclass(frozen=True)
class TensorParallelMark:
    """The mark of a module.

    Attributes:
        enabled: Whether the module is divided if possible.
        options: Keyword arguments for its substitute, which override those of the module.
    """

    enabled: bool
    options: Mapping[str, Any] = field(default_factory=dict)


class _Created(CreationMark[TensorParallelMark]):
    """The mark of modules that are created in a context."""

    def mark(self, module: nn.Module, value: TensorParallelMark) -> None:
        """Mark a module; what is to be divided has weights, also where the script leaves them to the library."""
        super().mark(module, value)
        if value.enabled:
            initialize_where_left(module)


_CREATED = _Created(_MARK)


def mark_of(module: nn.Module) -> TensorParallelMark | None:
    """Return the current mark of a module; None if it has none."""
    return module.__dict__.get(_MARK)


@contextlib.contextmanager
def tensor_parallelism(enabled: bool = True, **kwargs: Any) -> Iterator[None]:
    """Mark the modules created in the context; ``smp.DistributedModel`` divides them if it can (paper, appendix E.2).

    The innermost context applies, with its own arguments only. Only modules created on the calling thread are marked;
    copies of them are marked as well. Where a script has replaced ``PreTrainedModel.init_weights`` of ``transformers``
    by a function that does nothing, as those for the original library do, models created in the context are
    initialized and tied all the same.

    Args:
        enabled: False leaves the modules created in the context undivided.
        **kwargs: Keyword arguments for the distributed modules that replace the marked ones. They override the
            arguments that the module itself was created with; arguments that a class does not accept are ignored.
    """
    with _CREATED.within(TensorParallelMark(_checked(enabled, "smp.tensor_parallelism"), dict(kwargs))):
        yield


def set_tensor_parallelism(module: nn.Module, enabled: bool = True, **kwargs: Any) -> None:
    """Mark a module and its submodules for tensor parallelism, or not (paper, appendix E.2).

    The last mark counts, whether set by this function or by :func:`tensor_parallelism`. Call it in the same way on
    every rank, before ``smp.DistributedModel``.

    Args:
        module: The future model or a module of it.
        enabled: False leaves the module and its submodules undivided.
        **kwargs: As for :func:`tensor_parallelism`.

    Raises:
        ConfigError: ``enabled`` is not a bool, or the module belongs to a ``smp.DistributedModel`` already.
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
    """Context manager for creating a model: mark its modules for tensor parallelism or not, and set the dtype.

    It enters :func:`tensor_parallelism`, sets torch's default dtype and, with the configuration key
    ``delayed_parameter_initialization``, enters ``smp.delay_param_initialization``.

    Args:
        tensor_parallelism: Whether the modules created in the context are marked.
        dtype: The dtype of floating-point parameters created in the context; None keeps torch's default dtype.
        **tp_config: As ``kwargs`` of :func:`tensor_parallelism`.

    Raises:
        ConfigError: ``tensor_parallelism`` is not a bool, or ``dtype`` is not a floating-point dtype.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ConfigError(f"smp.model_creation: dtype is {dtype!r}; allowed: None and torch's floating-point dtypes")
    runtime = find_runtime()
    delayed = runtime is not None and runtime.place.cfg.delayed_parameter_initialization
    delaying = delay_param_initialization() if delayed else contextlib.nullcontext()
    with _context(tensor_parallelism, **tp_config), delaying, default_dtype(dtype):
        yield


#: An alias for functions with an argument named ``tensor_parallelism``.
_context = tensor_parallelism


def _checked(enabled: object, function: str) -> bool:
    if not isinstance(enabled, bool):
        raise ConfigError(f"{function}: enabled is {enabled!r}; allowed: True and False")
    return enabled
