"""The registry of distributed modules that replace modules, and how they are created (paper, appendices E.3, I.4)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from shardwright.errors import ConfigError
from shardwright.tensor_parallel.module import DistributedModule
from shardwright.tensor_parallel.sharding import Origin

M = TypeVar("M", bound=type[nn.Module])

#: Positional and keyword arguments of a call.
InitArguments = tuple[Iterable[Any], dict[str, Any]]
#: Takes the arguments of a call of the original, and returns those of the same call of its substitute.
CallHook = Callable[..., InitArguments]
#: Takes the result of the substitute, and returns the result that the original would return.
ReturnHook = Callable[[Any], Any]
#: Takes the original, and returns the arguments to create its substitute with.
FromModule = Callable[[nn.Module], InitArguments]
#: Takes the original, and returns its tensors as whole parameters and buffers of the substitute, by their names there.
WeightsHook = Callable[[nn.Module], Mapping[str, torch.Tensor]]
#: Takes the original, and returns of which of its tensors each of the substitute's is made, by the name there.
OriginsHook = Callable[[nn.Module], Mapping[str, Sequence[Origin]]]

#: The arguments are an attribute of the module, so that copies of it can be replaced too.
_MADE_WITH = "_smp_made_with"


@dataclass(frozen=True, eq=False)
class Entry:
    """How modules of one class are replaced.

    Attributes:
        dist_module: The class of the substitute.
        arguments: Returns the arguments to create it with, given the original; raises :class:`ConfigError` if it
            cannot be created.
        forward_hook: Translates the arguments of ``forward``.
        return_hook: Translates the result of ``forward``.
        weights_hook: Returns the original's weights by the substitute's names; None takes those with the same name
            and shape.
        origins_hook: Returns of which of the original's weights the substitute's are made; None if the names and
            layouts are the same.
    """

    dist_module: type[DistributedModule]
    arguments: FromModule
    forward_hook: CallHook | None = None
    return_hook: ReturnHook | None = None
    weights_hook: WeightsHook | None = None
    origins_hook: OriginsHook | None = None

    @functools.cached_property
    def substitute_class(self) -> type[DistributedModule]:
        """Return the class of the substitute, with the call signature and the result of the original.

        A subclass is used instead of module hooks, so that direct calls of ``forward`` are translated too, and calls
        from other ranks are translated once.
        """
        if self.forward_hook is None and self.return_hook is None:
            return self.dist_module
        forward_hook, return_hook, base = self.forward_hook, self.return_hook, self.dist_module

        def forward(module: DistributedModule, *args: Any, **kwargs: Any) -> Any:
            if forward_hook is not None:
                positional, kwargs = forward_hook(*args, **kwargs)
                args = tuple(positional)
            result = base.forward(module, *args, **kwargs)
            return result if return_hook is None else return_hook(result)

        functools.update_wrapper(forward, base.forward)
        names = {"forward": forward, "__module__": base.__module__, "__qualname__": base.__qualname__}
        return type(base.__name__, (base,), {**names, "__doc__": base.__doc__})


_REGISTERED: dict[type[nn.Module], Entry] = {}


def registered(cls: type[nn.Module]) -> Entry | None:
    """Return the entry that a script registered for exactly this class; None if there is none."""
    return _REGISTERED.get(cls)


def tp_register(
    dist_module: type[DistributedModule],
    init_hook: CallHook | None = None,
    forward_hook: CallHook | None = None,
    return_hook: ReturnHook | None = None,
    *,
    weights_hook: WeightsHook | None = None,
) -> Callable[[M], M]:
    """Class decorator: replace marked modules of the class by a distributed module (paper, appendix I.4).

    Args:
        dist_module: A subclass of ``smp.nn.DistributedModule`` that computes what the decorated class computes.
        init_hook: Takes the arguments that an original was created with, with exactly the signature of its
            ``__init__`` without ``self``, and returns ``(args, kwargs)`` for ``dist_module``. None passes them
            unchanged.
        forward_hook: Does the same for the arguments of ``forward``.
        return_hook: Takes the result of ``dist_module``, and returns the result that the original would return.
        weights_hook: Takes an original, and returns its weights as ``dist_module`` would hold them on one rank, by
            their names there, so that training starts from them. Derive the tensors from the parameters themselves,
            not from ``state_dict()``, which does not show which parameters are frozen. None takes the original's
            weights if all names and shapes are the same; otherwise ``dist_module`` starts from new weights.

    Returns:
        The decorator, which returns the class itself.

    Raises:
        ConfigError: ``dist_module`` is not a distributed module, the decorated class is not a module, or a hook is not
            callable.
    """

    def decorate(module_cls: M) -> M:
        tp_register_with_module(
            module_cls, dist_module, init_hook, forward_hook, return_hook, weights_hook=weights_hook
        )
        return module_cls

    return decorate


def tp_register_with_module(
    module_cls: type[nn.Module],
    dist_module: type[DistributedModule],
    init_hook: CallHook | None = None,
    forward_hook: CallHook | None = None,
    return_hook: ReturnHook | None = None,
    *,
    weights_hook: WeightsHook | None = None,
    from_module: FromModule | None = None,
) -> None:
    """Replace marked modules of an existing class by a distributed module (paper, appendix I.4).

    Only modules of exactly this class are replaced, not those of subclasses. The last registration counts, and
    overrides the library's own. Modules created before the registration have no record of their arguments; they need
    ``from_module``.

    Args:
        module_cls: The class of the originals.
        dist_module: As for :func:`tp_register`, as are the hooks and errors.
        from_module: Takes an original, and returns ``(args, kwargs)`` for ``dist_module``; replaces ``init_hook``.
    """
    if not (isinstance(module_cls, type) and issubclass(module_cls, nn.Module)):
        raise ConfigError(f"tp_register: {module_cls!r} was to be registered; allowed: subclasses of nn.Module")
    name = module_cls.__qualname__
    if not (isinstance(dist_module, type) and issubclass(dist_module, DistributedModule)):
        raise ConfigError(
            f"tp_register({name}): dist_module is {dist_module!r}; allowed: subclasses of smp.nn.DistributedModule"
        )
    hooks = {"init_hook": init_hook, "forward_hook": forward_hook, "return_hook": return_hook}
    for hook, value in {**hooks, "weights_hook": weights_hook, "from_module": from_module}.items():
        if value is not None and not callable(value):
            raise ConfigError(f"tp_register({name}): {hook} is {value!r}; allowed: None and functions")
    if init_hook is not None and from_module is not None:
        raise ConfigError(f"tp_register({name}): give init_hook or from_module, not both")
    if from_module is None:
        _record_arguments(module_cls)
        from_module = functools.partial(_from_record, init_hook)
    _REGISTERED[module_cls] = Entry(dist_module, from_module, forward_hook, return_hook, weights_hook)


def _record_arguments(cls: type[nn.Module]) -> None:
    """Make modules of exactly this class record the arguments that they are created with."""
    original: Any = cls.__dict__.get("__init__")
    if getattr(original, "_smp_records", None) is cls:
        return

    @functools.wraps(cls.__init__)
    def __init__(module: nn.Module, *args: Any, **kwargs: Any) -> None:
        if type(module) is cls:
            module.__dict__[_MADE_WITH] = (args, kwargs)
        if original is not None:
            original(module, *args, **kwargs)
        else:  # inherited; the base class may have another function by then
            super(cls, module).__init__(*args, **kwargs)

    setattr(__init__, "_smp_records", cls)  # noqa: B010
    setattr(cls, "__init__", __init__)  # noqa: B010


def _from_record(init_hook: CallHook | None, module: nn.Module) -> InitArguments:
    made_with = module.__dict__.get(_MADE_WITH)
    if made_with is None:
        raise ConfigError("it was made before its class was registered, so that its arguments are not known")
    args, kwargs = made_with
    return (args, kwargs) if init_hook is None else init_hook(*args, **kwargs)
