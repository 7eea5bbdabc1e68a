"""Which functions of this process are not what they were."""

from __future__ import annotations

import copyreg
import json
import signal
import sys
from collections import Counter
from types import ModuleType, SimpleNamespace
from typing import Any

from torch.nn.modules import module as torch_modules
from torch.optim import optimizer as torch_optimizers

OWN = ("shardwright", "tests")
#: Where torch keeps what its functions register for all modules and optimizers; those in no list have their own.
REGISTERED_BY = {
    "_global_optimizer_pre_hooks": "register_optimizer_step_pre_hook",
    "_global_optimizer_post_hooks": "register_optimizer_step_post_hook",
    "_global_forward_pre_hooks": "register_module_forward_pre_hook",
    "_global_forward_hooks": "register_module_forward_hook",
}
Seen = dict[tuple[str, str], Any]


def is_own(value: Any) -> bool:
    """Whether a class or a function is the library's."""
    return str(getattr(getattr(value, "__func__", value), "__module__", "")).partition(".")[0] in OWN


def is_of_process_groups(value: Any) -> bool:
    """Whether it is the ``sys.excepthook`` that torch leaves once there has been a process group."""
    return getattr(value, "__module__", "") == "torch.distributed.distributed_c10d"


def seen() -> Seen:
    """Every function of every module and class of the process, less the library's own; hooks, handlers of signals."""
    found: Seen = {}
    for module in [module for module in sys.modules.values() if issubclass(type(module), ModuleType)]:
        name = module.__name__
        if name.partition(".")[0] in OWN:
            continue
        for attribute, value in list(vars(module).items()):
            if issubclass(type(value), type) and not is_own(value):  # objects that are deprecated warn if asked
                look_into(value, found)
            if (
                callable(value) or type(value) is SimpleNamespace
            ) and name != "__main__":  # which may stand for a class
                found[name, attribute] = value
    for module in (torch_modules, torch_optimizers):
        for attribute, value in vars(module).items():
            if attribute.startswith("_global_") and isinstance(value, dict):
                found[module.__name__, REGISTERED_BY.get(attribute, attribute)] = tuple(
                    filter(callable, value.values())
                )
    for number in signal.valid_signals() & set(signal.Signals):
        found["signal", signal.Signals(number).name] = signal.getsignal(number)
    found["copyreg", "dispatch_table"] = tuple(copyreg.dispatch_table.items())
    return found


def look_into(kind: type, found: Seen) -> None:
    """What a class has of its own; it is called ``object`` if it is the script's."""
    name = "builtins.object" if kind.__module__ == "__main__" else f"{kind.__module__}.{kind.__qualname__}"
    key = f"{name} {id(kind)}"  # several may have one name
    for attribute, value in list(vars(kind).items()):
        if callable(value) or isinstance(value, (classmethod, staticmethod, property)):
            found[key, attribute] = value


def replaced(before: Seen, now: Seen) -> list[str]:
    """What is not what it was, and what the library has added to."""

    def is_other(place: tuple[str, str], value: Any) -> bool:
        if place in before:
            was = before[place]
            return was != value if isinstance(value, tuple) else was is not value and not is_of_process_groups(value)
        return is_own(value)

    places = [place for place, value in now.items() if is_other(place, value)]
    kinds = {owner for owner, _ in now if " " in owner}
    places += [place for place in before.keys() - now.keys() if place[0] in kinds]
    return sorted({f"{owner.partition(' ')[0]}.{name}" for owner, name in places})


class _Watch:
    def __init__(self) -> None:
        self.before = seen()
        #: Where the script is.
        self.within = "stepping"
        #: How often somebody has looked, which takes a second.
        self.looks: Counter[str] = Counter()


_MAX_LOOKS = 2


def begin() -> None:
    """What stands everywhere now is what is to stand there."""
    global _watch
    _watch = _Watch()


def within(moment: str) -> None:
    """The script is there now."""
    _watch.within = moment


def tell(moment: str | None = None) -> None:
    """Print what is replaced now, if nobody has looked twice at such a moment; without one, where the script is."""
    moment = moment or _watch.within
    _watch.looks[moment] += 1
    if _watch.looks[moment] <= _MAX_LOOKS:
        print(json.dumps({"moment": moment, "replaced": replaced(_watch.before, seen())}), flush=True)
