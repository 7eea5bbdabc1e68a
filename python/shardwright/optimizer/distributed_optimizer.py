"""``smp.DistributedOptimizer``: an optimizer that holds only the parameters of its rank."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from shardwright.errors import ConfigError
from shardwright.half_precision import half_dtype
from shardwright.half_precision.loss_scaler import scaler_of
from shardwright.job.explained import explain
from shardwright.job.ranks import PP_GROUP, RDP_GROUP, WORLD
from shardwright.job.runtime import current_runtime, find_runtime
from shardwright.model.gather import gather_over, on_cpu
from shardwright.model.models import Models
from shardwright.model.sentinel import ReleasedParameter, is_sentinel
from shardwright.model.updates import Updates
from shardwright.optimizer.awaited_state import AwaitedState, loads_state, tells_of_loading
from shardwright.optimizer.become import become
from shardwright.optimizer.edits import EditedGroups
from shardwright.optimizer.half_precision import HalfPrecision
from shardwright.optimizer.held import HeldGroups
from shardwright.optimizer.layout import PARTIAL_KEY, GroupLayout, merged, numbers_of, to_global, to_local
from shardwright.optimizer.master_state import without_half_precision
from shardwright.optimizer.nothing import update_nothing
from shardwright.optimizer.offloading import StateStorage, StreamedState
from shardwright.optimizer.reach import WholeTensors, ask, drawing_nothing
from shardwright.optimizer.refusals import refuse_optimizer
from shardwright.optimizer.replaced_step import ReplaceableStep
from shardwright.optimizer.sharding.elementwise import original_class
from shardwright.optimizer.sharding.share import Share
from shardwright.optimizer.sharding.state import copied, is_share, merged_shares, shares_in, to_share
from shardwright.optimizer.sharding.step import Called, sharded_step
from shardwright.optimizer.shards import shards_step, take_over, with_cut_state, with_whole_state
from shardwright.sharded_data_parallel.exchange import in_place_of_shards

if TYPE_CHECKING:
    from shardwright.model.distributed import DistributedModel

_WHOLE = "an optimizer's state dict"
_CLASSES: dict[tuple[type[Optimizer], ...], type[DistributedOptimizer]] = {}


class _Wrapping(type):
    """Makes a call of `DistributedOptimizer` wrap an optimizer; its subclasses are constructed as usual."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls is DistributedOptimizer:
            return _wrap(*args, **kwargs)
        return super().__call__(*args, **kwargs)


