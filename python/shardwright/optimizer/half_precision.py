"""Optimizers of half-precision models: float32 master weights, loss scaling, steps that all ranks skip together."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from shardwright import logs
from shardwright.errors import ConfigError, FrameError, ShardwrightError
from shardwright.half_precision import LossScaler, LossScaling, Masters
from shardwright.job.ranks import MP_GROUP, WORLD
from shardwright.job.runtime import Runtime, current_runtime
from shardwright.model.gather import gather_over
from shardwright.model.models import Models
from shardwright.model.updates import Updates
from shardwright.optimizer.clip import clip_gradients, counted_here, counted_over_replicas
from shardwright.optimizer.master_state import MASTER_KEY, SCALER_KEY, taken_apart
from shardwright.optimizer.nothing import update_nothing
from shardwright.sharded_data_parallel.exchange import in_place_of_shards
from shardwright.sharded_data_parallel.parameters import ShardedParameters

if TYPE_CHECKING:
    from shardwright.optimizer.sharding.share import Share


class HalfPrecision(Optimizer):
    """What ``smp.DistributedOptimizer`` adds to an optimizer in a job with ``fp16`` or ``bf16``.

    The parameter groups hold the model's half-precision parameters. Within :meth:`step` their float32 master weights
    take their place, so that the wrapped optimizer updates these in float32; the results are rounded to the model's
    dtype. In ``fp16``, ``model.backward`` multiplies the loss by :attr:`loss_scale`, and gradients are divided by it
    in float32. If a gradient overflows on any rank, all ranks skip the update.

    With ``shard_optimizer_state`` or ``sharded_data_parallel_degree`` a rank has masters of its share, or shards, only:
    within the methods below, the groups hold what it updates.

    Attributes:
        overflow: Whether a gradient was not finite in the last :meth:`step` (or :meth:`clip_master_grads` since), on
            any rank.
    """

    #: A rank without parameters takes part in what ranks agree on.
    steps_on_all_ranks = True
    overflow: bool
    _scaler: LossScaler
    _masters: Masters
    _is_float16: bool
    #: Of what gradients the masters' are, whether they are clipped, and after which backward the last step was.
    _taken_of: tuple[Any, ...] | None
    _clipped: bool
    _stepped_after: int

    def start(self, scaler: LossScaler, *, is_float16: bool) -> None:
        """Begin without masters, which are made when they are first needed; not for scripts."""
        self.overflow = False
        self._scaler = scaler
        self._masters = Masters()
        self._is_float16 = is_float16
        self._taken_of, self._clipped = None, False
        self._stepped_after = 0
        if is_float16:
            current_runtime()[LossScaling].scaler = scaler

    def _own_share(self) -> Share | None:
        """Return what this rank updates, with ``shard_optimizer_state``: what ``smp.DistributedOptimizer`` says."""
        return None

    def _updating(self) -> contextlib.AbstractContextManager[None]:
        """Let the groups hold what this rank updates, with its gradients, inside the block."""
        share = self._own_share()
        return in_place_of_shards(current_runtime(), self) if share is None else share.updating(self)

    def _updated(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return what the groups hold of a parameter, of which this rank updates something, inside that block."""
        share = self._own_share()
        return current_runtime()[ShardedParameters].local(parameter) if share is None else share.updated(parameter)

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer itself, for scripts that give it to a learning-rate scheduler."""
        return self

    @property
    def loss_scaler(self) -> LossScaler:
        """The loss scaler, whose scale is 1 in ``bf16``."""
        return self._scaler

    @property
    def loss_scale(self) -> float:
        """What ``model.backward`` multiplies losses by."""
        return self._scaler.loss_scale

    # --- gradients

    def update_master_grads(self) -> None:
        """Give the masters the gradients of the model's parameters, in float32 and divided by :attr:`loss_scale`.

        :meth:`step` and :meth:`clip_master_grads` do this if it was not done since the gradients were made. All ranks
        must call it. It discards what clipping has changed.

        Raises:
            FrameError: Called inside a step function.
            ShardwrightError: See :meth:`step`.
        """
        self._clipped, self._taken_of = False, None
        with self._updating():
            self._take_gradients("update_master_grads")

    @torch.no_grad()
    def clip_master_grads(self, max_norm: float, norm_type: float = 2.0) -> float:
        """Clip the masters' gradients by their norm over the whole model. All ranks must call this.

        Every parameter counts once, whichever pipeline- and tensor-parallel ranks and replicas hold it.

        Args:
            max_norm: The maximum norm.
            norm_type: The order of the norm; can be ``inf``. With distributed modules it must be positive.

        Returns:
            The norm before clipping; -1.0 if a gradient overflowed on any rank (``fp16`` only).

        Raises:
            ConfigError: ``norm_type`` is not positive and modules are divided over tensor-parallel ranks, or parameters
                over data-parallel ones.
            FrameError: Called inside a step function.
            ShardwrightError: See :meth:`step`.
        """
        if current_runtime().place.shards_parameters:
            raise ConfigError(
                f"{self._name}.clip_master_grads with sharded_data_parallel_degree, under which step() clips the "
                "masters' gradients by the configuration key sdp_gradient_clipping: set it to this max_norm"
            )
        return float(self.clip_masters(max_norm, norm_type, "clip_master_grads"))

    @torch.no_grad()
    def clip_masters(self, max_norm: float, norm_type: float, operation: str) -> torch.Tensor | float:
        """Do what :meth:`clip_master_grads` does; not for scripts.

        Args:
            max_norm: The maximum norm.
            norm_type: The order of the norm.
            operation: The name of the calling method, for error messages.
        """
        what, share = f"{self._name}.{operation}", self._own_share()
        here, group = counted_here(list(self._parameters()), norm_type, what), MP_GROUP
        counted: list[torch.Tensor] = [*here]
        if share is not None or current_runtime().place.shards_parameters:
            counted = [self._updated(one) for one, _ in counted_over_replicas(here, norm_type, what)]
            group = WORLD
        with self._updating():
            self.overflow = self._take_gradients(operation)
            gradients = self._masters.gradients(self._parameters())
        if self.overflow:
            return -1.0
        self._clipped = True
        return clip_gradients(gradients, self._masters.gradients(counted), max_norm, norm_type, what, group=group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the model's parameters and of the masters.

        Args:
            set_to_none: Whether the parameters' gradients become None, and not zeros.
        """
        super().zero_grad(set_to_none)
        if self._masters.zero_gradients(self._parameters(), set_to_none=set_to_none):
            return  # called by a step, or a hook of it, for what the groups hold then
        self._masters.drop_gradients()
        self._taken_of, self._clipped = None, False

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update the masters, and round them to the model's parameters. All ranks must call this.

        If a gradient is not finite on any rank (``fp16`` only), all ranks leave out the update, and :attr:`overflow` is
        True. A dynamic loss scale is updated alike on all ranks.

        Args:
            closure: Not allowed: it would compute gradients during the update.

        Raises:
            ConfigError: A closure is given, or a later ``smp.DistributedOptimizer`` scales losses by another scale.
            FrameError: Called inside a step function.
            ShardwrightError: Gradients were changed after they were clipped, or they were not made by
                ``model.backward``, which scales the loss, or ranks have different scales.
        """
        self.refuse_closure(closure)
        self.overflow = self._take_gradients("step")
        scale = self._scaler.loss_scale
        # Before the update, which may fail on some ranks only.
        self._scaler.update(self.overflow)
        self._stepped_after = current_runtime()[LossScaling].backwards
        if self.overflow:
            self._tell_of_overflow(scale)
        elif any(group["params"] for group in self.param_groups) or getattr(super(), "steps_on_all_ranks", False):
            current_runtime()[Updates].begins(self)  # while the groups hold the model's parameters
            with self._masters.updating(self, scale):
                super().step()
        else:
            update_nothing(self, super().step, None)
        self._masters.drop_gradients()
        self._taken_of, self._clipped = None, False

    def refuse_closure(self, closure: Callable[[], Any] | None) -> None:
        """Raise if a closure is given; not for scripts.

        Args:
            closure: The closure.

        Raises:
            ConfigError: It is not None.
        """
        if closure is not None:
            raise ConfigError(
                f"{self._name}.step was given a closure, which cannot be evaluated during an update of master weights: "
                "compute the loss in a function with smp.step, and call step() without one"
            )

    def _tell_of_overflow(self, scale: float) -> None:
        if current_runtime().place.rank == 0:
            stays = self.loss_scale == scale  # which may make all further steps overflow, too
            logs.logger.log(
                logging.WARNING if stays else logging.INFO,
                "%s.step: gradients overflowed with the loss scale %g, and the update is left out; the scale %s",
                self._name,
                scale,
                "stays" if stays else f"becomes {self.loss_scale:g}",
            )

    def _take_gradients(self, operation: str) -> bool:
        """Give the masters their gradients unless they have them; return whether any overflowed on any rank."""
        runtime = current_runtime()
        what = f"{self._name}.{operation}"
        if runtime.step.running:
            raise FrameError(
                f"{what} was called inside a step function, which runs once per microbatch, before the step's "
                "gradients are complete: call it outside, once per step"
            )
        parameters = list(self._parameters())
        problem = self._problem(runtime, parameters)
        overflow = False
        now = self._gradients_now(runtime, parameters)
        if problem is None and (self._taken_of is None or self._taken_of[0] != now):
            overflow = self._masters.take_gradients(parameters, self.loss_scale, check=self._is_float16)
            self._taken_of, self._clipped = (now, overflow), False
        elif self._taken_of is not None:
            overflow = self._taken_of[1]
        if not self._is_float16:
            _raise_first([problem], what)
            return False
        notes = gather_over(_group(runtime), (overflow, self.loss_scale, problem), what)
        _raise_first([theirs for _, _, theirs in notes], what)
        if len({scale for _, scale, _ in notes}) > 1:
            raise ShardwrightError(
                f"{what}: ranks have different loss scales, {[scale for _, scale, _ in notes]}, as after an update "
                "that failed on some of them: load the optimizer's state (optimizer.load_state_dict) on every rank"
            )
        return any(theirs for theirs, _, _ in notes)

    def _problem(self, runtime: Runtime, parameters: Sequence[torch.Tensor]) -> str | None:
        """Return why the gradients cannot be used; None if they can."""
        scaling = runtime[LossScaling]
        if self._clipped and self._taken_of is not None:
            before, now = self._taken_of[0], self._gradients_now(runtime, parameters)
            if before[:2] == now[:2] and before != now:
                return (
                    "gradients of the model were changed after clip_master_grads, whose result would be lost: change "
                    "them before it, or call update_master_grads() and clip again"
                )
        if not self._is_float16:
            return None
        if scaling.scaler is not self._scaler and scaling.scaler is not None:
            other = scaling.scaler
            if other.is_dynamic or self._scaler.is_dynamic or other.loss_scale != self.loss_scale:
                return (
                    "a later smp.DistributedOptimizer scales the losses: with fp16 one optimizer trains all models (in "
                    "several parameter groups), or all have the same static_loss_scale"
                )
        made_alone = runtime.place.pp_size == 1 and scaling.backwards == self._stepped_after
        if made_alone and self.loss_scale != 1 and any(one.grad is not None for one in parameters):
            return (
                "the gradients were not made by model.backward(loss) since the last step, so they are not multiplied "
                "by the loss scale: call it in place of loss.backward()"
            )
        return None

    def _gradients_now(self, runtime: Runtime, parameters: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        """Describe the gradients of the parameters, so that a change is noticed."""
        gradients = [(_identity(one.grad), one.grad._version) for one in parameters if one.grad is not None]
        return runtime.step.number, runtime[LossScaling].backwards, gradients

    def _parameters(self) -> Iterator[nn.Parameter]:
        return (parameter for group in self.param_groups for parameter in group["params"])

    @property
    def _name(self) -> str:
        return type(self).__name__

    # --- masters

    @property
    def master_bytes(self) -> int:
        """The bytes of this rank's master weights."""
        return self._masters.nbytes

    def init_master_params(self) -> None:
        """Create the masters of this rank's parameters, or set them to the parameters' values.

        This is not needed: masters are created when first used. Parameters that are not placed yet get theirs later.
        """
        placed = {id(one) for placement in self._placed() for one in placement.owned_parameters()}
        share = self._own_share()
        for parameter in self._parameters():
            if id(parameter) in placed and parameter.requires_grad and (share is None or share.is_here(parameter)):
                self._masters.of(self._updated(parameter))
        self.reload_model_params()

    def reload_model_params(self) -> None:
        """Set the masters to the values of the model's parameters.

        Needed only after writing to ``parameter.data``: ``model.load_state_dict`` and in-place operations are noticed.
        """
        with self._updating():
            self._masters.take_from_model()

    def move_master(
        self, parameter: torch.Tensor, to: torch.Tensor | None, values: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        """Leave of a parameter's master what this rank updates from now on; see ``Masters.move``. Not for scripts."""
        self._masters.move(parameter, to, values)

    def _placed(self) -> list[Any]:
        return [placement for placement in current_runtime()[Models].placements if placement.partitioned]

    # --- state dicts

    def state_dict(self) -> dict[str, Any]:
        """Return the state with each master weight in the state of its parameter, and the loss scaler."""
        self._masters.follow_model(also_loaded=False)
        found = super().state_dict()
        state = {number: dict(entry) if isinstance(entry, dict) else entry for number, entry in found["state"].items()}
        for number, master in self._masters.copies(self._parameters()):
            state.setdefault(number, {})[MASTER_KEY] = master
        return {**found, "state": state, SCALER_KEY: self._scaler.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` returned, or the state of an optimizer without master weights.

        Without them, masters are set to the values of the model's parameters.

        Raises:
            ValueError: The groups, or the shape of a master weight, are not those of this optimizer.
            ConfigError: The loss scaler's state cannot be read.
        """
        state, masters = taken_apart(state_dict["state"])
        parameters = list(self._parameters())
        for number, values in masters.items():
            if number < len(parameters) and values.shape != parameters[number].shape:
                raise ValueError(
                    f"loaded state dict has a master weight of shape {tuple(values.shape)} for parameter {number}, "
                    f"whose shape is {tuple(parameters[number].shape)}"
                )
        self._scaler.read(state_dict.get(SCALER_KEY, {}))
        for number in {*state, *masters}:
            if isinstance(number, int) and number < len(parameters):
                self._masters.of(parameters[number])
        with self._masters.in_place_of_parameters(self):
            super().load_state_dict({**state_dict, "state": state})
        self._masters.take_from_model()
        for number, values in masters.items():
            self._masters.load(parameters[number], values)
        self.load_scaler(state_dict)
        self._taken_of, self._clipped = None, False

    def load_scaler(self, state_dict: Mapping[str, Any]) -> None:
        """Load the loss scaler's state from an optimizer's state dict, if it is there; not for scripts."""
        if SCALER_KEY in state_dict:
            self._scaler.load_state_dict(state_dict[SCALER_KEY])


def _identity(gradient: torch.Tensor) -> int:
    """What tells a gradient from another one; views of the same elements, such as a share is given, are the same."""
    return gradient.data_ptr() if gradient.layout is torch.strided else id(gradient)


def _group(runtime: Runtime) -> Any:
    """Return the ranks that agree: all of the job but, inside ``model.join()``, those that still have batches."""
    joined = any(placement.replicas.join_state is not None for placement in runtime[Models].placements)
    # Replicas find the same in their averaged gradients, as long as they run the same steps.
    return MP_GROUP if joined else WORLD


def _raise_first(problems: list[str | None], what: str) -> None:
    problem = next((one for one in problems if one is not None), None)
    if problem is not None:
        raise ShardwrightError(f"{what}: {problem}")
