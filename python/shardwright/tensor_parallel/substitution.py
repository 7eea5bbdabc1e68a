"""One module and the distributed module that takes its place: whether it can, how it is made, and its weights."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, get_args, get_type_hints

import torch
from torch import nn
from torch.nn.utils import parametrize

from shardwright.delayed.creation import noting
from shardwright.delayed.materialise import has_delayed, is_delayed
from shardwright.errors import ConfigError
from shardwright.tensor_parallel.module import DistributedModule, named_shardings
from shardwright.tensor_parallel.registry import Entry
from shardwright.tensor_parallel.sharding import Sharding

_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
#: These only collect outputs, where a call asks for it. They go along with the module; its parts have none any more.
_HARMLESS_HOOKS = "transformers.utils.output_capturing"


@dataclass(frozen=True)
class Substitution:
    """A distributed module that is ready to take a module's place, but for the weights.

    Attributes:
        module: The original.
        entry: How it is replaced.
        substitute: The distributed module, with fresh weights.
        trainable: Whether each parameter or buffer that comes from the original needs a gradient, by its name in the
            substitute.
        fresh: The names of those that keep their fresh values.
        options: The names of the mark's options that the substitute took.
    """

    module: nn.Module
    entry: Entry
    substitute: DistributedModule
    trainable: Mapping[str, bool]
    fresh: tuple[str, ...]
    options: frozenset[str]

    @torch.no_grad()
    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The original's weights, whole, by their names in the substitute, in the order of names."""
        if self.trainable:
            yield from sorted(_weights(self.entry, self.module).items())

    @torch.no_grad()
    def take(self, name: str, whole: torch.Tensor) -> None:
        """Give the substitute its part of a weight of the original, in the original's dtype."""
        own = _tensors(self.substitute).get(name)
        if own is not None and own.dtype != whole.dtype:
            own.data = own.data.to(whole.dtype)
        with noting() if is_delayed(whole) else nullcontext():
            self.substitute.load_whole_state_dict({name: whole})

    def finish(self) -> None:
        """Give the substitute what else the original has: what is trained, its mode, and hooks that collect outputs."""
        parameters = dict(self.module.named_parameters())
        any_trained = not parameters or any(parameter.requires_grad for parameter in parameters.values())
        for name, parameter in self.substitute.named_parameters():
            parameter.requires_grad_(self.trainable.get(name, any_trained))
        self.substitute.train(self.module.training)
        for hook in self.module._forward_hooks.values():  # those that are carried over; with others it is unfit
            self.substitute.register_forward_hook(hook)


def unfit(module: nn.Module) -> str | None:
    """Why a module is not what its class says, so that no other can take its place; None if it is."""
    if any(part.training != module.training for part in module.modules()):
        return "some of its parts are in training mode and others are not"
    for name, part in module.named_modules():
        where = f" at its part {name!r}" if name else ""
        if parametrize.is_parametrized(part):
            return f"it has a parametrization{where}"
        for hooks in _HOOKS:
            for hook in getattr(part, hooks, {}).values():
                if getattr(hook, "__module__", None) != _HARMLESS_HOOKS:
                    return f"it has hooks{where}"
        if "forward" in part.__dict__:
            return f"its forward is set by an attribute{where}"
        if part._compiled_call_impl is not None:
            return f"it is compiled{where}"
        for parameter_name, parameter in part.named_parameters(name, recurse=False):
            if type(parameter) is not nn.Parameter and not is_delayed(parameter):
                return f"its parameter {parameter_name!r} is a {type(parameter).__name__}"
            if parameter.is_meta:
                return f"its parameter {parameter_name!r} is on the meta device"
            if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
                return f"its parameter {parameter_name!r} has hooks"
    return None


def substitution_of(module: nn.Module, entry: Entry, options: Mapping[str, Any], seed: str) -> Substitution:
    """Make the distributed module for a module.

    Args:
        module: The original, which stays as it is.
        entry: How it is replaced.
        options: Of its mark: those that the substitute knows win over the entry's arguments.
        seed: What its fresh weights are drawn from. Torch's generators stay as they are.

    Raises:
        ConfigError: There is none, for the reason it tells, such as a size that does not divide.
    """
    args, kwargs = entry.arguments(module)
    arguments, taken = _with_options(entry.dist_module, tuple(args), kwargs, options)
    with _like(module, seed), _delayed_like(module):
        substitute = entry.substitute_class(*arguments.args[1:], **arguments.kwargs)
    known = {*substitute.state_dict(), *named_shardings(substitute)}
    weights = _weights(entry, module)
    if entry.weights_hook is None and (weights.keys() != known or _misfit(substitute, weights, known)):
        return Substitution(module, entry, substitute, {}, tuple(sorted(known)), taken)
    problem = _misfit(substitute, weights, known)
    if problem is not None:
        raise ConfigError(problem)
    trainable = _trainable(entry, module, weights)
    return Substitution(module, entry, substitute, trainable, tuple(sorted(known - weights.keys())), taken)


