"""Temporary replacement of functions; :mod:`shardwright.guards` lists all replacements."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from enum import Enum, auto
from typing import Any, NamedTuple

_ORIGINAL = "_shardwright_original"
_INHERITED = object()
#: The owner where it is a class of the script's.
ANY_CLASS = object


def original_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that a replacement replaces, or the function itself."""
    original: Callable[..., Any] = getattr(function, _ORIGINAL, function)
    return original


@contextlib.contextmanager
def replaced(owner: Any, functions: Mapping[str, Any]) -> Iterator[None]:
    """Replace attributes of a class or module, by name, inside the block.

    What stands there already is not put there twice, so that blocks can be nested. A replacement finds what it replaces
    by :func:`original_of`.
    """
    with contextlib.ExitStack() as stack:
        for name, function in functions.items():
            own = vars(owner).get(name, _INHERITED)
            if own is function:
                continue
            setattr(function, _ORIGINAL, getattr(owner, name, None))
            setattr(owner, name, function)
            stack.callback(_put_back, owner, name, own)
        yield


def _put_back(owner: Any, name: str, own: Any) -> None:
    if own is _INHERITED:
        delattr(owner, name)
    else:
        setattr(owner, name, own)


class When(Enum):
    """When a function is replaced."""

    JOB = "while the process is a rank of a job"
    SEVERAL_RANKS = "while it is a rank of a job of several ranks"
    PIPELINED = "while it is a rank of a job with several pipeline ranks"
    DIVIDED = "while it is a rank of a job that divides parameters, by pipeline or tensor parallelism, or their updates"
    FLOAT16 = "while it is a rank of a job that scales losses"
    CREATED = "in a context that says something of the modules created in it"
    REGISTERED = "from the registration of the class on"
    TRACED = "while a model is traced"
    VERIFIED = "while a step is verified"


class How(Enum):
    """How a function is replaced."""

    REPLACED = auto()
    #: The owner's function of that name registers it, as a hook that is removed again.
    HOOK = auto()
    #: What stands in the table makes it anew each time, and puts it in its place.
    MADE = auto()


class Guard(NamedTuple):
    """A replacement of a function.

    Attributes:
        owner: The class or the module that has it.
        name: Its name there.
        replacement: What stands there meanwhile, or who makes that.
        when: From when to when.
        why: What would happen otherwise.
        test: Which test shows that it does what it is for.
        how: How it comes there.
    """

    owner: Any
    name: str
    replacement: Any
    when: When
    why: str
    test: str
    how: How = How.REPLACED

    def in_place(self) -> contextlib.AbstractContextManager[Any]:
        """Replace the function inside the block."""
        if self.how is How.HOOK:
            handle: contextlib.AbstractContextManager[Any] = getattr(self.owner, self.name)(self.replacement)
            return handle
        return replaced(self.owner, {self.name: self.replacement})
