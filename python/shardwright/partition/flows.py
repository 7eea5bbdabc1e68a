"""State that a forward hands on in objects and global variables that modules share.

On several ranks, microbatches take turns at every call that leaves the rank. What one execution leaves there for a
later one, another microbatch may overwrite between the two, unless both happen within one module that lies whole on a
rank. So of every such flow the innermost module around all users is kept, its *scope*.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CrossingFlow:
    """State that goes from one execution to another.

    Attributes:
        scope: The path of the innermost module that encloses all users.
        what: The state, in words.
        meets_backward: Whether a backward uses or changes it, which comes too late even where all is on one rank.
    """

    scope: str
    what: str
    meets_backward: bool = False


def scope_of(users: Iterable[str], executions: Mapping[str, int]) -> str | None:
    """The scope of what these modules share; None if it stays within one execution.

    Args:
        users: The paths of the modules.
        executions: How often each module ran in the forward.
    """
    distinct = sorted(set(users))
    if sum(executions.get(path, 0) for path in distinct) <= 1:
        return None
    parts = [path.split(".") if path else [] for path in distinct]
    if len(parts) == 1:
        return ".".join(parts[0][:-1])
    common: list[str] = []
    for names in zip(*parts, strict=False):
        if len(set(names)) > 1:
            break
        common.append(names[0])
    return ".".join(common)
