"""The locations of modules, to detect changes of attributes that other ranks would not see."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, MutableMapping
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from shardwright.activation_checkpointing.isolation import is_isolated
from shardwright.errors import FrameError
from shardwright.frames import current_frame
from shardwright.job.runtime import find_runtime
from shardwright.transformers_models.collector import collects

if TYPE_CHECKING:
    from shardwright.execution.stateful import StatefulModules

_CALL = nn.Module._call_impl.__code__
_OWN = __name__.partition(".")[0]
#: What generation alone reads, on the rank that generates.
OF_GENERATION = {"prepare_inputs_for_generation", "generation_config"}


class _Place(NamedTuple):
    name: str
    ranks: tuple[int, ...]
    here: bool
    traced: bool
    #: A weak reference, because it refers to its modules, which a strong one would keep alive.
    kept: weakref.ref[StatefulModules] | None = None


class ModuleLocations:
    """The modules of partitioned models in this process, with the ranks that run them."""

    def __init__(self) -> None:
        """Create an empty registry."""
        # By identity: metrics of torchmetrics have hashes of their own, which change, and none while they are made.
        self._modules: MutableMapping[nn.Module, _Place] = WeakIdKeyDictionary()

    def add(
        self,
        module: nn.Module,
        name: str,
        ranks: tuple[int, ...] = (),
        *,
        here: bool = True,
        traced: bool = True,
    ) -> None:
        """Register the location of a module.

        Args:
            module: The module.
            name: Its name in the model.
            ranks: The global ranks that run it; empty if they are not known yet.
            here: Whether this rank runs it.
            traced: Whether a trace has recorded which modules read the attributes that it sets.
        """
        self._modules[module] = _Place(name or type(module).__name__, ranks, here, traced)

    def watch(self, module: nn.Module, kept: StatefulModules) -> None:
        """Notify ``kept`` when attributes of a module are set."""
        self._modules[module] = self._modules[module]._replace(kept=weakref.ref(kept))

    def is_set(self, module: nn.Module, attribute: str, value: Any) -> None:
        """Handle an attribute of a module that is about to be set."""
        known = self._modules.get(module)
        if known is not None and known.kept is not None and (kept := known.kept()) is not None:
            if attribute != "training":
                kept.is_set(module, attribute)
            elif value != module.__dict__.get(attribute):
                kept.is_switched(module, attribute)

    def refuse_change(self, module: nn.Module, attribute: str, value: Any) -> None:
        """Raise :class:`FrameError` if the code of a step sets an attribute that other ranks' copies would not see."""
        known = self._modules.get(module)
        if known is None or attribute in OF_GENERATION or is_isolated():
            return
        frame = current_frame()
        name, ranks, here, traced, _ = known
        listed = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
        if not here and in_backward() and (runtime := find_runtime()) is not None and runtime.step.running:
            raise FrameError(
                f"attribute {attribute!r} of module {name!r} was set in a backward on rank {runtime.place.rank}, but "
                f"the module runs on {listed}, which would not see it. Register the hook that does so before the first "
                "step, so that both modules are placed on one rank, or pin them to one (smp.set_partition)"
            )
        if frame is None:
            return
        if frame.request is None and not _inside_a_module(sys._getframe(2)):
            where = "in the step function, which runs on pp_rank 0 only"
        elif not here:
            where = f"in the code of {frame.name}, but the module runs on {listed}"
        elif attribute == "forward" and sys._getframe(2).f_globals.get("__name__", "").partition(".")[0] != _OWN:
            raise FrameError(
                f"the forward of module {name!r} was replaced in the code of {frame.name}: what stands there keeps "
                "microbatches in order, and another one may run before this one puts it back. Replace it before the "
                "first step, call a function of your own instead, or register a forward hook"
            )
        elif not traced and not _is_held(module, attribute, value):
            raise FrameError(
                f"attribute {attribute!r} of module {name!r} was set in the code of {frame.name}, and skip_tracing is "
                "on: without a trace it is not known on which ranks, and in which microbatch, it will be read. Disable "
                "skip_tracing, or return the value and pass it as an argument"
            )
        else:
            return  # allowed: the module runs here, and the trace has recorded which modules read the attribute
        raise FrameError(
            f"attribute {attribute!r} of module {name!r} was set {where}: copies of the module on other ranks would "
            "not see it. Set it outside the step function, on every rank (also model.train() and model.eval()), "
            "or pass the value as an argument of the module"
        )

    def refuse_hook(self, module: nn.Module, hook: Callable[..., Any]) -> None:
        """Raise :class:`FrameError` if the code of a step registers a hook on a module that runs elsewhere."""
        frame, known = current_frame(), self._modules.get(module)
        if known is None or collects(hook):
            return
        if known.here and known.kept is not None and (kept := known.kept()) is not None:
            kept.is_switched(module, "_forward_hooks")
        if frame is None or known.here:
            return
        raise FrameError(
            f"a hook was registered on module {known.name!r} in the code of {frame.name}: the module runs on rank "
            f"{', '.join(map(str, known.ranks))}, where the hook would not be. Register it outside the step function, "
            "on every rank, or let the first step register it, so that both are placed on one rank"
        )

    def refuse_making(self, module: nn.Module, attribute: str, value: nn.Module | nn.Parameter) -> None:
        """Raise :class:`FrameError` if the code of a step gives a module a parameter that the model did not have."""
        frame = current_frame()
        known = None if frame is None else self._modules.get(module)
        if known is None or (isinstance(value, nn.Module) and value in self._modules):
            return
        if isinstance(value, nn.Parameter):
            if module._parameters.get(attribute) is not None:
                return  # a replacement, which an optimizer in one process would not train either
            made = [(attribute, value)]
        else:
            made = [(f"{attribute}.{name}", parameter) for name, parameter in value.named_parameters()]
        held = (
            {id(parameter) for part in list(self._modules) for parameter in part._parameters.values()} if made else {}
        )
        for name, parameter in made:
            if id(parameter) not in held:
                raise FrameError(
                    f"parameter {name!r} of shape {tuple(parameter.shape)} was made in module {known.name!r} during "
                    "the step: it would be on one rank only, and no optimizer would train it. Make it in __init__, or "
                    "run one forward of the module before smp.DistributedModel and the optimizer get it"
                )
        if isinstance(value, nn.Module):  # it may get parameters later
            for name, part in value.named_modules(prefix=f"{known.name}.{attribute}"):
                self._modules.setdefault(part, known._replace(name=name))


module_locations = ModuleLocations()


def in_backward() -> bool:
    """Return whether the caller is run by torch's autograd engine."""
    return bool(torch._C._current_graph_task_id() != -1)


def _inside_a_module(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code is _CALL:
            return True
        frame = frame.f_back
    return False


def _is_held(module: nn.Module, attribute: str, value: Any) -> bool:
    """Return whether the attribute is a parameter or buffer, or the value equals the previous one.

    Stand-ins for parameters and buffers on other ranks refuse to be read.
    """
    if attribute in module._parameters or attribute in module._buffers:
        return True
    before = module._modules.get(attribute, module.__dict__.get(attribute, module_locations))
    return before is value or (
        isinstance(value, bool | int | float | str) and type(before) is type(value) and before == value
    )
