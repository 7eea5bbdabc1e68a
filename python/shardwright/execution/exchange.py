"""What a request and its response say about tensors beyond their bytes: sharing, views and writes.

A request's body is ``(args, kwargs, sharing)``, a response's ``(result, returned)``. Tensors are numbered in the
order in which :func:`shardwright._core.flatten` meets them, each once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from shardwright.errors import FrameError
from shardwright.frames import Frame, cut

#: How a result is found at the requester instead of sent: the kind, the index it refers to, sizes, strides, offset.
Recipe = tuple[str, int, list[int], list[int], int]


def storage_id(tensor: torch.Tensor) -> int:
    """Identifies the memory behind a tensor."""
    return int(tensor.untyped_storage()._cdata)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill their memory without gaps or overlap, so that strides can travel."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def sharing_of(tensors: list[torch.Tensor]) -> dict[str, Any] | None:
    """What the executing rank cannot see: arguments that share memory, and those sent in another layout."""
    shared: dict[int, list[int]] = {}
    if len(tensors) > 1:
        for index, tensor in enumerate(tensors):
            shared.setdefault(storage_id(tensor), []).append(index)
    groups = [group for group in shared.values() if len(group) > 1]
    relaid = [index for index, tensor in enumerate(tensors) if not is_dense(tensor)]
    return {"groups": groups, "relaid": relaid} if groups or relaid else None


def containers_of(tree: Any) -> list[list[Any] | dict[Any, Any]]:
    """The lists and dicts in an argument tree, in order."""
    found: list[list[Any] | dict[Any, Any]] = []
    stack = [tree]
    while stack:
        value = stack.pop()
        if isinstance(value, dict):
            found.append(value)
            stack.extend(value.values())
        elif isinstance(value, list):
            found.append(value)
            stack.extend(value)
        elif isinstance(value, tuple):
            stack.extend(value)
    return found


class Arguments:
    """The arguments of one execution, as they were before it, to see afterwards what it did to them."""

    def __init__(self, module: str, tensors: list[torch.Tensor], tree: Any, sharing: dict[str, Any] | None) -> None:
        """Remember versions and the contents of lists and dicts."""
        self.module = module
        self.tensors = tensors
        self.sharing = sharing or {"groups": [], "relaid": []}
        self._versions = [_version(tensor) for tensor in tensors]
        self._containers = [(container, container.copy()) for container in containers_of(tree)]

    def check_containers(self) -> None:
        """Raise :class:`FrameError` if a list or dict was changed: that change cannot travel back."""
        for container, before in self._containers:
            pairs = zip(_items(container), _items(before), strict=False)
            if len(container) != len(before) or any(a is not b for a, b in pairs):
                raise FrameError(
                    f"module {self.module!r} changed a {type(container).__name__} that it was given; it runs on another "
                    "rank than its caller, where that change cannot be seen: return the new value instead"
                )

    def written(self) -> list[int]:
        """The indices of the tensors written in place; refuses writes that other arguments would have to show."""
        written = [i for i, t in enumerate(self.tensors) if _version(t) != self._versions[i]]
        for index in written:
            for group in self.sharing["groups"]:
                if index in group:
                    raise FrameError(
                        f"module {self.module!r} wrote in place to an argument that shares memory with another "
                        "argument; on another rank they are separate copies: pass a clone(), or only one of them"
                    )
        return written


def _items(container: list[Any] | dict[Any, Any]) -> list[Any]:
    if isinstance(container, list):
        return container
    return [part for item in container.items() for part in item]


def _view(tensor: torch.Tensor) -> torch.Tensor:
    with torch.set_grad_enabled(tensor.requires_grad):
        return tensor.view_as(tensor)


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


@dataclass(slots=True)
class Returned:
    """How results relate to arguments and to each other.

    Attributes:
        recipes: By result index, how the requester finds it among what it already has.
        watch: Results that share memory in a way that cannot be rebuilt.
        watch_arguments: Arguments that such results share memory with.
        written: The arguments that were written to.
    """

    recipes: dict[int, Recipe] = field(default_factory=dict)
    watch: list[int] = field(default_factory=list)
    watch_arguments: list[int] = field(default_factory=list)
    written: list[int] = field(default_factory=list)

    def as_value(self, arguments: Arguments) -> dict[str, Any] | None:
        """The form that travels; None in the ordinary case that nothing needs saying."""
        if not (self.recipes or self.watch or self.written):
            return None
        return {
            "recipes": self.recipes,
            "watch": self.watch,
            "watch_arguments": self.watch_arguments,
            # A view is a further tensor of the response, also where the argument itself is a result.
            "written": [(index, _view(arguments.tensors[index])) for index in self.written],
        }


def describe_results(results: list[torch.Tensor], arguments: Arguments) -> Returned:
    """Say which results are arguments, or views of arguments or of other results."""
    returned = Returned(written=arguments.written())
    argument_of = {id(tensor): index for index, tensor in enumerate(arguments.tensors)}
    result_of = {id(tensor): index for index, tensor in enumerate(results)}
    memory: dict[int, int] = {}
    argument_memory = {storage_id(tensor): index for index, tensor in enumerate(arguments.tensors)}
    for index, tensor in enumerate(results):
        argument = argument_of.get(id(tensor))
        if argument is not None:
            returned.recipes[index] = ("argument", argument, [], [], 0)
            continue
        base = tensor._base if tensor._is_view() else None
        if base is not None and tensor.dtype == base.dtype and tensor.requires_grad == base.requires_grad:
            view = (list(tensor.shape), list(tensor.stride()), tensor.storage_offset() - base.storage_offset())
            argument = argument_of.get(id(base))
            if argument is not None and argument not in arguments.sharing["relaid"]:
                returned.recipes[index] = ("view of argument", argument, *view)
                continue
            result = result_of.get(id(base))
            if result is not None and result != index and is_dense(base):
                returned.recipes[index] = ("view of result", result, *view)
                continue
        key = storage_id(tensor)
        if key in argument_memory:
            returned.watch.append(index)
            returned.watch_arguments.append(argument_memory[key])
        elif key in memory:
            returned.watch += [memory[key], index]
        memory.setdefault(key, index)
    return returned


def rebuild_results(
    frame: Frame, module: str, received: list[torch.Tensor], needs: list[bool], recipes: dict[int, Recipe],
    given: list[torch.Tensor],
) -> tuple[list[torch.Tensor], list[tuple[Any, int]]]:
    """Make the requester's tensors of a response.

    Returns:
        The tensors by index, and the slot and index of each that was cut.
    """
    tensors: dict[int, torch.Tensor] = {}
    slots: list[tuple[Any, int]] = []
    views: list[tuple[int, Recipe]] = []
    for index, tensor in enumerate(received):
        recipe = recipes.get(index)
        if recipe is None:
            if needs[index]:
                tensor, slot = cut(tensor, f"a result of module {module!r}")
                slots.append((slot, index))
            tensors[index] = tensor
        elif recipe[0] == "argument":
            tensors[index] = given[recipe[1]]
        else:
            views.append((index, recipe))
    for index, (kind, base_index, shape, stride, offset) in views:
        base = given[base_index] if kind == "view of argument" else tensors[base_index]
        tensors[index] = base.as_strided(shape, stride, base.storage_offset() + offset)
    return [tensors[index] for index in range(len(received))], slots
