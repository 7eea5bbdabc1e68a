"""A split backward: input gradients first, weight gradients later (zero-bubble schedules).

Qi et al., "Zero Bubble Pipeline Parallelism", 2024, split the backward of every layer manually. Here the split is found
in the autograd graph. Nodes from which a wanted gradient is reached run first. If one of them has an edge that leads
to leaves only (from a matrix product to its weight), the gradient that enters the node is recorded, and later the
engine runs the node again for that edge only. All other nodes lead to leaves only and are deferred as a whole.

Only the nodes in :data:`RUN_AGAIN` are run in two parts, except those with hooks and those whose leaf edge is also
reached from another node, because the engine would run both. The graph behind all other nodes runs at once: a function
written in Python may rely on running once, and so may torch's own kernels. The kernel of group normalization on the
CPU, for a channels-last tensor, writes the gradient of its input without checking whether it is needed, and crashes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch.autograd.graph import GradientEdge, Node

from shardwright.frames.engine import accumulate, capture
from shardwright.frames.single import Edge, has_hooks

#: Nodes that compute each gradient separately, and only if it is requested: products and sums, with a formula for each
#: argument; convolutions and layer normalizations, whose kernels take a mask of gradients. The tests request only the
#: weight gradients of each. Nodes that are missing here stay exact, but their weight gradients fill no idle time.
RUN_AGAIN = frozenset(
    f"{name}Backward0"
    for name in (
        *("Addmm", "Baddbmm", "Bmm", "Dot", "Mm", "Mv"),
        *("Add", "Cat", "Div", "Mul", "Stack", "Sub"),
        *("Convolution", "NativeLayerNorm"),
    )
)


EdgeGradients = dict[Edge, torch.Tensor]
EdgesOf = Callable[[Node], tuple[Edge, ...]]


@dataclass(slots=True, eq=False)
class WeightGradients:
    """The deferred part of a backward.

    Attributes:
        entering: Gradients that enter nodes that lead to leaves only.
        again: Nodes to run again, with the gradients that entered them, for these edges only.
        kept: References that keep nodes of Python functions alive, which the nodes behind them do not.
    """

    entering: EdgeGradients = field(default_factory=dict)
    again: list[tuple[EdgeGradients, list[Edge]]] = field(default_factory=list)
    kept: list[GradientEdge] = field(default_factory=list)

    def run(self) -> None:
        """Accumulate the weight gradients, and release all tensors."""
        entering, self.entering = self.entering, {}
        self.again.reverse()
        while self.again:
            gradients, edges = self.again.pop()
            for edge, gradient in zip(edges, capture(gradients, edges, False), strict=True):
                if gradient is not None:
                    entering[edge] = entering[edge] + gradient if edge in entering else gradient
        accumulate(entering, False)
        self.kept.clear()


class Split:
    """The split of an engine call into the part that other ranks wait for, and the part that leads to leaves only."""

    def __init__(self, nodes: list[Node], edges_of: EdgesOf, wanted: Iterable[Edge], later: Iterable[Node]) -> None:
        """Divide the nodes.

        Args:
            nodes: The nodes in topological order: a node before those that its gradient flows to.
            edges_of: Returns the edges out of a node.
            wanted: Edges whose gradients other ranks wait for: they leave the nodes, or are cuts among them.
            later: Leaves outside the nodes, to which edges lead.
        """
        self._nodes = nodes
        self._edges_of = edges_of
        self._wanted = set(wanted)
        self._later = set(later)
        #: Leaves whose gradients cannot be deferred.
        self.early: dict[Node, None] = {}
        #: The nodes of the first part.
        self.first: set[Node] = set()
        #: The nodes of the first part that run again, with the edges for which they do.
        self.again: dict[Node, list[Edge]] = {}
        refused = [edge for edge, _ in self._find()]
        while refused:
            self._add_leaves_behind(refused)
            refused = [edge for edge, _ in self._find()]

    def run(
        self, entering: EdgeGradients, targets: list[Edge], kept: list[GradientEdge]
    ) -> tuple[EdgeGradients, WeightGradients]:
        """Run the first part.

        Args:
            entering: The gradients that enter the nodes.
            targets: The edges whose gradients are requested: those wanted, and the leaves that cannot be deferred.
            kept: References that keep the nodes of Python functions alive.

        Returns:
            The gradients at the targets, and the deferred part.
        """
        numbers: dict[Node, dict[Edge, None]] = {node: {} for node in self.again}
        for edge in entering:
            if edge[0] in numbers:
                numbers[edge[0]][edge] = None
        for node in self.first:
            for edge in self._edges_of(node):
                if edge[0] in numbers:
                    numbers[edge[0]][edge] = None
        noted = [edge for edges in numbers.values() for edge in edges]
        now = {edge: gradient for edge, gradient in entering.items() if edge[0] in self.first}
        left = WeightGradients({edge: one for edge, one in entering.items() if edge[0] not in self.first})
        entering.clear()
        found: EdgeGradients = {}
        if now:
            gradients = capture(now, [*targets, *noted], bool(self.again))
            found = {edge: one for edge, one in zip([*targets, *noted], gradients, strict=True) if one is not None}
        for node, edges in self.again.items():
            gradients_in = {edge: found[edge] for edge in numbers[node] if edge in found}
            if gradients_in:
                left.again.append((gradients_in, edges))
        if left.again or left.entering:
            left.kept = list(kept)
        wanted = set(targets)
        return {edge: one for edge, one in found.items() if edge in wanted}, left

    def _find(self) -> list[tuple[Edge, Node]]:
        """Find the first part, the nodes that run twice, and the edges whose nodes cannot run twice."""
        self.first = {node for node, _ in self._wanted} | self.early.keys()
        for node in reversed(self._nodes):
            if any(edge in self._wanted or edge[0] in self.first for edge in self._edges_of(node)):
                self.first.add(node)
        self.first.intersection_update(self._nodes)
        self.again = {}
        source: dict[Node, Node | None] = {}  # the first part's only node that leads there; None: several
        for node in self._nodes:
            if node not in self.first and node not in source:
                continue
            origin = node if node in self.first else source[node]
            for edge in self._edges_of(node):
                behind = edge[0]
                if edge in self._wanted or behind in self.first or behind in self.early:
                    continue
                if source.setdefault(behind, origin) is not origin:
                    source[behind] = None
                if origin is node:
                    self.again.setdefault(node, []).append(edge)
        return [
            (edge, node)
            for node, edges in self.again.items()
            for edge in edges
            if edge[0] in self._later or source[edge[0]] is not node or not _runs_again(node)
        ]

    def _add_leaves_behind(self, edges: list[Edge]) -> None:
        stack = [node for node, _ in edges]
        seen: set[Node] = set()
        while stack:
            node = stack.pop()
            if node not in seen:
                seen.add(node)
                behind = [other for other, _ in self._edges_of(node)]
                stack += behind
                if not behind:
                    self.early[node] = None


def _runs_again(node: Node) -> bool:
    return node.name() in RUN_AGAIN and not has_hooks(node)
