"""``smp.DistributedOptimizer``: an optimizer that holds only the parameters of its rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from shardwright.errors import ConfigError
from shardwright.half_precision import half_dtype
from shardwright.half_precision.loss_scaler import scaler_of
from shardwright.job.ranks import PP_GROUP
from shardwright.job.runtime import find_runtime
from shardwright.model.gather import gather_over, on_cpu
from shardwright.model.models import Models
from shardwright.model.sentinel import ReleasedParameter, is_sentinel
from shardwright.model.updates import Updates
from shardwright.optimizer.half_precision import HalfPrecision, without_half_precision
from shardwright.optimizer.layout import PARTIAL_KEY, GroupLayout, merged, to_global, to_local

if TYPE_CHECKING:
    from shardwright.model.distributed import DistributedModel

_CLASSES: dict[tuple[type[Optimizer], bool], type[DistributedOptimizer]] = {}


class _Wrapping(type):
    """Makes a call of `DistributedOptimizer` wrap an optimizer; its subclasses are constructed as usual."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls is DistributedOptimizer:
            return _wrap(*args, **kwargs)
        return super().__call__(*args, **kwargs)


class DistributedOptimizer(Optimizer, metaclass=_Wrapping):
    """Makes an optimizer work on a partitioned model.

    ``smp.DistributedOptimizer(optimizer)`` returns the same object: it remains an instance of its class, and its
    parameter groups keep their order and settings, so learning-rate schedulers work as before. When the model is
    partitioned, parameters and state of other ranks are removed; a group may become empty. The optimizer can also be
    created after the model was partitioned, from ``model.parameters()``.

    The optimizer must treat parameters independently of each other. ``torch.optim.LBFGS``, which needs dot products
    over all parameters, is rejected with several pipeline ranks.

    Args:
        optimizer: The optimizer, created from the parameters of the whole model, in the same way on every rank.
        static_loss_scale: In a job with ``fp16``, what losses are multiplied by. Otherwise 1.0 or None.
        dynamic_loss_scale: In a job with ``fp16``, let the loss scale shrink when gradients overflow and grow when they
            do not. Otherwise False.
        dynamic_loss_args: The settings of the dynamic loss scale that differ from the defaults: ``init_scale`` (2**32),
            ``scale_factor`` (2), ``scale_window`` (1000), ``min_scale`` (1), ``delayed_shift`` (1) and
            ``consecutive_hysteresis`` (False). Keyword arguments with these names are added to them.

    With ``fp16`` or ``bf16`` the optimizer also has the methods of ``HalfPrecision``, such as ``clip_master_grads``.

    Raises:
        ConfigError: An argument is not allowed.
    """

    _layout: list[GroupLayout] | None = None
    _pending: dict[str, Any] | None = None

    @property
    def has_masters(self) -> bool:
        """Whether it updates master weights in place of parameters."""
        return isinstance(self, HalfPrecision)

    def trains(self, model: DistributedModel) -> bool:
        """Whether this optimizer trains parameters of ``model``."""
        own = {id(parameter) for parameter in model.parameters()}
        return any(id(_placed(parameter)) in own for group in self._groups() for parameter in group.parameters)

    def localise(self, model: DistributedModel | None = None) -> None:
        """Remove parameters and state that other ranks own, after ``model`` was partitioned.

        Args:
            model: The model; None for all models.
        """
        if model is not None and not self.trains(model):
            return
        layout = self._layout = self._groups()
        for group, whole in zip(self.param_groups, layout, strict=True):
            whole.keep_local(group)
        for key in [key for key in self.state if is_sentinel(key)]:
            del self.state[key]
        if self._pending is not None and self._is_settled(model):
            pending, self._pending = self._pending, None
            super().load_state_dict(to_local(pending, layout))

    def _groups(self) -> list[GroupLayout]:
        return [GroupLayout.of(group) for group in self.param_groups] if self._layout is None else self._layout

    def _is_settled(self, dividing: DistributedModel | None) -> bool:
        """Whether all models that this optimizer trains are partitioned, or are being partitioned."""
        runtime = find_runtime()
        return runtime is None or all(
            model is dividing or model.placement.partitioned or not self.trains(model)
            for model in runtime[Models].alive
        )

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters of this rank. All ranks must call this equally often.

        Args:
            closure: As for the wrapped optimizer's ``step``.

        Returns:
            The result of the closure, if there is one.
        """
        loss = None
        if any(group["params"] for group in self.param_groups) or getattr(self, "steps_on_all_ranks", False):
            loss = super().step(closure) if closure is not None else super().step()
        elif closure is not None:  # some optimizers cannot step without any parameter, which a stage may be
            with torch.enable_grad():
                loss = closure()
        if (runtime := find_runtime()) is not None:
            runtime[Updates].has_updated()
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group; if the model is partitioned, the group keeps only the parameters of this rank."""
        super().add_param_group(param_group)
        if self._layout is not None:
            group = self.param_groups[-1]
            whole = GroupLayout.of(group)
            self._layout.append(whole)
            whole.keep_local(group)

    def local_state_dict(self, gather_if_shard: bool = True) -> dict[str, Any]:
        """Return this rank's part of the state, without communication.

        Args:
            gather_if_shard: Has no effect; sharded optimizer state is not supported yet.

        Returns:
            A dict in the format of :meth:`state_dict`, marked by the key ``_smp_is_partial``. Parameters are numbered
            as in the whole model, and ``param_groups`` lists all of them.
        """
        return {**to_global(super().state_dict(), self._groups()), PARTIAL_KEY: True}

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer state of the whole model, on the CPU. All ranks of the pipeline must call this.

        Returns:
            A dict in the format of the wrapped optimizer. Before the model is partitioned, and with one pipeline rank,
            nothing is gathered or moved.

        Raises:
            ConfigError: On every rank, if the optimizer trains modules that are divided over tensor-parallel ranks.
        """
        self._refuse_sharded("state_dict()")
        if self._pending is not None:
            return dict(self._pending)
        if self._layout is None:
            return super().state_dict()
        return merged(self._gather(on_cpu(self.local_state_dict())))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict. If the model is not partitioned yet, it is loaded when that happens.

        Args:
            state_dict: A whole state dict, or the result of :meth:`local_state_dict`. Partial state dicts are merged
                over the ranks of the pipeline, which must all call this.

        Raises:
            ValueError: The parameter groups differ from those of this optimizer.
            ConfigError: On every rank, if the state dict is a whole one and the optimizer trains modules that are
                divided over tensor-parallel ranks.
        """
        whole = dict(state_dict) if self.has_masters else without_half_precision(state_dict)
        if not whole.get(PARTIAL_KEY, False):
            self._refuse_sharded("load_state_dict() of a whole state dict")
        if whole.pop(PARTIAL_KEY, False):
            parts = self._gather({**on_cpu(whole), PARTIAL_KEY: True})
            whole = merged(parts)
        layout = self._groups()
        local = to_local(whole, layout)
        if self._divides() and not (self._layout is not None and self._is_settled(None)):
            self._pending = whole
            if isinstance(self, HalfPrecision):
                self.load_scaler(whole)
            return
        super().load_state_dict(local)

    def _gather(self, part: dict[str, Any]) -> list[Any]:
        return gather_over(PP_GROUP, part, "an optimizer's state dict")

    def _refuse_sharded(self, what: str) -> None:
        """Raise if the optimizer trains divided modules: tensor-parallel ranks may have different parameters."""
        runtime = find_runtime()
        if runtime is not None and any(
            model.placement.is_sharded and self.trains(model) for model in runtime[Models].alive
        ):
            raise ConfigError(
                f"{what} of an optimizer with tensor_parallel_degree {len(runtime.place.tp_ranks)}: its state is "
                "divided as the parameters are; save optimizer.local_state_dict() on each rank, and load it on the "
                "same rank by optimizer.load_state_dict()"
            )

    def _divides(self) -> bool:
        runtime = find_runtime()
        return runtime is not None and runtime.place.pp_size > 1


