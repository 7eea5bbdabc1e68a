"""Backward of a frame: engine calls level by level, with the remote calls' backward between them."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch.autograd.graph import GradientEdge, Node

from shardwright.frames.cut import slot_of
from shardwright.frames.engine import accumulate, capture
from shardwright.frames.frame import Call, Frame
from shardwright.frames.levels import Levels, Vertex
from shardwright.frames.single import run_node

Roots = list[tuple[GradientEdge, torch.Tensor]]


class RemoteBackward(Protocol):
    """Runs the backward of remote calls; implemented by the execution layer."""

    def backward(self, calls: list[tuple[Call, list[tuple[int, torch.Tensor]]]]) -> list[dict[int, torch.Tensor]]:
        """Run the calls' backward, in parallel where possible.

        Args:
            calls: Each call with its results' gradients by result index; no gradients means: only close it.

        Returns:
            For each call the gradients of its arguments, by argument index.
        """
        ...


def run_backward(frame: Frame, roots: Roots, remote: RemoteBackward, *, close: bool = False) -> None:
    """Run a frame's backward from root edges and their gradients.

    Parameters' gradients accumulate in ``.grad``, the frame's arguments' gradients in its input slots. ``roots``
    is emptied at once, so that nothing but the graph keeps what only they reach.

    Args:
        frame: The frame.
        roots: Where gradients enter, and which.
        remote: Runs the remote calls' backward.
        close: Whether this is the frame's last backward: calls that no gradient reaches are then closed too, and what
            gradients those still bring (of state that a module carried to a later call) go on their way.
    """
    if frame.calls or frame.hooks or frame.kept_gradients:
        _LevelBackward(frame, roots, remote, close).run()
        return
    # A root may enter one edge twice; the engine, given edges one by one, adds that up itself.
    entering = _summed(roots)
    frame.leaves.check_behind((node for node, _ in entering), frame.name, frame.microbatch)
    edges = [edge for edge, _ in roots]  # may be all that keeps the nodes of Python functions
    roots.clear()
    accumulate(entering, frame.retain_graph)
    del edges


def close_calls(frame: Frame, remote: RemoteBackward) -> None:
    """Close the calls that no backward has reached, so that their ranks forget them."""
    if frame.calls:
        run_backward(frame, [], remote, close=True)


def _summed(roots: Roots) -> dict[tuple[Node, int], torch.Tensor]:
    entering: dict[tuple[Node, int], torch.Tensor] = {}
    for edge, gradient in roots:
        key = (edge.node, edge.output_nr)
        entering[key] = entering[key] + gradient if key in entering else gradient
    return entering


class _LevelBackward:
    """One backward of one frame; holds the gradients that wait for their level."""

    def __init__(self, frame: Frame, roots: Roots, remote: RemoteBackward, close: bool) -> None:
        self.frame = frame
        self.remote = remote
        self.hooks = frame.all_hooks()
        # An edge may be all that keeps a node of a Python function: the nodes found by the walk do not.
        self.edges = [edge for edge, _ in roots]
        starts: dict[Vertex, None] = dict.fromkeys(edge.node for edge in self.edges)
        for call in reversed(frame.calls):
            if close or any(slot.gradient is not None for slot, _ in call.results):
                starts[call] = None
        self.levels = Levels(frame.calls, starts, {node for node, _ in self.hooks})
        for leaf in self.levels.leaves:
            frame.leaves.check(leaf, frame.name, frame.microbatch)
        self.waiting: list[dict[tuple[Node, int], torch.Tensor]] = [{} for _ in self.levels.nodes_at]
        for edge, gradient in roots:
            self.put(edge.node, edge.output_nr, gradient)
        roots.clear()

    def put(self, node: Node, number: int, gradient: torch.Tensor) -> None:
        """Add a gradient that enters ``node`` at its level."""
        waiting = self.waiting[self.levels.level[node]]
        key = (node, number)
        waiting[key] = waiting[key] + gradient if key in waiting else gradient

    def run(self) -> None:
        """Run all levels; leaves' own hooks run here, on the whole gradient, not at each engine call."""
        held: list[tuple[dict[int, Any], dict[int, Any]]] = []
        for node, leaf in self.levels.hooked_leaves.items():
            hooks: dict[int, Any] = leaf._backward_hooks  # type: ignore[assignment]
            held.append((hooks, dict(hooks)))
            self.hooks[node, 0] = [*hooks.values(), *self.hooks.get((node, 0), ())]
            hooks.clear()
        self.frame.in_backward = True
        try:
            self.run_levels()
        finally:
            self.frame.in_backward = False
            for hooks, before in held:
                hooks.update(before)

    def run_levels(self) -> None:
        reached: set[Call] = set()
        for level in range(len(self.waiting)):
            self.run_nodes(level)
            calls = self.levels.calls_at[level]
            if calls:
                reached.update(calls)
                self.run_calls(calls)
        self.frame.calls = [call for call in self.frame.calls if call not in reached]

    def run_calls(self, calls: list[Call]) -> None:
        asked = []
        for call in calls:
            gradients = [(index, slot.take()) for slot, index in call.results]
            call.results = []
            asked.append((call, [(index, gradient) for index, gradient in gradients if gradient is not None]))
            del gradients
        for call, answer in zip(calls, self.remote.backward(asked), strict=True):
            for edge, index in call.inputs:
                gradient = answer.pop(index, None)
                self.edges.append(edge)
                if gradient is not None:
                    self.put(edge.node, edge.output_nr, gradient)
            call.inputs = []

    def run_nodes(self, level: int) -> None:
        entering, self.waiting[level] = self.waiting[level], {}
        engine: dict[tuple[Node, int], torch.Tensor] = {}
        for (node, number), gradient in entering.items():
            for hook in self.hooks.get((node, number), ()):
                replaced = hook(gradient)
                if replaced is not None:
                    gradient = replaced
            slot = slot_of(node)
            if slot is not None:
                slot.add(gradient)
            else:
                engine[node, number] = gradient
        entering.clear()
        if engine:
            self.run_level(level, engine)

    def run_level(self, level: int, entering: dict[tuple[Node, int], torch.Tensor]) -> None:
        """One engine call over exactly the nodes of this level; it stops at the edges that leave it."""
        nodes = self.levels.nodes_at[level]
        inside = set(nodes)
        leaving: dict[tuple[Node, int], None] = {}
        for node in nodes:
            for edge in self.levels.edges_of(node):
                if edge[0] not in inside:
                    leaving[edge] = None
        ends = [node for node in nodes if not self.levels.edges_of(node)]
        if not leaving and not any(slot_of(end) for end in ends):
            accumulate(entering, self.frame.retain_graph)
            return
        if leaving and self.levels.stops_short({node for node, _ in leaving}, ends):
            self.run_node_by_node(nodes, inside, entering)
            return
        gradients = capture(entering, [*leaving, *((end, 0) for end in ends)], self.frame.retain_graph)
        entering.clear()
        for (node, number), gradient in zip(leaving, gradients, strict=False):
            if gradient is not None:
                self.put(node, number, gradient)
        self.finish(list(zip(ends, gradients[len(leaving) :], strict=True)))

    def finish(self, ends: list[tuple[Node, torch.Tensor | None]]) -> None:
        """Hand gradients to the slots, and to the nodes that accumulate them in leaves."""
        leaves: dict[tuple[Node, int], torch.Tensor] = {}
        for node, gradient in ends:
            if gradient is None:
                continue
            slot = slot_of(node)
            if slot is not None:
                slot.add(gradient)
            else:
                leaves[node, 0] = gradient
        accumulate(leaves, False)

    def run_node_by_node(
        self, nodes: list[Node], inside: set[Node], entering: dict[tuple[Node, int], torch.Tensor]
    ) -> None:
        """Call the nodes one by one, in topological order, where the engine cannot stop at the right edges."""
        gathered: dict[Node, dict[int, torch.Tensor]] = {}
        for (node, number), gradient in entering.items():
            gathered.setdefault(node, {})[number] = gradient
        entering.clear()
        for node in nodes:
            gradients = gathered.pop(node, None)
            if gradients is None:
                continue
            if not self.levels.edges_of(node):
                self.finish([(node, gradients[0])])
                continue
            for (behind, number), gradient in run_node(node, gradients):
                if behind in inside:
                    numbers = gathered.setdefault(behind, {})
                    numbers[number] = gradient if number not in numbers else numbers[number] + gradient
                else:
                    self.put(behind, number, gradient)
