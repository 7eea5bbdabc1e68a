"""Applies a partition on one rank: which parts of a model it keeps, and which it releases."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NoReturn

import torch
from torch import nn

from shardwright.contents import INTERNAL
from shardwright.errors import NotOwnedError
from shardwright.model.adapters import release_to, unknown_tensors
from shardwright.model.local import LocalTensors
from shardwright.model.remote_attribute import RemoteAttribute
from shardwright.model.sentinel import Sentinel, release
from shardwright.partition.decision import Decision
from shardwright.partition.tree import ModelTree, join_path

_Slots = tuple[tuple[dict[str, torch.Tensor | None], str, Sentinel, str], ...]


class Ownership(LocalTensors):
    """One rank's share of a partitioned model.

    Created by `apply_ownership`. Names are those of the model, without a prefix, and the same on every rank.
    """

    def __init__(self, module: nn.Module, decision: Decision, pp_rank: int) -> None:
        """Replace what `pp_rank` does not own by sentinels. See `apply_ownership`."""
        tree = ModelTree.of(module)
        self.module = module
        self.decision = decision
        self.pp_rank = pp_rank
        self._paths = dict(tree.path_of)
        self._canonical = dict(tree.names_to_paths())
        #: The sentinels on this rank by full name. A tied one is listed under each of its names.
        self.sentinels: dict[str, Sentinel] = {}
        self._checks: dict[int, _Slots] = {}
        #: The names of all parameters and buffers that the model has, on any rank.
        self._tensors = {name for entry in (*tree.parameters, *tree.buffers) for name in entry.names}
        self._replace(tree)
        self._replace_attributes(tree)

    def _replace(self, tree: ModelTree) -> None:
        decision = self.decision
        for kind, entries, rows in (
            ("parameter", tree.parameters, decision.parameters),
            ("buffer", tree.buffers, decision.buffers),
        ):
            ranks = {row.name: row.ranks for row in rows}
            absent = {
                index: Sentinel(
                    held.tensor, name=held.name, owner=ranks[held.name][0], is_parameter=kind == "parameter"
                )
                for index, held in enumerate(entries)
                if self.pp_rank not in ranks[held.name]
            }
            for entry in tree.modules:
                indices = entry.parameters if kind == "parameter" else entry.buffers
                for name, index in indices.items():
                    if index in absent:
                        getattr(entry.module, f"_{kind}s")[name] = absent[index]
                        self.sentinels[join_path(entry.path, name)] = absent[index]
            for index, sentinel in absent.items() if kind == "parameter" else ():
                holders = [tree.by_path[path].module for path in entries[index].holders]
                release(entries[index].tensor, sentinel, holders)

    def _replace_attributes(self, tree: ModelTree) -> None:
        for full_name, ranks in self.decision.attributes.items():
            path, _, name = full_name.rpartition(".")
            module = tree.by_path[path].module
            if name in module._modules or name in INTERNAL:
                continue  # `self.child = self.child.to(...)`, or attributes of PyTorch
            # A property stores its value under another name.
            if self.pp_rank not in ranks and not hasattr(getattr(type(module), name, None), "__set__"):
                module.__dict__[name] = RemoteAttribute(full_name, ranks)

    def owner(self, path: str) -> int:
        """Return the pp_rank that runs the module with this path, or with this path as one of its other names."""
        return self.decision.modules[self._canonical[path]]

    def path_of(self, module: nn.Module) -> str | None:
        """Return the path that a module had when the model was divided; None for later ones."""
        return self._paths.get(id(module))

    def owner_of(self, path: str) -> int:
        """Return the pp_rank that runs a module; of one that was made later, that of what it is in."""
        while path not in self._canonical:
            path = path.rpartition(".")[0]
        return self.owner(path)

    def take_over(self, path: str, part: nn.Module) -> list[torch.Tensor]:
        """Release the tensors that a part has got since and other ranks own; return those that are this rank's."""
        mine = []
        for name, table, own, tensor in list(unknown_tensors(part, path, self._tensors)):
            owner = self.owner_of(name.rpartition(".")[0])
            self._tensors.add(name)
            if owner == self.pp_rank:
                mine.append(tensor)
            else:
                self.sentinels[name] = release_to(owner, name, table, own, tensor)
        return mine

    def forget_checks(self) -> None:
        """Look anew at which weights remote modules have, after some were added or deleted on all ranks."""
        self._checks.clear()

    def is_local(self, path: str) -> bool:
        """Return whether this rank runs the module with this path."""
        return self.owner(path) == self.pp_rank

    def check(self, module: nn.Module) -> None:
        """Raise an error if weights of a remote module were replaced by other tensors on this rank.

        ``torch.func.functional_call``, and assignments to a weight after the partition, replace weights. The rank that
        owns the module would not see the replacement. The check is cheap enough for every remote call.
        """
        slots = self._checks.get(id(module))
        if slots is None:
            slots = self._checks[id(module)] = self._slots(module)
        for holder, name, expected, full_name in slots:
            found = holder.get(name)
            if found is not expected and not (isinstance(found, Sentinel) and found.sentinel_name == full_name):
                self._raise_swapped(found, expected, full_name)

    def _slots(self, module: nn.Module) -> _Slots:
        slots = []
        for submodule in module.modules():
            path = self._paths.get(id(submodule))
            if path is None:
                continue
            if isinstance(submodule, torch.jit.ScriptModule):  # its compiled code owns its tensors
                continue
            holders: tuple[dict[str, torch.Tensor | None], ...] = (submodule._parameters, submodule._buffers)  # type: ignore[assignment]
            for holder in holders:
                for name in holder:
                    sentinel = self.sentinels.get(join_path(path, name))
                    if sentinel is not None:
                        slots.append((holder, name, sentinel, sentinel.sentinel_name))
        return tuple(slots)

    def _raise_swapped(self, found: object, expected: Sentinel, full_name: str) -> NoReturn:
        raise NotOwnedError(
            f"{full_name!r} lives on pp_rank {expected.sentinel_owner}, but on pp_rank {self.pp_rank} it was replaced "
            f"by {type(found).__name__} after the partition (torch.func.functional_call, or an assignment); the "
            "replacement would have no effect. Change weights on every rank before the first step, or through "
            "model.load_state_dict()"
        )

    def local_named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Return an iterator over the modules this rank runs, with their paths, each once, in the model's order."""
        return (
            (path, module)
            for path, module in self.module.named_modules()
            if self.decision.modules.get(path) == self.pp_rank
        )


def apply_ownership(module: nn.Module, decision: Decision, pp_rank: int, rank: int | None = None) -> Ownership:
    """Release what `decision` places on other ranks than `pp_rank`, and return this rank's share of the model.

    Parameters and buffers owned elsewhere become sentinels; tied names share one. The storage of such parameters is
    freed even if an optimizer or a list still refers to them, and those references become sentinels too. The storage of
    buffers is not freed: the script may still use a tensor that it registered. No random number is drawn.

    Raises:
        PartitionError: The decision was made for another model. The message names the global `rank`.
    """
    decision.check_against(module, rank=rank)
    # The first step may be an evaluation in inference mode, with training to follow.
    with torch.inference_mode(False):
        return Ownership(module, decision, pp_rank)
