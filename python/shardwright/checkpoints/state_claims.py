"""What a checkpoint says of an optimizer's state, beside what steps of its class make: keys, shapes, dtypes."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from shardwright.checkpoints.claims import UNFUSED, Kinds, is_number, shown_kind, wrong
from shardwright.checkpoints.tensors import MASTERS, MODEL, OPTIMIZER
from shardwright.execution import process
from shardwright.optimizer import DistributedOptimizer
from shardwright.optimizer.sharding.elementwise import is_elementwise, original_class, step_of

#: What stands for the sides of large parameters where a step is tried: each tells which side it stands for.
#: Element-wise steps are the same for small ones; of others some keep less of large matrices than of small ones.
_SMALL, _LARGE = (1, (2, 3, 5, 7, 11)), (256, (257, 263, 269, 271, 277))
_MAX_TRIED = 1 << 22
#: How many bytes a number has at least that steps count in or multiply up.
_COUNTED = 4
#: Packages with optimizers that look at whole parameters, whose steps do nothing besides.
_KNOWN = ("torch.optim.", "transformers.", "shardwright.")


def check_state(
    optimizer: DistributedOptimizer,
    decoded: Mapping[str, Any],
    kinds: Kinds,
    groups: Sequence[Sequence[str]],
    joined: Collection[str],
) -> None:
    """Refuse state that the next step of an optimizer would fail on, or read as what it is not.

    Args:
        optimizer: The optimizer, which is as it was afterwards.
        decoded: The saved ``options`` and ``values``, decoded; the options have been looked at.
        kinds: The saved tensors.
        groups: The names of the saved parameters of each group.
        joined: The names of weights of which a module has several in one parameter.

    Raises:
        ShardwrightError: Something is not what steps of this optimizer make; names it, what was found, and what is
            allowed.
    """
    kind = original_class(optimizer)
    if not is_elementwise(kind) and not f"{kind.__module__}.".startswith(_KNOWN):
        return  # its steps may do anything

    group_of = {name: number for number, names in enumerate(groups) for name in names}

    @functools.cache
    def made_of(number: int, sample: tuple[int, ...], dtype: torch.dtype) -> dict[str, Any]:
        return _made(kind, {**optimizer.param_groups[number], **decoded["options"][number]}, sample, dtype)

    states = _states(kinds, decoded["values"])
    if is_elementwise(kind) and (missing := _at_once(kind)):
        for parameter in group_of.keys() - states.keys():
            allowed = f"what {kind.__name__} keeps from the beginning, {', '.join(sorted(missing))}"
            raise wrong(f"the state of parameter {parameter!r}", [], allowed)
    for parameter, state in states.items():
        of, number = kinds.get(MODEL + parameter), group_of.get(parameter, 0)
        if of is None or number >= len(optimizer.param_groups):
            continue
        if parameter in joined and not is_elementwise(kind):
            continue  # its state is that of the parameter which it is a part of
        sample, sides = _sample(of[1], *(_SMALL if is_elementwise(kind) else _LARGE))
        dtype = torch.complex64 if getattr(torch, of[0]).is_complex else torch.float32
        made = made_of(number, sample, dtype)
        if missing := made.keys() - state.keys():
            allowed = f"what {kind.__name__} keeps, also {', '.join(sorted(missing))}"
            raise wrong(f"the state of parameter {parameter!r}", sorted(state), allowed)
        for key, entry in state.items():
            if key in made:
                like = made[key]
                shape = tuple(sides.get(side, side) for side in like.shape) if isinstance(like, torch.Tensor) else ()
                _check_like(f"{OPTIMIZER}{parameter}/{key}", entry, like, shape, kind)
            elif is_elementwise(kind) and isinstance(entry, _Tensor):
                _check_left(f"{OPTIMIZER}{parameter}/{key}", entry, of)
        elements = dict(state)
        if of[1] == ():  # which of its numbers are of elements shows where there are several
            several = made_of(number, (2,), dtype)
            elements = {key: state[key] for key in state.keys() & several if _form(several[key]) == ((2,), dtype)}
        _check_dtypes(parameter, elements, of, f"{MASTERS}{parameter}" in kinds or not is_elementwise(kind))


class _Tensor(tuple[str, tuple[int, ...]]):
    """The dtype and shape of a tensor of state, which no other value is."""


def _states(kinds: Kinds, values: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the state of each parameter that has some, by its keys."""
    found: dict[str, dict[str, Any]] = {name: dict(own) for name, own in values.items() if own}
    for name, kind in kinds.items():
        if name.startswith(OPTIMIZER):
            parameter, _, key = name.removeprefix(OPTIMIZER).rpartition("/")
            found.setdefault(parameter, {})[key] = _Tensor(kind)
    return found


def _sample(shape: tuple[int, ...], limit: int, sides: tuple[int, ...]) -> tuple[tuple[int, ...], dict[int, int]]:
    """Return a shape to try in place of a parameter's, and which side of the parameter one of its sides stands for."""
    if len(shape) > len(sides):
        return shape, {}
    sample = tuple(side if side <= limit else sides[at] for at, side in enumerate(shape))
    return sample, dict(zip(sample, shape, strict=True))


def _at_once(kind: type[Optimizer]) -> set[str]:
    """Return what an optimizer keeps of each parameter before its first step."""
    make: Any = kind
    with contextlib.suppress(Exception), torch.device("cpu"), torch.inference_mode(False):
        parameter = torch.nn.Parameter(torch.zeros(1))
        return set(make([parameter]).state.get(parameter, ()))
    return set()


