"""Steps on whole tensors: an optimizer that may look at a whole parameter gets it whole, and its rank keeps a part.

Every rank that has a slice or a shard gathers what is divided, makes the same update, and keeps its part of the
results. So the update is that of one process for any optimizer that updates what its groups hold, whatever it looks at
and whenever. A weight that was made of several, such as query, key and value in one, is updated as these.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from shardwright.errors import ConfigError, ShardwrightError
from shardwright.groups import put_back_gradient, standing_in
from shardwright.half_precision import model_parameter
from shardwright.job.ranks import DP_GROUP, TP_GROUP
from shardwright.job.runtime import find_runtime
from shardwright.model.gather import gather_over
from shardwright.model.updates import Updates
from shardwright.optimizer.reach.divided import Divided, divided_parameters, kept_whole, whole_value
from shardwright.optimizer.reach.draws import drawing_nothing
from shardwright.optimizer.reach.question import Verdict
from shardwright.optimizer.sharding.elementwise import changes_without_gradient
from shardwright.optimizer.sharding.step import Called
from shardwright.sharded_data_parallel.parameters import ShardedParameters
from shardwright.tensor_parallel.attributes import carry_attributes, user_attributes
from shardwright.tensor_parallel.sharding import Origin

#: The most bytes of parameters, gradients and state that a rank sends in one message.
_MESSAGE_BYTES = 64 << 20
Gather = Callable[[Any], Sequence[Any]]
#: Puts a tensor with so many rows together from this rank's part of it.
Join = Callable[[torch.Tensor, int], torch.Tensor]


class WholeTensors(Optimizer):
    """What ``smp.DistributedOptimizer`` adds to an optimizer that may look at whole parameters.

    It stands directly before the class of the wrapped optimizer, so that groups hold what that would update.
    """

    #: How the step is to be made, as was answered before it.
    _verdict: Verdict = Verdict()
    #: By parameter, what stands for it in the groups during a step. Some optimizers know parameters by identity.
    _stand_ins: Any = None

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters, as the wrapped optimizer does; those that are divided whole.

        Args:
            closure: As for the wrapped optimizer; it is called once if parameters are divided.

        Returns:
            The result of the closure.

        Raises:
            ShardwrightError: Gradients cannot be put together, or the optimizer changes what its groups do not hold.
            ConfigError: The optimizer calls its closure several times.
        """
        runtime = find_runtime() if self._verdict.needs_whole else None
        divided = {} if runtime is None else divided_parameters(runtime, self.param_groups)
        if runtime is None or not divided:
            return super().step() if closure is None else super().step(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        name = f"{type(self).__name__}.step"
        place = runtime.place
        if self._stand_ins is None:
            self._stand_ins = WeakIdKeyDictionary()
        group, spot, join = TP_GROUP, (place.tp_ranks.index(place.rank), len(place.tp_ranks)), None
        if place.shards_parameters:
            registry = runtime[ShardedParameters]
            group, spot = DP_GROUP, (registry.collectives.place, registry.collectives.size)
            join = registry.joined
        step = _WholeStep(
            self,
            divided,
            spot,
            lambda value: gather_over(group, value, name),
            self._stand_ins,
            gradients_agree=place.shards_optimizer_state,
            join=join,
        )
        runtime[Updates].begins(self)  # while the groups hold the model's parameters
        step.run(super().step if closure is None else lambda: super(WholeTensors, self).step(Called(loss, name)))
        return loss


class _Whole(NamedTuple):
    """A parameter during a step.

    Attributes:
        parameter: This rank's part.
        divided: How it is divided.
        tensor: The whole.
        stand_ins: What the groups hold: the whole, or what it was made of.
        is_trained: Whether they were given gradients.
    """

    parameter: torch.Tensor
    divided: Divided
    tensor: torch.Tensor
    stand_ins: list[nn.Parameter]
    is_trained: bool


class _WholeStep:
    """One step."""

    def __init__(
        self,
        optimizer: Optimizer,
        divided: Mapping[int, Divided],
        place: tuple[int, int],
        gather: Gather,
        stand_ins: Any,
        *,
        gradients_agree: bool = False,
        join: Join | None = None,
    ) -> None:
        """Prepare a step.

        Args:
            optimizer: The optimizer.
            divided: How its parameters are divided.
            place: This rank's place among those that have parts, and how many these are.
            gather: Returns what each of them gives.
            stand_ins: What stands for parameters in the groups, from step to step.
            gradients_agree: Whether all of them have a gradient, or none.
            join: Puts rows together without ``gather``, which for shards may ask more ranks.
        """
        self._optimizer = optimizer
        self._divided = divided
        self._rank, self._degree = place
        self._gather = gather
        self._stand_ins = stand_ins
        self._gradients_agree = gradients_agree
        self._join = join
        self._name = f"{type(optimizer).__name__}.step"

    @torch.no_grad()
    def run(self, update: Callable[[], Any]) -> None:
        """Gather, update, and keep this rank's parts."""
        optimizer = self._optimizer
        parameters = [one for group in optimizer.param_groups for one in group["params"] if id(one) in self._divided]
        wholes = {id(one.parameter): one for one in self._gathered(parameters)}
        versions = [one.parameter._version for one in wholes.values()]
        states = {id(one.parameter): optimizer.state.get(one.parameter) for one in wholes.values()}
        try:
            for one in wholes.values():
                optimizer.state.pop(one.parameter, None)
            in_place = standing_in(optimizer, lambda one: wholes[id(one)].stand_ins if id(one) in wholes else (one,))
            with in_place, drawing_nothing(optimizer):
                update()
            if versions != [one.parameter._version for one in wholes.values()]:
                raise ShardwrightError(
                    f"{self._name} changed parameters that its groups do not hold: parameters are divided over "
                    "ranks, and it has to update what param_groups hold when it is called"
                )
            kept = [(one, self._kept(one), self._gradient(one)) for one in wholes.values()]
        except BaseException:
            for key, one in wholes.items():
                if states[key] is not None:
                    optimizer.state[one.parameter] = states[key]
            raise
        finally:
            for one in wholes.values():
                for stand_in in one.stand_ins:
                    optimizer.state.pop(stand_in, None)
                    stand_in.grad = None
                    stand_in.data = stand_in.new_empty(0)
        for one, (values, state), gradient in kept:
            one.parameter.copy_(values)
            if state:
                optimizer.state[one.parameter] = state
            put_back_gradient(one.parameter, one.parameter.grad, gradient, functools.partial(_write_gradient, one))

    # --- before

    def _gathered(self, parameters: list[torch.Tensor]) -> list[_Whole]:
        """Return the whole of each parameter that is to be updated, with its gradient and state in the stand-ins."""
        sliced = [one for one in parameters if self._divided[id(one)].sharding.dim is not None]
        flags = self._gather([_gradient_kind(one.grad) for one in sliced])
        if any(kind == "sparse" for of_rank in flags for kind in of_rank):
            raise ConfigError(
                f"{self._name}: a gradient of a parameter that is divided over tensor-parallel ranks is sparse, and "
                f"{type(self._optimizer).__name__} needs whole ones: use sparse=False, or torch.optim.SparseAdam"
            )
        if self._gradients_agree and any(of_rank != flags[0] for of_rank in flags):
            raise ShardwrightError(
                f"{self._name}: some tensor-parallel ranks have a gradient of their part of a parameter and others do "
                "not, which with shard_optimizer_state cannot be put together"
            )
        trained = {id(one): any(of_rank[number] is not None for of_rank in flags) for number, one in enumerate(sliced)}
        trained |= {id(one): one.grad is not None for one in parameters if id(one) not in trained}
        # A hook may be on one rank alone.
        always = any(self._gather(changes_without_gradient(self._optimizer)))
        found: list[_Whole] = []
        for together in self._messages([one for one in parameters if always or trained[id(one)]]):
            found += self._whole(together, trained)
        return found

    def _messages(self, parameters: list[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
        """Divide parameters alike on all ranks, whose parts have the same sizes."""
        together: list[torch.Tensor] = []
        nbytes = 0
        for one in parameters:
            size = one.numel() * one.element_size() * (2 + len(self._like(one)))
            if together and nbytes + size > _MESSAGE_BYTES:
                yield together
                together, nbytes = [], 0
            together.append(one)
            nbytes += size
        if together:
            yield together

    def _like(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors of the state that are divided as the parameter is."""
        state: Any = self._optimizer.state.get(parameter) or {}
        return {key: value for key, value in state.items() if _is_like(value, parameter.shape)}

    def _whole(self, parameters: list[torch.Tensor], trained: Mapping[int, bool]) -> list[_Whole]:
        parts: list[dict[str, dict[str, torch.Tensor]]] = []
        for one in parameters:
            own = {"": one.detach()}
            if trained[id(one)]:
                own["grad"] = torch.zeros_like(one) if one.grad is None else one.grad.detach()
            parts.append({"own": own, "state": self._like(one)})
        found = []
        if self._join is not None:
            for one, part in zip(parameters, parts, strict=True):
                size = self._divided[id(one)].sharding.size
                assert size is not None, "rows are divided"
                joined = {
                    what: {key: self._join(value, size) for key, value in each.items()} for what, each in part.items()
                }
                found.append(self._stand_in(one, joined["own"], joined["state"]))
            return found
        sent = [part for one, part in zip(parameters, parts, strict=True) if self._is_sliced(one)]
        received: Any = iter(zip(*self._gather(sent), strict=True) if sent else ())
        for one, part in zip(parameters, parts, strict=True):
            of_ranks = next(received) if self._is_sliced(one) else (part,)
            sharding = self._divided[id(one)].sharding
            whole = {
                what: {key: sharding.whole([theirs[what][key] for theirs in of_ranks]) for key in part[what]}
                for what in part
            }
            found.append(self._stand_in(one, whole["own"], whole["state"]))
        return found

    def _is_sliced(self, parameter: torch.Tensor) -> bool:
        return self._divided[id(parameter)].sharding.dim is not None

    def _stand_in(self, parameter: torch.Tensor, own: dict[str, torch.Tensor], like: dict[str, torch.Tensor]) -> _Whole:
        origins: tuple[Origin, ...] | tuple[None] = self._divided[id(parameter)].origins or (None,)
        if parameter not in self._stand_ins:
            self._stand_ins[parameter] = [nn.Parameter(parameter.detach().new_empty(0)) for _ in origins]
        state: Any = self._optimizer.state.get(parameter) or {}
        stand_ins: list[nn.Parameter] = self._stand_ins[parameter]
        for origin, one in zip(origins, stand_ins, strict=True):
            attributes = user_attributes(model_parameter(parameter))
            carry_attributes(attributes if origin is None else {**origin.attributes, **attributes}, one)
            one.requires_grad_(parameter.requires_grad)
            one.data = own[""] if origin is None else origin.of(own[""])
            if (dtype := getattr(parameter, "grad_dtype", one.dtype)) is not one.dtype:
                one.grad_dtype = dtype
            gradient = own.get("grad")
            one.grad = gradient if origin is None or gradient is None else origin.of(gradient)
            if state:
                self._optimizer.state[one] = {
                    key: whole_value(_of_origin(like.get(key, value), origin, key in like))
                    for key, value in state.items()
                }
        return _Whole(parameter, self._divided[id(parameter)], own[""], stand_ins, "grad" in own)

    # --- after

    def _kept(self, one: _Whole) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return this rank's parts of the values and the state that the update has left."""
        origins = one.divided.origins
        whole = one.tensor
        if origins:
            for origin, stand_in in zip(origins, one.stand_ins, strict=True):
                origin.put(stand_in.detach(), whole)
        else:
            whole = one.stand_ins[0].detach()
        states = [self._optimizer.state.get(stand_in) or {} for stand_in in one.stand_ins]
        state: dict[str, Any] = {}
        for key in states[0]:
            values = [each[key] for each in states]
            if all(_is_like(value, each.shape) for value, each in zip(values, one.stand_ins, strict=True)):
                joined = values[0]
                if origins:
                    joined = torch.zeros(whole.shape, dtype=values[0].dtype, device=values[0].device)
                    for origin, value in zip(origins, values, strict=True):
                        origin.put(value, joined)
                state[key] = self._part(one, joined)
            elif len(values) == 1 or all(_same(values[0], value) for value in values):
                state[key] = kept_whole(values[0], one.parameter.shape)
            else:
                state[key] = {_ORIGINS: True} | {
                    origin.name: kept_whole(value, one.parameter.shape)
                    for origin, value in zip(origins, values, strict=True)
                }
        return self._part(one, whole), state

    def _gradient(self, one: _Whole) -> torch.Tensor | None:
        """Return this rank's part of the gradient that the update has left."""
        left = [stand_in.grad for stand_in in one.stand_ins]
        if any(each is None for each in left):
            if any(each is not None for each in left):
                names = [origin.name for origin, each in zip(one.divided.origins, left, strict=True) if each is None]
                raise ShardwrightError(
                    f"{self._name} left gradients of some of the weights that one was made of, but none of {names}: "
                    "set all of them to None, or zero them"
                )
            return None
        whole = left[0]
        if one.divided.origins:
            whole = torch.zeros_like(one.tensor)
            for origin, each in zip(one.divided.origins, left, strict=True):
                origin.put(each, whole)  # type: ignore[arg-type]
        assert whole is not None, "there are some"
        return self._part(one, whole.detach())

    def _part(self, one: _Whole, whole: torch.Tensor) -> torch.Tensor:
        part = one.divided.sharding.shard(whole, self._rank, self._degree)
        assert part is not None, "this rank has a part of it"
        return part


#: Marks the state of what a parameter was made of, by name.
_ORIGINS = "_shardwright_origins"


def _of_origin(value: Any, origin: Origin | None, is_like: bool) -> Any:
    if origin is None:
        return value
    if is_like:
        return origin.of(value)
    if isinstance(value, dict) and value.get(_ORIGINS, False):
        return value[origin.name]
    return value.clone() if isinstance(value, torch.Tensor) else value


def _write_gradient(one: _Whole, part: torch.Tensor) -> None:
    parameter = one.parameter
    if parameter.grad is not None:
        parameter.grad.copy_(part)
    elif not one.is_trained or part.any():  # zeros stood for none, where other ranks have one
        parameter.grad = part.clone()


def _is_like(value: Any, shape: torch.Size) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == shape and value.dim() > 0


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and torch.equal(one, other) and one.dim() == 0
    return type(one) is type(other) and not isinstance(one, torch.Tensor) and bool(one == other)


def _gradient_kind(gradient: torch.Tensor | None) -> str | None:
    if gradient is None:
        return None
    return "sparse" if gradient.is_sparse else "dense"
