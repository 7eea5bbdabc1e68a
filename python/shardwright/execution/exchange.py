"""Metadata that requests and responses carry about tensors: shared memory, views and in-place writes.

Tensors are numbered in the order in which :func:`shardwright._core.flatten` visits them, each once; a response may
carry additional ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node

from shardwright import _core
from shardwright.errors import FrameError
from shardwright.execution.given import first_changed, snapshots
from shardwright.execution.layout import layouts_of, restride
from shardwright.execution.recipes import follow, replayable_base, view_of
from shardwright.execution.sparse import take_apart
from shardwright.frames import Frame, Slot, cut, owning_edge
from shardwright.frames.remote import is_remote, when_here
from shardwright.frames.watch import memory_id
from shardwright.values.tensors import is_dense


def sharing_of(tensors: list[torch.Tensor]) -> list[list[int]]:
    """Return the groups of arguments that share memory, by index; the executing rank cannot detect them."""
    shared: dict[int, list[int]] = {}
    if len(tensors) > 1:
        for index, tensor in enumerate(tensors):
            if not is_remote(tensor):  # remote tensors share memory with nothing
                shared.setdefault(memory_id(tensor), []).append(index)
    return [group for group in shared.values() if len(group) > 1]


class Arguments:
    """The arguments of one execution, recorded before it, to detect afterwards what it changed."""

    def __init__(self, module: str, tensors: list[torch.Tensor], tree: Any, notes: _core.ArgumentNotes) -> None:
        """Record the versions and autograd histories of the tensors, and the contents of containers."""
        self.module = module
        self.tensors = tensors
        #: The caller's notes on them.
        self.notes = notes
        #: Whether the caller does not have these tensors, because another rank created them and sent them here.
        self.private = notes.private
        #: If so, the indices of those whose memory that rank keeps.
        self.kept = notes.kept if self.private else []
        self._before = _core.TensorsBefore(tensors)
        self.are_unrelated_to = self._before.are_unrelated_to
        self._containers = snapshots(tree)

    def check_containers(self) -> None:
        """Raise :class:`FrameError` if a container was changed: the change cannot be sent back."""
        container = first_changed(self._containers)
        if container is not None:
            raise FrameError(
                f"module {self.module!r} changed a {type(container).__name__} that it was given; it runs on another "
                "rank than its caller, where that change cannot be seen: return the new value instead"
            )

    def written(self) -> list[int]:
        """Return the indices of tensors written in place; raise :class:`FrameError` if the caller could not see it."""
        if self._before.are_reattached():
            raise FrameError(
                f"module {self.module!r} called requires_grad_() or detach_() on an argument; it runs on another rank "
                "than its caller, where that cannot be seen: do it on a detach() or clone(), or in the caller"
            )
        written = self._before.written()
        for index in written:
            if index in self.notes.overlapping:
                raise FrameError(
                    f"module {self.module!r} wrote in place to an argument whose elements share memory (an expanded "
                    "tensor); on another rank each has a place of its own: pass a clone()"
                )
            if index in self.kept:
                raise FrameError(
                    f"module {self.module!r} wrote in place to its argument, which the module before it kept on "
                    "another rank, where that write cannot be seen: write to a clone()"
                )
            if any(index in group for group in self.notes.shared):
                raise FrameError(
                    f"module {self.module!r} wrote in place to an argument that shares memory with another "
                    "argument; on another rank they are separate copies: pass a clone(), or only one of them"
                )
        return written

    def rewritten(self, index: int) -> Node | None:
        """Return the new autograd history of an argument that was written in grad mode; None if only values changed."""
        node: Node | None = self._before.rewritten(index)
        return node


@dataclass(slots=True)
class Returned:
    """The tensors of a response, and how they relate to arguments and to each other.

    Attributes:
        tensors: The results, then the bases of results that share memory, then the arguments that were written to.
        needs: For each of them, whether it gets a gradient.
        recipes: By number, how the requester obtains a result from tensors that it already has.
        notes: What else is said of them, as keyword arguments of :class:`shardwright._core.ResultNotes`.
    """

    tensors: list[torch.Tensor]
    needs: list[bool]
    recipes: dict[int, _core.Recipe] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)

    def note(self, name: str, values: Iterable[Any]) -> None:
        """Add values, if there are any, to a list of the notes."""
        for value in values:
            self.notes.setdefault(name, []).append(value)


def describe_results(
    frame: Frame, results: list[torch.Tensor], arguments: Arguments, whole: list[torch.Tensor]
) -> Returned:
    """Describe which results are arguments, or views of arguments or other results, and which arguments were written.

    Args:
        frame: The frame of the execution.
        results: The tensors of the result.
        arguments: The arguments, as recorded before the execution.
        whole: The arguments, with sparse and nested ones.
    """
    if arguments.are_unrelated_to(results) and frame.elsewhere.is_empty:
        return Returned(results, [results[0].requires_grad])
    dense, composites = take_apart(results, f"the result of module {arguments.module!r}", whole)
    written = arguments.written()
    if arguments.private:
        written = []
    replay = not frame.hooked  # views that require a gradient and are recreated by the requester would bypass the hooks
    returned = Returned(list(dense), [])
    returned.note("composites", composites)
    numbers = {} if arguments.private else {id(tensor): number for number, tensor in enumerate(arguments.tensors)}
    _add_bases(returned, numbers, replay)
    _find_recipes(returned, numbers, arguments, replay)
    _find_shared(frame, returned, arguments)
    returned.needs = [
        tensor.requires_grad and place not in returned.recipes for place, tensor in enumerate(returned.tensors)
    ]
    laid = layouts_of(returned.tensors).get("strides", ())
    returned.note("strides", ((place, strides) for place, strides in laid if place not in returned.recipes))
    for index in written:
        returned.note("written", [(index, len(returned.tensors))])
        node = arguments.rewritten(index)
        # A separate view, because the argument itself may be a result too.
        with torch.set_grad_enabled(node is not None):
            tensor = arguments.tensors[index]
            returned.tensors.append(tensor.detach() if node is None else tensor.view_as(tensor))
        returned.needs.append(node is not None)
    return returned


def _find_recipes(returned: Returned, numbers: dict[int, int], arguments: Arguments, replay: bool) -> None:
    """Find the results that the requester can obtain from arguments, given their numbers, or from other results."""
    places = {id(tensor): place for place, tensor in enumerate(returned.tensors)}
    for place, tensor in enumerate(returned.tensors):
        argument = numbers.get(id(tensor))
        if argument is not None:
            returned.recipes[place] = _core.Recipe(argument=argument, requires_grad=tensor.requires_grad)
            continue
        base = replayable_base(tensor, replay)
        if base is None:
            continue
        argument = numbers.get(id(base))
        if argument is not None and argument not in arguments.notes.relaid:
            view = view_of(tensor, base)
            returned.recipes[place] = _core.Recipe(argument=argument, view=view, requires_grad=tensor.requires_grad)
        elif argument is None and base is not tensor and id(base) in places and is_dense(base):
            view, number = view_of(tensor, base), places[id(base)]
            returned.recipes[place] = _core.Recipe(result=number, view=view, requires_grad=tensor.requires_grad)
    returned.note("recipes", returned.recipes.items())


def _add_bases(returned: Returned, arguments: dict[int, int], replay: bool) -> None:
    """Add the bases that several results are views of, so that the requester can recreate the views."""
    known = arguments.keys() | {id(tensor) for tensor in returned.tensors}
    bases: dict[int, torch.Tensor] = {}
    views: Counter[int] = Counter()
    elements: Counter[int] = Counter()
    for tensor in returned.tensors:
        base = replayable_base(tensor, replay)
        if base is not None and id(base) not in known and is_dense(base):
            bases[id(base)] = base
            views[id(base)] += 1
            elements[id(base)] += tensor.numel()
    for key, base in bases.items():
        if views[key] > 1 and base.numel() <= 2 * elements[key]:
            returned.tensors.append(base)


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the range of bytes that a tensor occupies in its storage."""
    start = int(tensor.storage_offset())
    end = start + 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start * tensor.element_size(), (end if tensor.numel() else start) * tensor.element_size()


