"""Analysis of the paths of ``torch.autograd.grad``: which nodes run, and whether a path leaves the rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, Node

from shardwright.frames.cut import Slot, gradient_edge, owned_by, slot_of
from shardwright.frames.frame import Frame
from shardwright.frames.remote import made_by


def node_of(value: Any) -> Node | None:
    """Return the gradient node of a tensor or edge; None for a tensor without a gradient."""
    if isinstance(value, GradientEdge):
        return value.node
    if not isinstance(value, torch.Tensor) or not value.requires_grad:
        return None
    return gradient_edge(value).node


class Paths:
    """The paths from outputs to inputs, in plain torch and on this rank.

    A gradient that leaves the rank may return through any earlier call of the frame, because a module may keep its
    arguments.
    """

    def __init__(self, frame: Frame, outputs: Sequence[Any], inputs: Sequence[Any]) -> None:
        """Traverse the graph once."""
        self._frame = frame
        self._arguments = {slot for slot, _ in frame.inputs}
        self._numbers = {slot: call.number for call in frame.calls for slot, _ in call.results}
        self._ends: dict[Slot, Node] = {}
        self._targets = {self._one(node) for value in inputs if (node := node_of(value)) is not None}
        behind: dict[Node, list[Node]] = {}
        stack = [self._one(node) for value in outputs if (node := node_of(value)) is not None]
        while stack:
            node = stack.pop()
            if node not in behind:
                behind[node] = list(self._behind(node))
                stack += behind[node]
        self._ahead: dict[Node, list[Node]] = {node: [] for node in behind}
        for node, nodes in behind.items():
            for other in nodes:
                self._ahead[other].append(node)
        #: The nodes from which an input is reached, inputs included.
        self.needed = self._leading_to_targets()
        self._crossings = [node for node in behind if self._crosses(node)]
        self._holds_given = any(
            isinstance(value, nn.Parameter) or slot_of(node_of(value)) in self._arguments for value in inputs
        )

    def _one(self, node: Node) -> Node:
        """Return one node for all that represent the same remote tensor."""
        node = made_by(owned_by(node))
        slot = slot_of(node)
        return node if slot is None else self._ends.setdefault(slot, node)

    def _crosses(self, node: Node) -> bool:
        slot = slot_of(node)
        return slot is not None and slot not in self._arguments

    def _behind(self, node: Node) -> Iterator[Node]:
        slot = slot_of(node)
        if slot is None:
            yield from (self._one(behind) for behind, _ in node.next_functions if behind is not None)
        elif slot not in self._arguments:
            yield from self._inputs_until(slot)

    def _inputs_until(self, slot: Slot) -> Iterator[Node]:
        number = self._numbers.get(slot, self._frame.num_calls)
        for call in self._frame.calls:
            if call.number <= number:
                yield from (self._one(edge.node) for edge, _ in call.inputs)

    def _leading_to_targets(self) -> set[Node]:
        found: set[Node] = set()
        stack = [node for node in self._targets if node in self._ahead]
        while stack:
            node = stack.pop()
            if node not in found:
                found.add(node)
                stack += self._ahead[node]
        return found

    def pass_the_caller(self) -> bool:
        """Whether the caller may have computed another reached argument from an input."""
        given = self._arguments.intersection(map(slot_of, self._targets))
        return bool(given) and len(given | self._arguments.intersection(map(slot_of, self._ahead))) > 1

    def leave_the_rank(self) -> bool:
        """Whether a gradient may come from another rank."""
        if self._crossings and self._holds_given:
            return True  # others may reach them too: a weight by a call back, an argument by its caller
        return any(
            slot_of(node) not in self._numbers  # kept from an earlier call
            or (node in self._targets and node in self._frame.unhookable)
            or any(behind in self.needed for behind in self._behind(node))
            for node in self._crossings
        )
