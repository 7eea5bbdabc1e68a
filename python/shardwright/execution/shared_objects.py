"""Detection of changes to objects that modules on several ranks hold, where each rank has its own copy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from shardwright.contents import INTERNAL, reached
from shardwright.errors import FrameError


class RemoteHolders:
    """The remote modules of a model, which still hold the objects that the script assigned to them."""

    def __init__(self, modules: Mapping[str, nn.Module], ranks: Mapping[str, int], reads: Mapping[str, int]) -> None:
        """Create the record of remote modules.

        Args:
            modules: The modules, by path.
            ranks: The global rank that runs each module, by path.
            reads: By full name, the attributes that modules on other ranks read, with the global rank of a reader.
        """
        self._modules = modules
        self._ranks = ranks
        self._reads = {repr(name): rank for name, rank in reads.items()}
        #: The ids of values that no remote module was found to hold in this step.
        self._private: set[int] = set()

    def begin_step(self) -> None:
        """Reset the cache, because the script may have changed which modules hold which objects."""
        self._private.clear()

    def refuse(self, changed: Iterable[tuple[str, Any]]) -> None:
        """Raise :class:`FrameError` if another rank has a copy of one of these changed values, or reads its attribute.

        Args:
            changed: The quoted full name of each attribute of a local module, with the changed value that it holds;
                None if the attribute itself was set to another value.
        """
        changed = list(changed)
        for name, _ in changed if self._reads else ():
            if name in self._reads:
                raise FrameError(
                    f"attribute {name} was changed, though no trace saw that: a module on rank {self._reads[name]} "
                    "reads it, whose copy has not changed. Let the first step take the branch that changes it, return "
                    "the value, or place both modules on one rank (smp.set_partition)"
                )
        wanted = {id(value): name for name, value in changed if id(value) not in self._private}
        if not wanted:
            return
        seen: set[int] = set()
        for path, module in self._modules.items():
            values = [(name, value) for name, value in vars(module).items() if name not in INTERNAL]
            for attribute, value in [*module._buffers.items(), *values]:
                for part in reached(value, seen):
                    if id(part) in wanted:
                        raise FrameError(
                            f"what {wanted[id(part)]} holds was changed, which the trace did not see: it is also what "
                            f"{f'{path}.{attribute}'!r} holds, and that module runs on rank {self._ranks[path]}, whose "
                            "copy has not changed. Let the first step take the branch that changes it, pass the value "
                            "as an argument of the module, or place both modules on one rank (smp.set_partition)"
                        )
        self._private.update(wanted)
