"""Backward of a frame: engine calls level by level, with the remote calls' backward between them."""

from __future__ import annotations

from typing import Protocol

import torch
from torch.autograd.graph import GradientEdge, Node, _engine_run_backward

from shardwright.frames.cut import EngineCall, Slot
from shardwright.frames.frame import Call, Frame
from shardwright.frames.levels import Levels

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


def run_backward(frame: Frame, roots: Roots, remote: RemoteBackward) -> None:
    """Run a frame's backward from root edges and their gradients.

    Parameters' gradients accumulate in ``.grad``, the frame's arguments' gradients in its input slots. ``roots``
    is emptied at once, so that nothing but the graph keeps what only they reach.
    """
    if not frame.calls and not frame.hooks:
        edges, gradients = [edge for edge, _ in roots], [gradient for _, gradient in roots]
        roots.clear()
        _engine(edges, gradients, frame.retain_graph)
        return
    _LevelBackward(frame, roots, remote).run()


def close_calls(frame: Frame, remote: RemoteBackward) -> None:
    """Close the calls that no backward has reached, so that their ranks forget them."""
    calls, frame.calls = frame.calls, []
    if calls:
        for call in calls:
            for slot, _ in call.results:
                slot.take()
        remote.backward([(call, []) for call in reversed(calls)])


def _engine(edges: list[GradientEdge], gradients: list[torch.Tensor], retain_graph: bool) -> None:
    if edges:
        with EngineCall():
            # Not torch.autograd.backward, which reads metadata that the nodes of Python functions do not show. Here
            # the engine itself checks the gradients.
            _engine_run_backward(
                tuple(edges), tuple(gradients), retain_graph, False, (), allow_unreachable=True, accumulate_grad=True
            )


class _LevelBackward:
    """One backward of one frame; holds the gradients that wait for their level."""

    def __init__(self, frame: Frame, roots: Roots, remote: RemoteBackward) -> None:
        self.frame = frame
        self.remote = remote
        self.levels = Levels(frame, [edge for edge, _ in roots])
        self.slots: dict[Node, Slot] = {
            slot.edge.node: slot
            for slots in (frame.inputs, *(call.results for call in frame.calls))
            for slot, _ in slots
            if slot.edge is not None
        }
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
                if gradient is not None:
                    self.put(edge.node, edge.output_nr, gradient)
            call.inputs = []

    def run_nodes(self, level: int) -> None:
        entering, self.waiting[level] = self.waiting[level], {}
        engine: dict[tuple[Node, int], torch.Tensor] = {}
        for (node, number), gradient in entering.items():
            for hook in self.frame.hooks.get((node, number), {}).values():
                replaced = hook(gradient)
                if replaced is not None:
                    gradient = replaced
            slot = self.slots.get(node)
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
        if not leaving and not any(end in self.slots for end in ends):
            edges = [GradientEdge(node, number) for node, number in entering]
            _engine(edges, list(entering.values()), self.frame.retain_graph)
            return
        if self.stops_short(leaving, ends):
            self.run_node_by_node(nodes, inside, entering)
            return
        targets = [GradientEdge(node, number) for node, number in leaving] + [GradientEdge(end, 0) for end in ends]
        with EngineCall():
            gradients = _engine_run_backward(
                tuple(GradientEdge(node, number) for node, number in entering),
                tuple(entering.values()),
                self.frame.retain_graph,
                False,
                tuple(targets),
                allow_unreachable=True,
                accumulate_grad=False,
            )
        entering.clear()
        for (node, number), gradient in zip(leaving, gradients, strict=False):
            if gradient is not None:
                self.put(node, number, gradient)
        self.finish(list(zip(ends, gradients[len(leaving) :], strict=True)))

    def finish(self, ends: list[tuple[Node, torch.Tensor | None]]) -> None:
        """Hand gradients to the slots, and to the nodes that accumulate them in leaves."""
        leaves: list[tuple[Node, torch.Tensor]] = []
        for node, gradient in ends:
            if gradient is None:
                continue
            slot = self.slots.get(node)
            if slot is not None:
                slot.add(gradient)
            else:
                leaves.append((node, gradient))
        _engine([GradientEdge(node, 0) for node, _ in leaves], [gradient for _, gradient in leaves], False)

    def stops_short(self, leaving: dict[tuple[Node, int], None], ends: list[Node]) -> bool:
        """Whether one edge to stop at lies upstream of another: the engine would then run past the first."""
        starts = {node for node, _ in leaving}
        targets = starts | set(ends)
        seen: set[Node] = set()
        # Any path from a stop to another stop is found by one walk from all the stops' successors.
        stack = [behind for node in starts for behind, _ in self.levels.edges_of(node)]
        while stack:
            node = stack.pop()
            if node in seen:
                continue
            seen.add(node)
            if node in targets:
                return True
            stack.extend(behind for behind, _ in self.levels.edges_of(node))
        return False

    def run_node_by_node(
        self, nodes: list[Node], inside: set[Node], entering: dict[tuple[Node, int], torch.Tensor]
    ) -> None:
        """Call the nodes one by one, in topological order, where the engine cannot stop at the right edges."""
        gathered: dict[Node, dict[int, torch.Tensor]] = {}

        def add(node: Node, number: int, gradient: torch.Tensor) -> None:
            numbers = gathered.setdefault(node, {})
            gradient = _as_expected(node, number, gradient)
            numbers[number] = gradient if number not in numbers else numbers[number] + gradient

        for (node, number), gradient in entering.items():
            add(node, number, gradient)
        entering.clear()
        with EngineCall(), torch.no_grad():
            for node in nodes:
                numbers = gathered.pop(node, None)
                if numbers is None:
                    continue
                edges = self.levels.edges_of(node)
                if not edges:
                    self.finish([(node, numbers[0])])
                    continue
                answer = node(*(_or_zeros(node, number, numbers.get(number)) for number in _output_numbers(node)))
                answers = answer if isinstance(answer, tuple) else (answer,)
                for (behind, number), gradient in zip(node.next_functions, answers, strict=False):
                    if behind is None or gradient is None:
                        continue
                    if behind in inside:
                        add(behind, number, gradient)
                    else:
                        self.put(behind, number, _as_expected(behind, number, gradient))


def _output_numbers(node: Node) -> range:
    return range(len(node._input_metadata))


def _or_zeros(node: Node, number: int, gradient: torch.Tensor | None) -> torch.Tensor:
    if gradient is not None:
        return gradient
    expected = node._input_metadata[number]
    return torch.zeros(tuple(expected.shape), dtype=expected.dtype, device=expected.device)


def _as_expected(node: Node, number: int, gradient: torch.Tensor) -> torch.Tensor:
    """The engine's own check of a gradient: summed to the expected shape, and of the expected dtype."""
    expected = node._input_metadata[number]
    if gradient.shape != expected.shape:
        gradient = gradient.sum_to_size(tuple(expected.shape))
    return gradient if gradient.dtype == expected.dtype else gradient.to(expected.dtype)
