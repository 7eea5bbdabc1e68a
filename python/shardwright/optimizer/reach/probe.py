"""Tries the step of an optimizer on small tensors: whether an update of a part is the part of the update."""

from __future__ import annotations

import contextlib
import copy
import inspect
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from shardwright.execution import process
from shardwright.optimizer.besides import Besides
from shardwright.optimizer.reach.known import Reach

#: Shapes of the parameters that every group is tried with: some optimizers treat matrices, vectors and convolutions
#: differently, and large ones too.
_SHAPES = ((6, 4), (6,), (4, 2, 2, 2), (136, 132))
#: What gradients are multiplied by from step to step, so that thresholds of norms are passed in both directions.
_SCALES = (1.0, 1e-3, 30.0, 0.2, 3.0)
#: How much results may differ, as a part of the way that the parameter went.
_TOLERANCE = 1e-7
_HOOKS = "_hooks"

Cut = Callable[[torch.Tensor], torch.Tensor]
#: The parts of parameters that ranks have: slices of a dim, and runs of elements.
_CUTS: tuple[Cut, ...] = (
    lambda tensor: tensor[: tensor.shape[0] // 2],
    lambda tensor: tensor[tensor.shape[0] // 2 :],
    lambda tensor: tensor[:, : tensor.shape[1] // 2] if tensor.dim() > 1 else tensor[:2],
    lambda tensor: tensor.reshape(-1)[1 : 2 * tensor.numel() // 3],
)


class Found(NamedTuple):
    """What a probe has found.

    Attributes:
        reach: How far a step looks; None if it could not be tried.
        is_random: Whether it draws random numbers.
        reason: Why it could not be tried; or where a step leaves, besides weights, what depends on other parameters.
        is_assumed: Whether it was seen to look less far, which does not show that it always will.
    """

    reach: Reach | None
    is_random: bool = False
    reason: str = ""
    is_assumed: bool = False


def probe(optimizer: Optimizer, kind: type[Optimizer], attributes: Iterable[str]) -> Found:
    """Find how far the step of an optimizer looks, by steps of instances of its class with the same options.

    They run on the CPU, on small tensors of double precision, and leave no random number drawn. A learning rate that
    is 0 now, as at the start of a warm-up, is not 0 there.

    Args:
        optimizer: The optimizer, which does not change.
        kind: Its class, before ``smp.DistributedOptimizer`` wrapped it.
        attributes: The names of the attributes that it had then.
    """
    state, modes = process.random_state(), contextlib.ExitStack()
    try:
        with modes, warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            modes.enter_context(torch.device("cpu"))
            if hasattr(torch.compiler, "set_stance"):
                modes.enter_context(torch.compiler.set_stance("force_eager"))
            return _Probe(optimizer, kind, attributes).found()
    finally:
        process.restore_random_state(state)


class _Place(NamedTuple):
    """A parameter of the probe: the group that it is in, and its shape."""

    group: int
    shape: tuple[int, ...]


class _Probe:
    def __init__(self, optimizer: Optimizer, kind: type[Optimizer], attributes: Iterable[str]) -> None:
        self._optimizer, self._kind = optimizer, kind
        self._attributes = {name: vars(optimizer)[name] for name in attributes if name in vars(optimizer)}
        self._options = _distinct(optimizer.param_groups)
        self._make: Callable[[list[dict[str, Any]]], Optimizer] = self._copy
        self._values: dict[_Place, list[torch.Tensor]] = {}
        for group in range(len(self._options)):
            for shape in _SHAPES:
                self._values[_Place(group, shape)] = _values(group, shape)

    def found(self) -> Found:
        makers = [self._copy, self._construct]
        if any(map(_holds_tensors, self._attributes.values())):
            del makers[0]
        reasons = []
        for maker in makers:
            self._make = maker
            try:
                places = self._places()
                whole = self._run(places, seed=1)
                return self._compared(places, whole)
            except Exception as error:
                reasons.append(f"{type(error).__name__}: {error}")
        return Found(None, reason=reasons[-1])

    def _places(self) -> list[_Place]:
        """The parameters that the optimizer can update; one for matrices only leaves out the others."""
        places = list(self._values)
        try:
            self._run(places, seed=1)
        except Exception:
            places = [place for place in places if self._runs([place])]
            if {place.group for place in places} != set(range(len(self._options))):
                self._run([place for place in self._values if place not in places], seed=1)  # raises what it raises
        return places

    def _runs(self, places: list[_Place]) -> bool:
        try:
            self._run(places, seed=1)
        except Exception:
            return False
        return True

    def _compared(self, places: list[_Place], whole: Mapping[_Place, list[torch.Tensor]]) -> Found:
        if any(torch.equal(way[0], way[-1]) for way in whole.values()):
            raise ValueError("it leaves the groups' parameters, with gradients of many sizes, as they are")
        begun, left, states = self._begun, self._left, self._states
        again = self._run(places, seed=2)
        if not all(_alike(whole[place], again[place]) for place in places):
            return Found(Reach.MODEL, is_random=True)
        numbers = {place: number for number, place in enumerate(places)}
        for bit in range(max(numbers.values()).bit_length()):
            for side in (0, 1):  # of any two parameters one is without the other
                some = [place for place in places if numbers[place] >> bit & 1 == side]
                alone = self._run(some, seed=1)
                if not all(_alike(whole[place], alone[place]) for place in some):
                    return Found(Reach.MODEL)
                if (what := left.difference(self._left, begun) or _differs(states, self._states)) is not None:
                    return Found(Reach.MODEL, reason=what)
        for cut in _CUTS:
            parts = self._run(places, seed=1, cut=cut)
            if (what := left.difference(self._left, begun)) is not None:
                return Found(Reach.PARAMETER, reason=what)
            if not all(_alike([cut(one) for one in whole[place]], parts[place]) for place in places):
                return Found(Reach.PARAMETER)
        return Found(Reach.ELEMENT)

    def _run(self, places: Sequence[_Place], seed: int, cut: Cut | None = None) -> dict[_Place, list[torch.Tensor]]:
        """Return the values of parameters at first and after each step."""
        process.seed(seed)
        parameters = {place: nn.Parameter(_cut(self._values[place][0], cut)) for place in places}
        groups = [
            {**_copied(options), "params": [parameters[place] for place in places if place.group == number]}
            for number, options in enumerate(self._options)
            if any(place.group == number for place in places)
        ]
        optimizer = self._make(groups)
        self._begun = Besides(optimizer, tensors=False)
        step: Any = self._kind.step
        step = step.__wrapped__ if getattr(step, "hooked", False) else step
        found = {place: [parameters[place].detach().clone()] for place in places}
        for number in range(len(_SCALES)):
            for place, parameter in parameters.items():
                parameter.grad = _cut(self._values[place][1 + number], cut)
            step(optimizer)
            for place, parameter in parameters.items():
                found[place].append(parameter.detach().clone())
        self._left = Besides(optimizer, tensors=False)
        self._states = {place: _counts(optimizer.state.get(one)) for place, one in parameters.items()}
        return found

    def _copy(self, groups: list[dict[str, Any]]) -> Optimizer:
        """An instance with copies of the optimizer's attributes, which has no state yet."""
        made = self._kind.__new__(self._kind)
        for name, value in self._attributes.items():
            if name not in ("step", "state", "param_groups"):
                vars(made)[name] = OrderedDict() if name.endswith(_HOOKS) else copy.deepcopy(value)
        made.state, made.param_groups = defaultdict(dict), groups
        return made

    def _construct(self, groups: list[dict[str, Any]]) -> Optimizer:
        """An instance by the class's constructor, for one that keeps tensors in attributes, or makes its state there.

        Its groups get other parameters then, as they do in a job: one that keeps to the first ones cannot be tried.
        """
        own, known = self._attributes, {}
        first, *rest = _arguments(self._kind)
        for one in rest:
            places = [self._optimizer.defaults, own, {one.name: own.get(f"_{one.name}", one.default)}]
            value = next(each[one.name] for each in places if one.name in each)
            if value is not inspect.Parameter.empty and one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY):
                known[one.name] = value
        others = [
            {**group, "params": [nn.Parameter(one.detach().clone()) for one in group["params"]]} for group in groups
        ]
        kind: Any = self._kind
        own_first = next(iter(list(inspect.signature(kind.__init__).parameters.values())[1:]))
        is_placed = own_first.name == first.name or own_first.kind is own_first.VAR_POSITIONAL
        by_place = is_placed and own_first.kind is not own_first.KEYWORD_ONLY
        made: Optimizer = kind(others, **known) if by_place else kind(**{first.name: others}, **known)
        for name, value in own.items():
            if name in vars(made) and isinstance(value, (bool, int, float, str)):
                vars(made)[name] = value
        for group, mine in zip(groups, made.param_groups, strict=True):
            for before, now in zip(mine["params"], group["params"], strict=True):
                if before in made.state:
                    made.state[now] = made.state.pop(before)
            mine["params"] = group["params"]
        return made


def _arguments(kind: type) -> list[inspect.Parameter]:
    """The arguments of a constructor, the parameters first; where it passes on what it is given, also the next one's.

    Of the next one those that have no default: it may be given the others already.
    """
    found: dict[str, inspect.Parameter] = {}
    passes_on = False
    for one in kind.__mro__:
        if "__init__" not in vars(one):
            continue
        own = list(inspect.signature(vars(one)["__init__"]).parameters.values())[1:]
        named = [each for each in own if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
        for each in named:
            if not passes_on or each.default is each.empty:
                found.setdefault(each.name, each)
        passes_on = len(named) < len(own)
        if not passes_on:
            break
    first = found.pop("params", None)
    return list(found.values()) if first is None else [first, *found.values()]


def _distinct(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The options of groups, each once, with a learning rate at which something changes."""
    found: list[dict[str, Any]] = []
    for group in groups:
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        if isinstance(options.get("lr"), (int, float, torch.Tensor)):
            options["lr"] = 0.01
        if not any(_same(options, other) for other in found):
            found.append(options)
    return found


def _same(options: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return options.keys() == other.keys() and all(
        value is other[key] or repr(value) == repr(other[key]) for key, value in options.items()
    )


def _copied(options: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value if callable(value) else copy.deepcopy(value) for key, value in options.items()}


def _values(group: int, shape: tuple[int, ...]) -> list[torch.Tensor]:
    """The first values of a parameter, and its gradients in each step; some elements are far larger than others."""
    numbers = torch.Generator().manual_seed(1 + group)
    found = [torch.randn(shape, generator=numbers, dtype=torch.float64)]
    for number, scale in enumerate(_SCALES):
        size = 10 ** (2 * torch.rand(shape, generator=numbers, dtype=torch.float64) - 1)
        gradient = torch.randn(shape, generator=numbers, dtype=torch.float64) * size * scale
        gradient[: shape[0] // 2] *= 7.0 if number % 2 else 0.1
        found.append(gradient)
    return found


def _counts(state: Any) -> dict[Any, Any] | None:
    """The keys of a parameter's state, with the numbers and names in it."""
    if not isinstance(state, dict):
        return None
    return {key: value if isinstance(value, (bool, int, str)) else None for key, value in state.items()}


def _differs(whole: Mapping[_Place, Any], some: Mapping[_Place, Any]) -> str | None:
    """Say where numbers in the state of parameters differ."""
    return next(("optimizer.state of each parameter" for place, state in some.items() if state != whole[place]), None)


def _cut(tensor: torch.Tensor, cut: Cut | None) -> torch.Tensor:
    return (tensor if cut is None else cut(tensor)).clone(memory_format=torch.contiguous_format)


def _alike(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    ways = [(value - one[0]).abs().nan_to_num().max() for value in one[1:]]
    return all(
        torch.allclose(value, there, rtol=0, atol=float(_TOLERANCE * way), equal_nan=True)
        for value, there, way in zip(one[1:], other[1:], ways, strict=True)
    )


def _holds_tensors(value: Any, levels: int = 3) -> bool:
    if isinstance(value, (torch.Tensor, nn.Module, Optimizer)):
        return True
    if levels == 0:
        return False
    inside: Iterable[Any] = ()
    if isinstance(value, Mapping):
        inside = [*value.keys(), *value.values()]
    elif isinstance(value, (list, tuple, set, frozenset)):
        inside = value
    elif hasattr(value, "__dict__") and not isinstance(value, type) and not callable(value):
        inside = vars(value).values()
    return any(_holds_tensors(one, levels - 1) for one in inside)
