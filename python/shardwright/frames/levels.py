"""The order of a frame's backward: levels, counted in remote calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TypeAlias

import torch
from torch.autograd.graph import Node

from shardwright.frames.cut import Slot, SlotEnd, owned_by, slot_of
from shardwright.frames.frame import Call

Vertex: TypeAlias = "Node | Call"


class Levels:
    """Assign a level to all nodes and calls reachable from the starts: the longest path to it, in remote calls.

    A call is in the graph between the cuts of its results and the edges of its arguments, so the nodes behind the
    arguments are at least one level above its results. An earlier call of the same module is above a later one,
    because the module may keep state between the calls. A node with a user's hook starts a new level, so that the hook
    sees the whole gradient.

    Attributes:
        level: The level of each node and call.
        nodes_at: The nodes of each level, in topological order (a node before those that its gradient flows to).
        calls_at: The calls of each level, the last one first.
        leaves: The leaf tensors reached.
        hooked_leaves: Those that have hooks of their own, by node.
    """

    def __init__(self, calls: list[Call], starts: Iterable[Vertex], hooked: set[Node]) -> None:
        """Traverse the graph from the starts; this takes about two microseconds per node.

        Args:
            calls: The frame's calls that wait for their backward, in order.
            starts: Nodes and calls to start from.
            hooked: The nodes with hooks.
        """
        self._call_of: dict[Slot, Call] = {slot: call for call in calls for slot, _ in call.results}
        self._earlier: dict[Call, list[Call]] = {}
        last: dict[tuple[int, int], Call] = {}
        for call in calls:
            self._earlier[call] = [last[module] for module in call.modules if module in last]
            last.update(dict.fromkeys(call.modules, call))
        self.leaves: list[torch.Tensor] = []
        self.hooked_leaves: dict[Node, torch.Tensor] = {}
        self._edges: dict[Node, tuple[tuple[Node, int], ...]] = {}
        first = dict.fromkeys(starts)
        order = self._topological(first)
        hooked = hooked | self.hooked_leaves.keys()
        self.level: dict[Vertex, int] = dict.fromkeys(first, 0)
        self._hooked = hooked
        #: The number of edges that lead to a vertex, including gradients from outside.
        self._ahead: Counter[Vertex] = Counter(start for start in first if isinstance(start, Node))
        for vertex in order:
            base = self.level[vertex] + (1 if isinstance(vertex, Call) else 0)
            for behind in self.behind(vertex):
                self._ahead[behind] += 1
                level = self.level[vertex] + 1 if behind in hooked else base
                if self.level.get(behind, -1) < level:
                    self.level[behind] = level
        depth = max(self.level.values(), default=-1) + 1
        self.nodes_at: list[list[Node]] = [[] for _ in range(depth)]
        self.calls_at: list[list[Call]] = [[] for _ in range(depth)]
        for vertex in order:
            if isinstance(vertex, Call):
                self.calls_at[self.level[vertex]].append(vertex)
            elif not isinstance(vertex, SlotEnd):
                self.nodes_at[self.level[vertex]].append(vertex)
        for those in self.calls_at:
            those.sort(key=lambda call: -call.number)

    def behind(self, vertex: Vertex) -> list[Vertex]:
        """Return the vertices that the gradient of a vertex flows to."""
        if isinstance(vertex, Call):
            return [*(edge.node for edge, _ in vertex.inputs), *self._earlier[vertex]]
        edges = self.edges_of(vertex)
        if not edges:
            slot = slot_of(vertex)
            call = None if slot is None else self._call_of.get(slot)
            return [] if call is None else [call]
        return [node for node, _ in edges]

    def edges_of(self, node: Node) -> tuple[tuple[Node, int], ...]:
        """Return the edges out of a node within this rank's graph; a cut of any frame has none."""
        edges = self._edges.get(node)
        if edges is None:
            edges = () if slot_of(node) else tuple((n, i) for n, i in node.next_functions if n is not None)
            self._edges[node] = edges
            leaf = None if edges else getattr(node, "variable", None)
            if isinstance(leaf, torch.Tensor):
                self.leaves.append(leaf)
                if leaf._backward_hooks:
                    self.hooked_leaves[node] = leaf
        return edges

    def onward(self, call: Call) -> tuple[Call, dict[int, int]] | None:
        """Return the call to which all gradients of a call's arguments flow, and no others, or None.

        The results of that call were passed to this call unchanged, so the gradients need not pass through this rank.

        Returns:
            The call, and the index of its result for the index of each argument.
        """
        given = [(owned_by(edge.node), index) for edge, index in call.inputs]
        results = {slot_of(node): (node, index) for node, index in given}
        calls = {self._call_of.get(slot) if slot is not None else None for slot in results}
        before = calls.pop() if len(calls) == 1 else None
        if before is None or before.model_id != call.model_id or len(results) < len(call.inputs):
            return None
        to_result = {slot: index for slot, index in before.results}
        nodes = [node for node, _ in results.values()]
        leading = len(nodes) + (before in self._earlier[call])
        if (
            self._ahead[before] != leading
            or any(self._ahead[node] != 1 or node in self._hooked for node in nodes)
            or any(slot.gradient is not None for slot in to_result)
        ):
            return None
        return before, {index: to_result[slot] for slot, (_, index) in results.items() if slot is not None}

    def stops_short(self, stops: set[Node], ends: list[Node]) -> bool:
        """Return whether a node to stop at is upstream of another one: the engine would then run past the first."""
        targets = stops | set(ends)
        deepest = max(self.level[node] for node in targets)
        seen: set[Node] = set()
        # One traversal from all successors of the stops finds any path from a stop to another target.
        stack = [behind for node in stops for behind, _ in self.edges_of(node)]
        while stack:
            node = stack.pop()
            if node in seen or self.level[node] > deepest:
                continue
            seen.add(node)
            if node in targets:
                return True
            stack.extend(behind for behind, _ in self.edges_of(node))
        return False

    def _topological(self, starts: dict[Vertex, None]) -> list[Vertex]:
        order: list[Vertex] = []
        seen: set[Vertex] = set()
        for start in starts:
            if start in seen:
                continue
            seen.add(start)
            stack: list[tuple[Vertex, Iterator[Vertex]]] = [(start, iter(self.behind(start)))]
            while stack:
                vertex, rest = stack[-1]
                for behind in rest:
                    if behind not in seen:
                        seen.add(behind)
                        stack.append((behind, iter(self.behind(behind))))
                        break
                else:
                    stack.pop()
                    order.append(vertex)
        order.reverse()
        return order