def _made(
    kind: type[Optimizer], options: Mapping[str, Any], shape: tuple[int, ...], dtype: torch.dtype
) -> dict[str, Any]:
    """Return the state that steps make with these options, alike in the first and the second; none if untried."""
    if math.prod(shape) > _MAX_TRIED:
        return {}
    random_state = process.random_state()
    found: list[dict[str, Any]] = []
    try:
        for is_sparse in (False, True):  # some take no other gradients
            with contextlib.suppress(Exception):  # what cannot be tried here is the step's to say
                found = _after_two_steps(kind, options, shape, dtype, is_sparse=is_sparse)
                break
    finally:
        process.restore_random_state(random_state)
    first, last = found or ({}, {})
    return {key: like for key, like in first.items() if key in last and _form(like) == _form(last[key])}


def _after_two_steps(
    kind: type[Optimizer], options: Mapping[str, Any], shape: tuple[int, ...], dtype: torch.dtype, *, is_sparse: bool
) -> list[dict[str, Any]]:
    """Return the state after the first step and after the second, of a parameter made for them."""
    found = []
    with torch.device("cpu"), torch.inference_mode(False):
        parameter = torch.nn.Parameter(torch.ones(shape, dtype=dtype))
        gradient = torch.linspace(0.1, 1.0, parameter.numel()).to(dtype).view(shape)
        parameter.grad = gradient.to_sparse(1) if is_sparse else gradient
        make: Any = kind  # whose defaults are those of its class
        optimizer = make([parameter])
        own = {key: options[key] for key in optimizer.param_groups[0].keys() & options.keys() if key != "params"}
        optimizer.param_groups[0].update(own)
        optimizer.param_groups[0].update({key: UNFUSED[key] for key in UNFUSED.keys() & own.keys()})
        for _ in range(2):
            step_of(kind)(optimizer)  # without the hooks that are called for every optimizer
            found.append(dict(optimizer.state[parameter]))
    return found


def _form(value: object) -> object:
    return (value.shape, value.dtype) if isinstance(value, torch.Tensor) else type(value)


def _check_like(place: str, entry: Any, like: object, shape: tuple[int, ...], kind: type[Optimizer]) -> None:
    """Refuse what is not like that which a step makes: a tensor of this shape, or another value."""
    if isinstance(like, torch.Tensor):
        if entry is None and issubclass(kind, torch.optim.SGD):
            return  # a buffer that the next step makes
        if isinstance(entry, _Tensor):
            dtype = getattr(torch, entry[0])
            if _alike(dtype, like.dtype) and entry[1] == shape and (shape or dtype.itemsize >= _COUNTED):
                return
        what = _numbers(like.dtype)
        allowed = f"{what} of shape {list(shape)}" if shape else f"a single one of {what}, of 32 bits or more"
        found = shown_kind(entry) if isinstance(entry, _Tensor) else entry
        raise wrong(f"tensor {place!r}", found, f"{allowed}, which {kind.__name__} keeps")
    if not is_number(like):
        return
    is_scalar = isinstance(entry, _Tensor) and entry[1] == () and _is_number(getattr(torch, entry[0]))
    if not is_scalar and not (not isinstance(entry, _Tensor) and is_number(entry)):
        found = shown_kind(entry) if isinstance(entry, _Tensor) else entry
        raise wrong(f"{place!r}", found, f"a number, which {kind.__name__} keeps")


def _check_left(place: str, entry: _Tensor, of: tuple[str, tuple[int, ...]]) -> None:
    """Look at what steps with other options have left: numbers of elements, or one of the whole parameter."""
    dtype = getattr(torch, entry[0])
    is_real = not dtype.is_complex or getattr(torch, of[0]).is_complex
    if entry[1] == of[1] and entry[1] != () and (dtype.is_floating_point or dtype.is_complex) and is_real:
        return
    if entry[1] == () and is_real and dtype is not torch.bool:
        return
    allowed = f"floating-point numbers of shape {list(of[1])}, as of its parameter, or a single number"
    raise wrong(f"tensor {place!r}", shown_kind(entry), allowed)


def _check_dtypes(
    parameter: str, state: Mapping[str, Any], of: tuple[str, tuple[int, ...]], may_be_float32: bool
) -> None:
    """Refuse numbers of elements in another precision than that in which they are updated."""
    allowed = {of[0], "float32"} if may_be_float32 or getattr(torch, of[0]).itemsize < 4 else {of[0]}
    for key, entry in state.items():
        if isinstance(entry, _Tensor) and entry[1] == of[1] and entry[0] not in allowed:
            place = f"tensor {OPTIMIZER + parameter + '/' + key!r}"
            raise wrong(place, shown_kind(entry), f"{' or '.join(sorted(allowed))}, as of its parameter")


def _is_number(dtype: torch.dtype) -> bool:
    return not dtype.is_complex and dtype is not torch.bool


def _alike(dtype: torch.dtype, other: torch.dtype) -> bool:
    return _numbers(dtype) == _numbers(other)


def _numbers(dtype: torch.dtype) -> str:
    if dtype.is_floating_point or dtype.is_complex:
        return "complex numbers" if dtype.is_complex else "floating-point numbers"
    return "bools" if dtype is torch.bool else "integers"
