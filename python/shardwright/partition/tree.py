"""The module tree as plain data: paths, parents, and which module directly holds which parameters and buffers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from shardwright import quantized
from shardwright.delayed.materialise import is_delayed
from shardwright.errors import PartitionError


def join_path(path: str, name: str) -> str:
    """Return the full name of `name` inside the module at `path` (the root's path is empty)."""
    return f"{path}.{name}" if path else name


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Return the size in bytes of a tensor's elements, with their scales: what a rank that owns it keeps."""
    return quantized.num_bytes(tensor)


def has_forward(module: nn.Module) -> bool:
    """Return whether a module can be executed. A ``ModuleList``, for example, cannot."""
    return getattr(module.forward, "__func__", None) is not nn.Module.forward


def address(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's values; 0 for a tensor without any."""
    has_memory = tensor.layout is torch.strided and not tensor.is_meta and not is_delayed(tensor)
    has_memory = has_memory and quantized.has_memory(tensor)
    return tensor.data_ptr() if has_memory else 0


def hooks_on(module: nn.Module) -> list[Any]:
    """Return the hooks of a module's forward and backward."""
    every = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return [hook for hooks in every for hook in hooks.values()]


@dataclass(frozen=True, kw_only=True)
class ModuleEntry:
    """One module of the tree.

    Attributes:
        path: Its first name in ``named_modules()``; empty for the root.
        module: The module.
        parents: The paths of all modules that hold it as a child; the first is its parent in the tree.
        aliases: All names it has, its path first.
        parameters: Local name to the index of the parameter in `ModelTree.parameters`, for those held directly.
        buffers: Local name to the index of the buffer in `ModelTree.buffers`, for those held directly.
    """

    path: str
    module: nn.Module
    parents: tuple[str, ...]
    aliases: tuple[str, ...]
    parameters: Mapping[str, int]
    buffers: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """One parameter or buffer, with every name under which the model reaches it.

    Attributes:
        names: All its full names, the first as in ``named_parameters()``.
        holders: Paths of the modules that hold it directly.
    """

    tensor: torch.Tensor
    names: tuple[str, ...]
    holders: tuple[str, ...]

    @property
    def name(self) -> str:
        """The first name."""
        return self.names[0]


@dataclass(frozen=True, kw_only=True)
class ModelTree:
    """A model's modules in ``named_modules()`` order, and its parameters and buffers, each once."""

    modules: tuple[ModuleEntry, ...]
    parameters: tuple[TensorEntry, ...]
    buffers: tuple[TensorEntry, ...]
    by_path: Mapping[str, ModuleEntry] = field(repr=False)
    path_of: Mapping[int, str] = field(repr=False)

    @staticmethod
    def of(module: nn.Module) -> ModelTree:
        """Build the tree of `module`.

        Raises:
            PartitionError: If a parameter has no shape yet (a lazy module that has not seen data).
        """
        aliases: dict[int, list[str]] = {}
        objects: dict[int, nn.Module] = {}
        for path, found in module.named_modules(remove_duplicate=False):
            objects[id(found)] = found
            aliases.setdefault(id(found), []).append(path)
        paths = {key: names[0] for key, names in aliases.items()}
        parents: dict[int, list[str]] = {key: [] for key in paths}
        for key, found in objects.items():
            for child in found._modules.values():
                if child is not None and paths[key] not in parents[id(child)]:
                    parents[id(child)].append(paths[key])

        parameters = _TensorTable()
        buffers = _TensorTable()
        entries = [
            ModuleEntry(
                path=paths[key],
                module=found,
                parents=tuple(parents[key]),
                aliases=tuple(aliases[key]),
                parameters=parameters.add(found._parameters, paths[key], aliases[key]),
                buffers=buffers.add(found._buffers, paths[key], aliases[key]),
            )
            for key, found in objects.items()
        ]
        return ModelTree(
            modules=tuple(entries),
            parameters=parameters.entries(),
            buffers=buffers.entries(),
            by_path={entry.path: entry for entry in entries},
            path_of=paths,
        )

    def names_to_paths(self) -> Iterator[tuple[str, str]]:
        """Yield every name of every module, with the path of the module."""
        for entry in self.modules:
            for alias in entry.aliases:
                yield alias, entry.path


class _TensorTable:
    def __init__(self) -> None:
        #: By id of a tensor: its index, the tensor, its names and its holders.
        self._rows: dict[int, tuple[int, torch.Tensor, list[str], dict[str, None]]] = {}

    def add(self, held: Mapping[str, torch.Tensor | None], path: str, aliases: list[str]) -> dict[str, int]:
        """Return the index of each tensor that a module holds, by its name there."""
        return {name: self._add(tensor, path, aliases, name) for name, tensor in held.items() if tensor is not None}

    def _add(self, tensor: torch.Tensor, path: str, aliases: list[str], name: str) -> int:
        if isinstance(tensor, (UninitializedBuffer, UninitializedParameter)):
            raise PartitionError(
                f"{join_path(path, name)!r} has no shape yet: run a forward once so that the lazy module {path!r} "
                "learns its sizes, then build smp.DistributedModel"
            )
        index, _, names, holders = self._rows.setdefault(id(tensor), (len(self._rows), tensor, [], {}))
        names.extend(join_path(alias, name) for alias in aliases)
        holders[path] = None
        return index

    def entries(self) -> tuple[TensorEntry, ...]:
        return tuple(
            TensorEntry(tensor=tensor, names=tuple(names), holders=tuple(holders))
            for _, tensor, names, holders in self._rows.values()
        )


def why_without_values(tree: ModelTree) -> str | None:
    """Return why a model has no values to compute with, as text; None if it has them."""
    if any(entry.tensor.is_meta for entry in tree.parameters):
        return "is on the meta device"
    if any(is_delayed(entry.tensor) for entry in tree.parameters):
        return "has delayed parameters (smp.delay_param_initialization)"
    return None


def device_of(tree: ModelTree) -> torch.device:
    """Return the device of the model's first tensor; the CPU if it has none."""
    for entry in (*tree.parameters, *tree.buffers):
        return entry.tensor.device
    return torch.device("cpu")