def _with_options(
    dist_module: type[DistributedModule], args: tuple[Any, ...], kwargs: Mapping[str, Any], options: Mapping[str, Any]
) -> tuple[inspect.BoundArguments, frozenset[str]]:
    signature = inspect.signature(dist_module.__init__)
    bound = signature.bind(None, *args, **kwargs)
    others = next((p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD), None)
    taken = frozenset(options) & _argument_names(dist_module)
    for name in taken:
        if name in signature.parameters:
            bound.arguments[name] = options[name]
        elif others is not None:
            bound.arguments[others] = {**bound.arguments.get(others, {}), name: options[name]}
    return bound, taken


def _argument_names(dist_module: type[DistributedModule]) -> frozenset[str]:
    """What ``__init__`` takes by name, also what it passes on to a base or declares by ``Unpack``."""
    names: set[str] = set()
    for cls in dist_module.__mro__:
        init: Any = cls.__dict__.get("__init__")
        if cls is nn.Module or init is None:
            continue
        others = None
        for parameter in list(inspect.signature(init).parameters.values())[1:]:
            if parameter.kind is parameter.VAR_KEYWORD:
                others = parameter.name
            elif parameter.kind is not parameter.VAR_POSITIONAL:
                names.add(parameter.name)
        if others is None:
            break
        declared = get_type_hints(init).get(others)
        for one in get_args(declared):
            names.update(getattr(one, "__annotations__", ()))
    return frozenset(names)


@contextmanager
def _like(module: nn.Module, seed: str) -> Iterator[None]:
    """Have parameters made where the module's are and in their dtype, from a seed of their own."""
    tensors = [*module.parameters(), *module.buffers()]
    dtype = next((one.dtype for one in tensors if one.is_floating_point()), torch.get_default_dtype())
    device = tensors[0].device if tensors else torch.device("cpu")
    before = torch.get_default_dtype()
    with torch.random.fork_rng([device] if device.type == "cuda" else []), device:
        torch.manual_seed(int.from_bytes(hashlib.sha256(seed.encode()).digest()[:7], "little"))
        torch.set_default_dtype(dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


def _delayed_like(module: nn.Module) -> AbstractContextManager[None]:
    """Delay what is made of delayed parameters, or in their place."""
    return noting() if has_delayed(module) else nullcontext()


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers())}


def _weights(entry: Entry, module: nn.Module) -> dict[str, torch.Tensor]:
    if entry.weights_hook is not None:
        with _delayed_like(module):
            return dict(entry.weights_hook(module))
    state = module.state_dict(keep_vars=True)
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def _misfit(substitute: DistributedModule, weights: Mapping[str, torch.Tensor], known: set[str]) -> str | None:
    """Why a substitute cannot take these weights over, None if it can."""
    name_of_class = type(substitute).__name__
    shardings, own = named_shardings(substitute), _tensors(substitute)
    for name, whole in weights.items():
        if name not in known:
            return f"it has a {name!r}, which {name_of_class} has not"
        if name in own:  # otherwise another rank has it
            expected = shardings.get(name, Sharding()).global_shape(own[name].shape, substitute.tp_group.size)
            if expected != tuple(whole.shape):
                return f"its {name!r} has shape {tuple(whole.shape)}, that of {name_of_class} {expected}"
    return None


def _trainable(entry: Entry, module: nn.Module, weights: Mapping[str, torch.Tensor]) -> dict[str, bool]:
    """Which of the substitute's weights need a gradient, where each is made of some of the original's.

    Raises:
        ConfigError: One of them is made of parameters of which some need a gradient and some do not, or that cannot be
            told.
    """
    flags = {parameter: parameter.requires_grad for parameter in module.parameters()}
    if len(set(flags.values())) < 2:
        trained = all(flags.values())
        buffers = {id(buffer) for buffer in module.buffers()}
        return {name: trained and id(weight) not in buffers for name, weight in weights.items()}
    if not torch.is_grad_enabled():
        with torch.enable_grad():
            return _trainable(entry, module, _weights(entry, module))
    # What is made of frozen parameters alone is what needs a gradient once they do and the others do not.
    trained_names = {name for name, weight in weights.items() if weight.requires_grad}
    try:
        for parameter, flag in flags.items():
            parameter.requires_grad_(not flag)
        frozen = {name for name, weight in _weights(entry, module).items() if weight.requires_grad}
    finally:
        for parameter, flag in flags.items():
            parameter.requires_grad_(flag)
    buffers = {id(buffer) for buffer in module.buffers()}
    for name, weight in weights.items():
        if id(weight) not in buffers and (name in trained_names) == (name in frozen):
            raise ConfigError(f"some of its parameters are frozen, but not all or none of those that make {name!r}")
    return {name: name in trained_names for name in weights}