def _find_shared(frame: Frame, returned: Returned, arguments: Arguments) -> None:
    """Find memory that is shared in ways that views cannot reproduce; it must not be written to any more."""
    users: dict[int, list[tuple[bool, int, int, tuple[int, int]]]] = {}
    for index, tensor in enumerate(arguments.tensors):
        memory = memory_id(tensor)
        if arguments.private and index not in arguments.kept:
            continue
        users.setdefault(frame.elsewhere.group_of(memory), []).append((True, index, memory, _extent(tensor)))
    for place, tensor in enumerate(returned.tensors):
        if place in returned.recipes:
            continue
        memory, extent = memory_id(tensor), _extent(tensor)
        others = users.setdefault(frame.elsewhere.group_of(memory), [])
        for is_argument, other, other_memory, (start, end) in others:
            if other_memory != memory or (start < extent[1] and extent[0] < end):
                if not is_argument:
                    returned.note("watch", [other])
                elif not arguments.private:
                    returned.note("watch_arguments", [other])
                returned.note("watch", [place])
        others.append((False, place, memory, extent))


def past_views(
    inputs: list[tuple[GradientEdge, int]], given: list[torch.Tensor], written: set[int]
) -> list[tuple[GradientEdge, int]]:
    """Return where the gradients of a call's arguments go, given which of them the module writes to.

    As in torch, the gradient of a view that was written to goes directly to its base and bypasses hooks on the view.
    Call this before the write is applied on this rank. In inference mode a write leaves the graph as it is.
    """
    if torch.is_inference_mode_enabled():
        return inputs
    past = []
    for edge, index in inputs:
        tensor = given[index]
        if index in written and tensor._is_view():
            with torch.enable_grad():
                again = tensor._view_func(tensor._base)  # type: ignore[attr-defined]
            past.append((owning_edge(again), index))
        else:
            past.append((edge, index))
    return past