def _wrap(
    optimizer: Optimizer,
    static_loss_scale: float | None = 1.0,
    dynamic_loss_scale: bool = False,
    dynamic_loss_args: Mapping[str, Any] | None = None,
    **keys: Any,
) -> Any:
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"smp.DistributedOptimizer was given {type(optimizer).__name__}; it wraps a torch.optim.Optimizer"
        )
    runtime = find_runtime()
    dtype = None if runtime is None else half_dtype(runtime.place.cfg)
    given = {**(dynamic_loss_args or {}), **keys} if keys else dynamic_loss_args
    scaler = scaler_of(static_loss_scale, dynamic_loss_scale, given, is_float16=dtype is torch.float16)
    if isinstance(optimizer, DistributedOptimizer):
        return optimizer
    if isinstance(optimizer, torch.optim.LBFGS) and runtime is not None:
        if runtime.place.pp_size > 1:
            raise ConfigError(
                "torch.optim.LBFGS needs dot products over all parameters of the model, which several pipeline ranks "
                "hold; use pipeline_parallel_degree 1 or another optimizer"
            )
        if dtype is not None:
            raise ConfigError(
                "torch.optim.LBFGS evaluates the model during its update, which master weights of fp16 and bf16 do not "
                "allow; use another optimizer"
            )
    optimizer.__class__ = _distributed_class(type(optimizer), is_half=dtype is not None)
    assert isinstance(optimizer, DistributedOptimizer), "it was just made one"
    if isinstance(optimizer, HalfPrecision):
        optimizer.start(scaler, is_float16=dtype is torch.float16)
    if runtime is not None:
        runtime[Models].optimizers.append(optimizer)
    if any(is_sentinel(parameter) for group in optimizer.param_groups for parameter in group["params"]):
        optimizer.localise()
    return optimizer


def _distributed_class(original: type[Optimizer], *, is_half: bool) -> type[DistributedOptimizer]:
    """The class of `original` with the methods of `DistributedOptimizer` in front, under the same name."""
    if (original, is_half) not in _CLASSES:
        names = {"__module__": original.__module__, "__qualname__": original.__qualname__, "__doc__": original.__doc__}
        bases = (DistributedOptimizer, HalfPrecision, original) if is_half else (DistributedOptimizer, original)
        made: Any = _Wrapping(original.__name__, bases, names)
        _CLASSES[original, is_half] = made
    return _CLASSES[original, is_half]


def _placed(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.released_to if isinstance(parameter, ReleasedParameter) else parameter
