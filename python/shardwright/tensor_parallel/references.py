"""References to the modules and parameters of a model, because a replaced module must be replaced everywhere."""

from __future__ import annotations

import functools
import types
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

#: Attributes of ``nn.Module`` itself, which are not parts of a model.
_OF_TORCH = frozenset(nn.Module().__dict__)
#: The depth to which containers in attributes are searched.
_MAX_LEVELS = 3


class References:
    """The modules of a model, with the references to them.

    Attributes:
        names: The first name of each module, by its ``id``.
        uses: The parents of each module with its name in each, by its ``id``; a module may be used at several places.
    """

    def __init__(self, root: nn.Module) -> None:
        """Collect the references in a model."""
        self.names: dict[int, str] = {}
        self.uses: dict[int, list[tuple[nn.Module, str]]] = {}
        self._attributes: dict[int, list[tuple[nn.Module, str]]] = {}
        self._holders: dict[Hashable, list[nn.Module]] = {}
        for name, module in root.named_modules():
            self.names[id(module)] = name
            for child_name, child in module._modules.items():
                if child is not None:
                    self.uses.setdefault(id(child), []).append((module, child_name))
            for parameter in module._parameters.values():
                if parameter is not None:
                    for key in _identities(parameter):
                        self._holders.setdefault(key, []).append(module)
            for attribute, value in module.__dict__.items():
                if attribute in _OF_TORCH or attribute.startswith("_smp_"):
                    continue
                for found in _modules_in(value):
                    self._attributes.setdefault(id(found), []).append((module, attribute))

    def from_outside(self, module: nn.Module) -> str | None:
        """Return why a module cannot be removed from the model, because something else refers to a part of it; or None.

        Modules that refer to the module itself are not a reason, because the reference can be replaced.
        """
        inside = {id(part) for part in module.modules()}
        for name, part in module.named_modules():
            what = f"its part {name!r}" if name else "it"
            for parent, _ in self.uses.get(id(part), ()) if name else ():
                if id(parent) not in inside:
                    return f"{what} is used by {self.safe_repr(parent)} as well"
            for owner, attribute in self._attributes.get(id(part), ()):
                if id(owner) not in inside:
                    return f"attribute {attribute!r} of {self.safe_repr(owner)} refers to {what}"
            for parameter_name, parameter in part.named_parameters(name, recurse=False, remove_duplicate=False):
                for key in _identities(parameter):
                    for holder in self._holders[key]:
                        if id(holder) not in inside:
                            return f"its parameter {parameter_name!r} is one of {self.safe_repr(holder)} as well"
        return None

    def shared_inside(self, module: nn.Module) -> str | None:
        """Describe two parts of a module that share a parameter; None if there are none."""
        for part in module.modules():
            for parameter in part._parameters.values():
                for key in _identities(parameter) if parameter is not None else ():
                    holders = self._holders[key]
                    if len(holders) > 1:
                        return (
                            f"its parts {self.safe_repr(holders[0])} and {self.safe_repr(holders[1])} share a parameter"
                        )
        return None

    def safe_repr(self, module: nn.Module) -> str:
        """Return a readable name of a module."""
        name = self.names[id(module)]
        return repr(name) if name else "the model itself"


def _identities(parameter: torch.Tensor) -> Iterator[Hashable]:
    """Yield keys that parameters sharing memory have in common."""
    yield id(parameter)
    # Tensors of other layouts and classes have no address; those without elements share no memory.
    if type(parameter) is nn.Parameter and parameter.layout is torch.strided and parameter.numel():
        address = 0 if parameter.is_meta else parameter.data_ptr()
        if address:
            yield parameter.device, address


def _modules_in(value: Any, levels: int = _MAX_LEVELS) -> Iterator[nn.Module]:
    """Yield modules that an attribute refers to outside the model's tree: in containers, methods or functions."""
    if isinstance(value, nn.Module):
        yield value
    elif isinstance(value, types.MethodType):
        if isinstance(value.__self__, nn.Module):
            yield value.__self__
    elif levels:
        inner: Any = ()
        if isinstance(value, Mapping):
            inner = value.values()
        elif isinstance(value, list | tuple | set | frozenset):
            inner = value
        elif isinstance(value, functools.partial):
            inner = (value.func, value.args, value.keywords)
        for each in inner:
            yield from _modules_in(each, levels - 1)
