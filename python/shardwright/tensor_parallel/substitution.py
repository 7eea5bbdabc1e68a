"""Substitute a distributed module for a module: check that it is possible, create it, and transfer the weights."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, get_args, get_type_hints

import torch
from torch import nn
from torch.nn.utils import parametrize

from shardwright.creation import default_dtype
from shardwright.delayed.creation import noting
from shardwright.delayed.materialise import has_delayed, is_delayed
from shardwright.drawing import stand_for
from shardwright.errors import ConfigError
from shardwright.frames.checkpointing import mark_of, set_mark
from shardwright.tensor_parallel.attributes import user_attributes
from shardwright.tensor_parallel.gradients import gradients_of, has_gradients
from shardwright.tensor_parallel.module import DistributedModule, named_shardings, parameter_dtype
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
#: Hooks from here only collect outputs on request. They are transferred with the module, but not with its parts.
_HARMLESS_HOOKS = "transformers.utils.output_capturing"


@dataclass(frozen=True)
class Substitution:
    """A distributed module that is ready to replace a module, except for the weights.

    Attributes:
        substitute: The distributed module, with newly initialized weights.
        trainable: Whether each parameter or buffer that comes from the original needs a gradient, by its name in the
            substitute.
        fresh: The names of those that keep their newly initialized values.
        options: The names of the mark's options that the substitute accepts.
    """

    module: nn.Module
    entry: Entry
    substitute: DistributedModule
    trainable: Mapping[str, bool]
    fresh: tuple[str, ...]
    options: frozenset[str]

    @torch.no_grad()
    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the original's whole weights with their names in the substitute, in the order of names."""
        if self.trainable:
            yield from sorted(_weights(self.entry, self.module).items())

    @torch.no_grad()
    def take(self, name: str, whole: torch.Tensor) -> None:
        """Set the substitute's part of a weight of the original, in its dtype, or float16 with ``fp16_params``."""
        own = _tensors(self.substitute).get(name)
        dtype = parameter_dtype(whole.dtype) if isinstance(own, nn.Parameter) else whole.dtype
        if own is not None and own.dtype != dtype:
            own.data = own.data.to(dtype)
        with noting() if is_delayed(whole) else nullcontext():
            self.substitute.load_whole_state_dict({name: whole})

    def gradients(self) -> dict[str, torch.Tensor]:
        """Return the original's gradients, whole, by the substitute's names of the weights that they are of."""
        if not self.trainable or not has_gradients(self.module):
            return {}
        found = gradients_of(self.module, lambda: _weights(self.entry, self.module))
        assert found is not None, "else it is not replaced"
        return found

    @torch.no_grad()
    def take_gradient(self, name: str, whole: torch.Tensor) -> None:
        """Set the gradient of the substitute's part of a weight."""
        own = dict(self.substitute.named_parameters(remove_duplicate=False)).get(name)
        group, sharding = self.substitute.tp_group, named_shardings(self.substitute).get(name, Sharding())
        part = sharding.shard(whole, group.rank, group.size)
        if own is not None and part is not None:
            own.grad = part.to(own)

    def finish(self) -> None:
        """Transfer the rest to the substitute: which weights are trained, the mode, and hooks that collect outputs."""
        parameters = dict(self.module.named_parameters())
        any_trained = not parameters or any(parameter.requires_grad for parameter in parameters.values())
        for name, parameter in self.substitute.named_parameters():
            parameter.requires_grad_(self.trainable.get(name, any_trained))
        self.substitute.train(self.module.training)
        stand_for(self.substitute, self.module)
        if self.entry.origins_hook is not None:
            self.substitute.origins = self.entry.origins_hook(self.module)
        self._carry_attributes(dict(self.module.named_parameters(remove_duplicate=False)))
        if (mark := mark_of(self.module)) is not None:
            set_mark(self.substitute, mark)
        for hook in self.module._forward_hooks.values():  # a module with other hooks is not replaced
            self.substitute.register_forward_hook(hook)

    def _carry_attributes(self, theirs: Mapping[str, torch.Tensor]) -> None:
        """Give weights the attributes that the script has set on those that they were made of."""
        made_of = {
            name: tuple(
                replace(one, attributes=user_attributes(theirs[one.name])) if one.name in theirs else one
                for one in origins
            )
            for name, origins in self.substitute.origins.items()
        }
        self.substitute.origins = made_of
        for name, parameter in self.substitute.named_parameters():
            each = [one.attributes for one in made_of.get(name, ())]
            if not each and name in theirs:
                each = [user_attributes(theirs[name])]
            for attribute, value in (each[0] if each else {}).items():
                if all(attribute in one and one[attribute] is value for one in each):
                    setattr(parameter, attribute, value)


def unfit(module: nn.Module) -> str | None:
    """Return why a module does not behave as its class defines, so that it cannot be replaced; None if it does."""
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
    """Create the distributed module for a module, which is not changed.

    Options of its mark that the substitute accepts override the entry's arguments. The seed is that of newly
    initialized weights; torch's generators are not changed.

    Raises:
        ConfigError: The substitute cannot be created, for the given reason, such as a size that is not divisible.
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
    if problem is None and has_gradients(module) and gradients_of(module, lambda: _weights(entry, module)) is None:
        problem = "its parameters have gradients, and its weights_hook does more than reorder them"
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
    """Return the names of arguments of ``__init__``, including those passed to a base or declared by ``Unpack``."""
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
        declared = get_args(get_type_hints(init)[others]) if others is not None else ()
        for one in declared:
            names.update(one.__annotations__)
        if others is None or declared:
            break
    return frozenset(names)


@contextmanager
def _like(module: nn.Module, seed: str) -> Iterator[None]:
    """Create parameters in the block on the device and in the dtype of the module's parameters, from a given seed."""
    tensors = [*module.parameters(), *module.buffers()]
    dtype = next((one.dtype for one in tensors if one.is_floating_point()), None)
    device = tensors[0].device if tensors else torch.device("cpu")
    with torch.random.fork_rng([device] if device.type == "cuda" else []), device, default_dtype(dtype):
        torch.manual_seed(int.from_bytes(hashlib.sha256(seed.encode()).digest()[:7], "little"))
        yield


def _delayed_like(module: nn.Module) -> AbstractContextManager[None]:
    """Return a context manager that delays parameters if the module's parameters are delayed."""
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
    """Return why a substitute cannot take these weights; None if it can."""
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
    """Return which of the substitute's weights need a gradient, given that each is derived from the original's."""
    flags = {parameter: parameter.requires_grad for parameter in module.parameters()}
    if len(set(flags.values())) < 2:
        trained = all(flags.values())
        buffers = {id(buffer) for buffer in module.buffers()}
        return {name: trained and id(weight) not in buffers for name, weight in weights.items()}
    if not torch.is_grad_enabled():
        with torch.enable_grad():
            return _trainable(entry, module, _weights(entry, module))
    # Frozen weights are those that need a gradient once the flags of all parameters are inverted.
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
