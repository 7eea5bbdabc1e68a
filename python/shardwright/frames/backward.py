"""Backward of a frame: engine calls level by level, with the backward of remote calls between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.autograd.graph import GradientEdge, Node

from shardwright.frames.cut import slot_of
from shardwright.frames.engine import accumulate, capture
from shardwright.frames.frame import Call, Frame
from shardwright.frames.levels import Levels, Vertex
from shardwright.frames.single import run_node
from shardwright.frames.weights import Split, WeightGradients

Roots = list[tuple[GradientEdge, torch.Tensor]]
Defer = Callable[[WeightGradients], None]


#: Nodes that free their saved tensors when they run: those of compiled modules cannot retain them.
_RUN_ONCE = ("CompiledFunctionBackward",)
#: The maximum number of calls over which gradients are passed on directly. The request of each call lists all that
#: follow, so that their total is quadratic.
_MAX_ONWARD = 32


class RemoteBackward(Protocol):
    """The backward of remote calls; implemented by the execution layer."""

    def backward(self, calls: list[tuple[Call, list[tuple[int, torch.Tensor]]]]) -> list[dict[int, torch.Tensor]]:
        """Run the calls' backward, in parallel where possible.

        Args:
            calls: Each call with its results' gradients by result index; without gradients, the call is only closed.
                The calls that get its gradients directly are run with it.

        Returns:
            For each call, the gradients of the arguments of the last call run with it, by argument index.
        """
        ...


def run_backward(
    frame: Frame, roots: Roots, remote: RemoteBackward, *, close: bool = False, defer: Defer | None = None
) -> None:
    """Run a frame's backward from root edges and their gradients.

    Gradients of parameters are accumulated in ``.grad``, those of the frame's arguments in its input slots. ``roots``
    is emptied at the start, so that only the graph keeps nodes that only they reach.

    Args:
        frame: The frame.
        roots: The edges where gradients enter, with the gradients.
        remote: Runs the backward of remote calls.
        close: Whether this is the frame's last backward. Calls that no gradient reaches are then closed too, and
            gradients that they return (through state that a module kept for a later call) are propagated.
        defer: Receives weight gradients to compute later, because no other rank waits for them. It is not called if
            a backward cannot be split. If None, all gradients are computed at once.
    """
    if not frame.splits:
        defer = None
    if defer is None and (call := _only_call(frame, roots)) is not None:
        _run_only_call(frame, call, roots, remote)
        return
    if frame.calls or frame.hooks or frame.kept_gradients or defer is not None:
        _LevelBackward(frame, roots, remote, close, defer).run()
        return
    # Two roots may have the same edge; their gradients are summed, as the engine does for edges given separately.
    entering = _summed(roots)
    frame.leaves.check_behind((node for node, _ in entering), frame.name, frame.microbatch)
    edges = [edge for edge, _ in roots]  # may be the only references to nodes of Python functions
    roots.clear()
    accumulate(entering, frame.retain_graph)
    del edges


def _only_call(frame: Frame, roots: Roots) -> Call | None:
    """Return the only remote call of the frame, if all roots are its results and no hook sees gradients in between."""
    if len(frame.calls) != 1 or not roots or frame.hooks or frame.kept_gradients:
        return None
    slots = [slot for slot, _ in frame.calls[0].results]
    return frame.calls[0] if all(slot_of(edge.node) in slots for edge, _ in roots) else None


def _run_only_call(frame: Frame, call: Call, roots: Roots, remote: RemoteBackward) -> None:
    """Run the backward of a call, and of the graph behind its arguments in one engine call, without levels."""
    for edge, gradient in roots:
        end = slot_of(edge.node)
        assert end is not None, "it was one before"
        end.add(gradient)
    gradients = [(index, taken) for slot, index in call.results if (taken := slot.take()) is not None]
    call.results = []
    edges = [edge for edge, _ in roots]  # may be the only references to nodes of Python functions
    roots.clear()
    frame.in_backward = True
    try:
        (answer,) = remote.backward([(call, gradients)])
        inputs, call.inputs, frame.calls = call.inputs, [], []
        entering = _summed([(edge, answer[index]) for edge, index in inputs if index in answer])
        answer.clear()
        frame.leaves.check_behind((node for node, _ in entering), frame.name, frame.microbatch)
        accumulate(entering, frame.retain_graph)
    finally:
        frame.in_backward = False
        edges.clear()


def close_calls(frame: Frame, remote: RemoteBackward) -> None:
    """Close the calls that no backward has reached, so that their ranks free the frames."""
    if frame.calls:
        run_backward(frame, [], remote, close=True)


def _summed(roots: Roots) -> dict[tuple[Node, int], torch.Tensor]:
    entering: dict[tuple[Node, int], torch.Tensor] = {}
    for edge, gradient in roots:
        key = (edge.node, edge.output_nr)
        entering[key] = entering[key] + gradient if key in entering else gradient
    return entering


class _LevelBackward:
    """A backward of a frame, with the gradients that wait for their level."""

    def __init__(
        self, frame: Frame, roots: Roots, remote: RemoteBackward, close: bool, defer: Defer | None = None
    ) -> None:
        self.frame = frame
        self.remote = remote
        self.hooks = frame.all_hooks()
        # An edge may be all that keeps a node of a Python function alive: the nodes found by the traversal do not.
        self.edges = [edge for edge, _ in roots]
        starts: dict[Vertex, None] = dict.fromkeys(edge.node for edge in self.edges)
        for call in reversed(frame.calls):
            if close or any(slot.gradient is not None for slot, _ in call.results):
                starts[call] = None
        self.levels = Levels(frame.calls, starts, {node for node, _ in self.hooks})
        for leaf in self.levels.leaves:
            frame.leaves.check(leaf, frame.name, frame.microbatch)
        self.defer = None if self.hooks or self.levels.hooked_leaves else defer
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
        """Run all levels; hooks of leaves run here, on the whole gradient, not in each engine call."""
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
            calls = [call for call in self.levels.calls_at[level] if call not in reached]
            if calls:
                reached.update(self.run_calls(calls))
        self.frame.calls = [call for call in self.frame.calls if call not in reached]

    def run_calls(self, calls: list[Call]) -> list[Call]:
        """Run the backward of calls, and of calls that get their gradients directly from them; return which ran."""
        asked = []
        ran = list(calls)
        for call in calls:
            gradients = [(index, slot.take()) for slot, index in call.results]
            call.results = []
            asked.append((call, [(index, gradient) for index, gradient in gradients if gradient is not None]))
            del gradients
            last = call
            for _ in range(_MAX_ONWARD):
                onward = self.levels.onward(last)
                if onward is None:
                    break
                last.onward = onward
                last = onward[0]
                for slot, _ in last.results:
                    slot.take()
                ran.append(last)
        for call, answer in zip(calls, self.remote.backward(asked), strict=True):
            last = call
            while last.onward is not None:
                self.edges += [edge for edge, _ in last.inputs]
                last = last.onward[0]
            for edge, index in last.inputs:
                gradient = answer.pop(index, None)
                self.edges.append(edge)
                if gradient is not None:
                    self.put(edge.node, edge.output_nr, gradient)
        for call in ran:
            call.inputs, call.results, call.onward = [], [], None
        return ran

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
        """Run exactly the nodes of this level in one engine call, which stops at the edges that leave it."""
        nodes = self.levels.nodes_at[level]
        inside = set(nodes)
        leaving: dict[tuple[Node, int], None] = {}
        for node in nodes:
            for edge in self.levels.edges_of(node):
                if edge[0] not in inside:
                    leaving[edge] = None
        ends = [node for node in nodes if not self.levels.edges_of(node)]
        if self.defer is not None and self.run_first_part(nodes, entering, leaving, ends, self.defer):
            return
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

    def run_first_part(
        self,
        nodes: list[Node],
        entering: dict[tuple[Node, int], torch.Tensor],
        leaving: dict[tuple[Node, int], None],
        ends: list[Node],
        defer: Defer,
    ) -> bool:
        """Run the part that other ranks wait for, and defer the rest; return False if the level cannot be split."""
        if any(type(node).__name__ in _RUN_ONCE for node in nodes):
            return False
        # A parameter of a later level may get this level's part of its gradient at any time. Gradients of other leaves
        # may be read by the script once the backward has run.
        parameters = self.frame.leaves.known
        later = {node for node, _ in leaving if id(getattr(node, "variable", None)) in parameters}
        wanted = [edge for edge in leaving if edge[0] not in later]
        at_once = [node for node in ends if id(getattr(node, "variable", None)) not in parameters]
        split = Split(nodes, self.levels.edges_of, [*wanted, *((node, 0) for node in at_once)], later)
        stops = [*at_once, *split.early]
        if wanted and self.levels.stops_short({node for node, _ in wanted}, stops):
            return False
        found, left = split.run(entering, [*wanted, *((node, 0) for node in stops)], self.edges)
        for node, number in wanted:
            if (node, number) in found:
                self.put(node, number, found.pop((node, number)))
        self.finish([(node, found.pop((node, 0), None)) for node in stops])
        if left.entering or left.again:
            defer(left)
        return True

    def finish(self, ends: list[tuple[Node, torch.Tensor | None]]) -> None:
        """Pass gradients to the slots, and to the nodes that accumulate them in leaves."""
        accumulate({(node, 0): gradient for node, gradient in ends if gradient is not None}, False)

    def run_node_by_node(
        self, nodes: list[Node], inside: set[Node], entering: dict[tuple[Node, int], torch.Tensor]
    ) -> None:
        """Run the nodes one by one, in topological order, if the engine cannot stop at the right edges."""
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
            for (behind, number), gradient in run_node(node, gradients, self.frame.retain_graph):
                if behind in inside:
                    numbers = gathered.setdefault(behind, {})
                    numbers[number] = gradient if number not in numbers else numbers[number] + gradient
                else:
                    self.put(behind, number, gradient)