def rebuild_results(
    frame: Frame,
    module: str,
    received: list[torch.Tensor],
    needs: list[bool],
    notes: _core.ResultNotes,
    given: list[torch.Tensor],
) -> tuple[list[torch.Tensor], list[tuple[Slot, int]]]:
    """Create the requester's tensors of a response, and apply the module's in-place writes to the arguments.

    Returns:
        The tensors by number, and the slot and number of each tensor that was cut.
    """
    tensors = list(received)
    slots: list[tuple[Slot, int]] = []
    says = not notes.is_plain  # else the usual case: tensors that share no memory with others
    for place, strides in notes.strides if says else ():
        tensors[place] = restride(tensors[place], strides)
    dropped = notes.dropped if says else ()
    for place, need in enumerate(needs):
        if need and place in dropped:
            tensors[place] = _dropped(tensors[place])
        elif need:
            tensors[place], slot = cut(tensors[place], "a result of module", module)
            slots.append((slot, place))
    carrying = [place for place, need in enumerate(needs) if need]
    if says:
        for index, place in notes.written:
            _write_back(frame, given[index], tensors[place], needs[place])
        carrying += _follow_recipes(notes, module, tensors, given)
        _note_memory(frame, notes, module, tensors, given)
    if len(carrying) > 1 or (says and notes.hooked):
        _refuse_hooks(frame, module, [tensors[place] for place in carrying], hooked=notes.hooked)
    return tensors, slots


def _follow_recipes(
    notes: _core.ResultNotes, module: str, tensors: list[torch.Tensor], given: list[torch.Tensor]
) -> list[int]:
    """Obtain results from arguments and other results; return the numbers of views that require a gradient."""
    recipes = notes.recipes
    for place, recipe in recipes:
        tensors[place] = follow(recipe, given, tensors)
        if tensors[place].requires_grad != recipe.requires_grad:
            raise FrameError(
                f"module {module!r} returned a view of one of its arguments in a grad mode that cannot be rebuilt on "
                "the rank of its caller: return a clone()"
            )
    return [place for place, recipe in recipes if recipe.view is not None and recipe.requires_grad]


def _refuse_hooks(frame: Frame, module: str, tensors: list[torch.Tensor], *, hooked: bool) -> None:
    """Refuse hooks on results that would see a part of the gradient, or run before hooks of the module (``hooked``)."""
    why = (
        f"one of several results of module {module!r} would not see the gradient that comes through the others: "
        "register it inside the module"
    )
    if hooked:
        why = (
            f"a result of module {module!r}, which put hooks on tensors of its own, would run before those: "
            "register it on a clone()"
        )
    for tensor in tensors:
        _no_hooks(frame, tensor, why)
        if hooked and (node := tensor.grad_fn) is not None:
            frame.hooked_elsewhere.add(node)


def _note_memory(
    frame: Frame, notes: _core.ResultNotes, module: str, tensors: list[torch.Tensor], given: list[torch.Tensor]
) -> None:
    """Forbid writes to memory that is shared or kept on the other rank."""
    shared = [*(tensors[place] for place in notes.watch), *(given[index] for index in notes.watch_arguments)]
    for tensor in shared:
        frame.watch(tensor, f"module {module!r} returned tensors that share memory; one of them lives on")
    if shared:
        frame.elsewhere.join(shared)
    kept = [tensors[place] for place in notes.kept_results]
    kept += [given[index] for index in notes.kept_arguments]
    for tensor in kept:
        why = f"module {module!r} kept a tensor that it was given or returned"
        when_here(tensor, partial(_keep_elsewhere, frame, why))


def _keep_elsewhere(frame: Frame, why: str, tensor: torch.Tensor) -> None:
    frame.watch(tensor, why)
    frame.elsewhere.keep(tensor)


def _dropped(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view as created under ``no_grad``: it reports that it requires a gradient, which torch drops."""
    base = tensor.requires_grad_()
    with torch.no_grad():
        return base.view_as(base)


def _write_back(frame: Frame, tensor: torch.Tensor, value: torch.Tensor, in_grad_mode: bool) -> None:
    with torch.set_grad_enabled(in_grad_mode):
        tensor.copy_(value)
    if in_grad_mode:
        _no_hooks(
            frame,
            tensor,
            "a tensor that a module on another rank wrote to in place would not see the gradient from inside "
            "it: register it on a clone()",
        )


def _no_hooks(frame: Frame, tensor: torch.Tensor, why: str) -> None:
    if tensor.grad_fn is not None:
        frame.unhookable[tensor.grad_fn] = why