class DistributedOptimizer(ReplaceableStep, AwaitedState, HeldGroups, EditedGroups, metaclass=_Wrapping):
    """Makes an optimizer work on a partitioned model.

    ``smp.DistributedOptimizer(optimizer)`` returns the same object: it remains an instance of its class, and its
    parameter groups keep their order and settings, so learning-rate schedulers work as before. When the model is
    partitioned, parameters and state of other ranks are removed; a group may become empty. The optimizer can also be
    created after the model was partitioned, from ``model.parameters()``.

    With ``shard_optimizer_state``, each data-parallel rank updates a share of the parameters and keeps the state of
    that share only (spec, 2.8.3): whole parameters or, for optimizers of ``torch.optim`` that treat elements
    independently of each other, also parts of them. The groups hold all parameters; ``state`` has those of the share.
    An update that depends on what a rank does not hold is refused, or made on whole tensors.

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

    _share: Share | None = None

    @property
    def has_masters(self) -> bool:
        """Whether it updates master weights in place of parameters."""
        return isinstance(self, HalfPrecision)

    def trains(self, model: DistributedModel) -> bool:
        """Whether this optimizer trains parameters of ``model``."""
        own = {id(parameter) for parameter in model.module.parameters()}
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
        self._own_share(model)
        if self._is_settled(model) and (pending := self._pending_state_dict()) is not None:
            self._load_whole(pending)

    def take_over_shards(self, *, is_new: bool = False) -> None:
        """Put sharded parameters in the places of those that they were made of."""
        self._layout = take_over(current_runtime(), self, self._layout, is_new=is_new)

    def _is_settled(self, dividing: DistributedModel | None) -> bool:
        """Whether all models that this optimizer trains are partitioned, or are being partitioned."""
        runtime = find_runtime()
        return runtime is None or all(
            model is dividing or model.placement.partitioned or not self.trains(model)
            for model in runtime[Models].alive
        )

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters of this rank. All ranks must call this equally often.

        With ``shard_optimizer_state``, each data-parallel rank updates its share, and all of them have all updated
        parameters when this returns.

        Args:
            closure: As for the wrapped optimizer's ``step``.

        Returns:
            The result of the closure, if there is one.

        Raises:
            PartialUpdateError: With ``shard_optimizer_state``, the update has failed on another rank.
        """
        self._steps_begun += 1
        if (runtime := find_runtime()) is None:
            return self._update_here(closure)
        try:
            self._verdict = ask(self, runtime, original_class(self))
            if runtime.place.shards_parameters:
                loss = shards_step(runtime, self, closure, self._update_here)
            elif (share := self._own_share()) is None:
                loss = self._update_here(closure)
            else:
                loss = sharded_step(runtime, self, share, closure, self._update_here)
        except BaseException as error:
            explain(runtime, error)
            raise
        runtime[Updates].has_updated()
        return loss

    def _update_here(self, closure: Callable[[], Any] | None) -> Any:
        if any(group["params"] for group in self.param_groups) or getattr(self, "steps_on_all_ranks", False):
            draws = self._verdict.is_watched and (closure is None or isinstance(closure, Called))
            with drawing_nothing(self) if draws else contextlib.nullcontext():
                return super().step(closure) if closure is not None else super().step()
        return update_nothing(self, super().step, closure)

    def _own_share(self, dividing: DistributedModel | None = None) -> Share | None:
        """Return this rank's share, with the parameters of all partitioned models divided.

        Args:
            dividing: A model that is being partitioned, and counts as such.

        Returns:
            The share. None on all ranks if state is not sharded, or no model that this optimizer trains is partitioned.
        """
        runtime = find_runtime()
        if runtime is None or not runtime.place.shards_optimizer_state:
            return None
        if self._share is None:
            models = runtime[Models].alive
            if not any((one is dividing or one.placement.partitioned) and self.trains(one) for one in models):
                return None
            self._share = Share(runtime, original_class(self))
        self._share.divide(self, dividing)
        return self._share

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group; if the model is partitioned, the group keeps only the parameters of this rank.

        With ``shard_optimizer_state`` its parameters are divided over the ranks, and others stay where they are.
        """
        super().add_param_group(param_group)
        if self._layout is not None:
            group = self.param_groups[-1]
            whole = GroupLayout.of(group)
            self._layout.append(whole)
            whole.keep_local(group)
        self._own_share()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of this rank's parameters."""
        if set_to_none:
            super().zero_grad()
            return
        with in_place_of_shards(find_runtime(), self):  # PyTorch does not clear shards and others together
            super().zero_grad(set_to_none=False)

    def local_state_dict(self, gather_if_shard: bool = True) -> dict[str, Any] | list[dict[str, Any]]:
        """Return this rank's part of the state, without communication unless optimizer state is sharded.

        Args:
            gather_if_shard: With ``shard_optimizer_state``, gather the shares of RDP_GROUP on its first rank; all ranks
                of the group must then call this. Otherwise without effect.

        Returns:
            A dict in the format of :meth:`state_dict`, marked by the key ``_smp_is_partial``. Parameters are numbered
            as in the whole model, and ``param_groups`` lists all of them. With ``shard_optimizer_state`` it has the
            state of this rank's share; if shares are gathered, the first rank of RDP_GROUP gets the list of them.
        """
        part = self._part()
        if not gather_if_shard or not is_share(part):
            return part
        return gather_over(RDP_GROUP, copied(part), "an optimizer's local_state_dict", to_first=True) or part

    def orig_state_dict(self) -> dict[str, Any]:
        """Return what the wrapped optimizer returns on this rank, without communication.

        With ``shard_optimizer_state`` it has this rank's share, numbered by itself: whole parameters, and 1-D parts.
        """
        self.check_has_state("a state dict of an optimizer")
        share = self._own_share()
        with in_place_of_shards(find_runtime(), self) if share is None else share.in_groups(self):
            return super().state_dict()

    def _part(self) -> dict[str, Any]:
        """Return this rank's part of the state, numbered as in the whole model."""
        self.check_known("an optimizer's local_state_dict")
        layout, share, runtime = self._groups(), self._own_share(), find_runtime()
        if share is None or runtime is None:
            return {**with_whole_state(runtime, to_global(self.orig_state_dict(), layout), layout), PARTIAL_KEY: True}
        places = share.places(layout)
        return to_share(to_global(self.orig_state_dict(), layout, places), runtime, share, layout, places)

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer state of the whole model, on the CPU.

        All ranks of the pipeline must call this; with ``shard_optimizer_state``, all ranks of the job.

        Returns:
            A dict in the format of the wrapped optimizer. Before the model is partitioned, and with one pipeline rank
            and without ``shard_optimizer_state``, nothing is gathered or moved.

        Raises:
            ConfigError: On every rank, if the optimizer trains modules that are divided over tensor-parallel ranks.
        """
        self._refuse_sharded("state_dict()")
        if (pending := self._pending_state_dict()) is not None:
            return pending
        self.agree_on_groups(_WHOLE)
        part = self._part()
        if is_share(part):
            return merged_shares(gather_over(WORLD, copied(part), _WHOLE), *_tp_place())
        if self._layout is None and not ((runtime := find_runtime()) and runtime.place.shards_parameters):
            return super().state_dict()
        return merged(self._gather(on_cpu(part)))

    @tells_of_loading
    def load_state_dict(self, state_dict: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Load a state dict. If the model is not partitioned yet, it is loaded when that happens.

        Args:
            state_dict: A whole state dict, or the result of :meth:`local_state_dict`. Partial state dicts are merged
                over the ranks of the pipeline, which must all call this. Shares of sharded state, or lists of them, are
                merged over all ranks of the job.

        Raises:
            ValueError: The parameter groups differ from those of this optimizer, or shares are missing.
            ConfigError: On every rank, if the state dict is a whole one and the optimizer trains modules that are
                divided over tensor-parallel ranks.
        """
        whole = self._merged(state_dict)
        if not self.has_masters:
            whole = without_half_precision(whole)
        self.check_known("an optimizer's load_state_dict")
        to_local(whole, self._groups())  # raises if it does not fit
        if self._divides() and not (self._layout is not None and self._is_settled(None)):
            self._wait_for_state_dict(whole)
            if isinstance(self, HalfPrecision):
                self.load_scaler(whole)
            return
        self._load_whole(whole)

    def _merged(self, state_dict: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return a whole state dict, merged from what ranks give if that is partial."""
        if is_share(state_dict):
            return merged_shares(shares_in(gather_over(WORLD, copied(state_dict), _WHOLE)), *_tp_place())
        if not isinstance(state_dict, Mapping):
            raise ConfigError(
                f"optimizer.load_state_dict was given a {type(state_dict).__name__}; it takes a state dict, or the "
                "list of shares that local_state_dict() returns with shard_optimizer_state"
            )
        whole = dict(state_dict)
        if not whole.get(PARTIAL_KEY, False):
            self._refuse_sharded("load_state_dict() of a whole state dict")
            return whole
        return merged(self._gather(on_cpu(whole)))

    @loads_state
    def _load_whole(self, whole: dict[str, Any]) -> None:
        """Load this rank's part of a whole state dict."""
        self.has_state()
        layout, share = self._groups(), self._own_share()
        if share is None:
            with in_place_of_shards(find_runtime(), self):
                super().load_state_dict(with_cut_state(find_runtime(), to_local(whole, layout), layout))
            return
        places = share.places(layout)
        local = to_local(whole, layout, places)
        for number, (_, parameter) in enumerate(numbers_of(layout, places)):
            if number in local["state"]:
                local["state"][number] = share.cut(parameter, local["state"][number])
        with share.in_groups(self):
            super().load_state_dict(local)

    def _gather(self, part: dict[str, Any]) -> list[Any]:
        return gather_over(PP_GROUP, part, _WHOLE)

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
        return (runtime := find_runtime()) is not None and runtime.place.pp_size > 1


DistributedOptimizer.step.hooked = True  # type: ignore[attr-defined]  # the wrapped class's step calls the hooks


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
    if runtime is not None:
        refuse_optimizer(optimizer, runtime, dtype)
    storage = None if runtime is None else runtime.find(StateStorage)
    more = [kind for kind, is_on in ((HalfPrecision, dtype), (StreamedState, storage)) if is_on is not None]
    optimizer = become(optimizer, _distributed_class(*more, WholeTensors, type(optimizer)))
    if isinstance(optimizer, HalfPrecision):
        optimizer.start(scaler, is_float16=dtype is torch.float16)
    if runtime is not None:
        runtime[Models].optimizers.append(optimizer)
    if any(is_sentinel(parameter) for group in optimizer.param_groups for parameter in group["params"]):
        optimizer.localise()
    optimizer._own_share()
    if runtime is not None and runtime.place.shards_parameters:
        optimizer.take_over_shards(is_new=True)
    if isinstance(optimizer, StreamedState) and storage is not None:
        optimizer.start_streaming(storage)
    return optimizer


def _distributed_class(*bases: type[Optimizer]) -> type[DistributedOptimizer]:
    """The last class with the methods of `DistributedOptimizer` and the others in front, under the same name."""
    if bases not in _CLASSES:
        original = bases[-1]
        names = {"__module__": original.__module__, "__qualname__": original.__qualname__, "__doc__": original.__doc__}
        made: Any = _Wrapping(original.__name__, (DistributedOptimizer, *bases), names)
        _CLASSES[bases] = made
    return _CLASSES[bases]


def _tp_place() -> tuple[int, int]:
    """This rank's index in TP_GROUP, and the group's size."""
    place = None if (runtime := find_runtime()) is None else runtime.place
    return (0, 1) if place is None else (place.tp_ranks.index(place.rank), len(place.tp_ranks))


def _placed(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.released_to if isinstance(parameter, ReleasedParameter) else parameter
