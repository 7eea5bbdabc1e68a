"""Modules that run on other ranks than those where the code of a step may change their attributes."""

from __future__ import annotations

import sys
import weakref
from types import FrameType

from torch import nn

from shardwright.errors import FrameError
from shardwright.frames import current_frame

_CALL = nn.Module._call_impl.__code__


class Elsewhere:
    """The modules of divided models in this process, with the ranks that run them."""

    def __init__(self) -> None:
        """Know none."""
        self._modules: weakref.WeakKeyDictionary[nn.Module, tuple[str, tuple[int, ...], bool]] = (
            weakref.WeakKeyDictionary()
        )

    def add(self, module: nn.Module, name: str, ranks: tuple[int, ...] = (), *, here: bool = True) -> None:
        """A module runs on these global ranks, none meaning that it is not known yet; ``here``: also on this one."""
        self._modules[module] = (name or type(module).__name__, ranks, here)

    def refuse_change(self, module: nn.Module, attribute: str) -> None:
        """Raise :class:`FrameError` if the code of a step sets an attribute that other ranks' copies would not see."""
        frame = current_frame()
        if frame is None:
            return
        known = self._modules.get(module)
        if known is None:
            return
        name, ranks, here = known
        if frame.request is None and not _inside_a_module(sys._getframe(2)):
            where = "in the step function, which runs on pp_rank 0 only"
        elif not here:
            listed = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
            where = f"in the code of {frame.name}, but the module runs on {listed}"
        else:
            return  # a forward may keep what it likes in a module that runs here; the trace knows who reads it
        raise FrameError(
            f"attribute {attribute!r} of module {name!r} was set {where}: copies of the module on other ranks would "
            "not see it. Set it outside the step function, where every rank does (model.train() and model.eval() too), "
            "or pass the value as an argument of the module"
        )

    def refuse_making(self, module: nn.Module, attribute: str, value: nn.Module | nn.Parameter) -> None:
        """Raise :class:`FrameError` if the code of a step gives a module a parameter that the model did not have."""
        frame = current_frame()
        known = None if frame is None else self._modules.get(module)
        if known is None or (isinstance(value, nn.Module) and value in self._modules):
            return
        if isinstance(value, nn.Parameter):
            if module._parameters.get(attribute) is not None:
                return  # another one in its place, which no optimizer of plain torch would train either
            made = [(attribute, value)]
        else:
            made = [(f"{attribute}.{name}", parameter) for name, parameter in value.named_parameters()]
        held = (
            {id(parameter) for part in list(self._modules) for parameter in part._parameters.values()} if made else {}
        )
        for name, parameter in made:
            if id(parameter) not in held:
                raise FrameError(
                    f"parameter {name!r} of shape {tuple(parameter.shape)} was made in module {known[0]!r} during the "
                    "step: it would be on one rank only, and no optimizer would train it. Make it in __init__, or "
                    "run one forward of the module before smp.DistributedModel and the optimizer get it"
                )
        if isinstance(value, nn.Module):  # it may get parameters later
            for name, part in value.named_modules(prefix=f"{known[0]}.{attribute}"):
                self._modules.setdefault(part, (name, *known[1:]))


elsewhere = Elsewhere()


def _inside_a_module(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code is _CALL:
            return True
        frame = frame.f_back
    return False
