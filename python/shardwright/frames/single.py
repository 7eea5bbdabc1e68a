"""Running one autograd node, where the engine cannot be stopped at the right edges of many."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.graph import Node

from shardwright.frames.engine import capture

Edge = tuple[Node, int]


def run_node(
    node: Node, gradients: dict[int, torch.Tensor], edges: list[Edge], separately: bool
) -> list[tuple[Edge, torch.Tensor]]:
    """Run a node once, with its own hooks.

    Args:
        node: The node.
        gradients: Its outputs' gradients, by number.
        edges: The different edges out of it.
        separately: Whether one of the edges leads to another, so that the engine can stop at one at a time only.

    Returns:
        The edges out of it that got a gradient, and which.
    """
    if not separately:
        found = capture({(node, number): gradient for number, gradient in gradients.items()}, edges, True)
        return [(edge, gradient) for edge, gradient in zip(edges, found, strict=True) if gradient is not None]
    before, after = _Hooks(node, "register_prehook"), _Hooks(node, "register_hook")
    try:
        given = [gradients.get(number) for number in range(_num_outputs(node))]
        for hook in before.hooks:
            replaced = hook(tuple(given))
            if replaced is not None:
                given = list(replaced) if isinstance(replaced, tuple) else [replaced]
                gradients = {number: gradient for number, gradient in enumerate(given) if gradient is not None}
        entering = {(node, number): gradient for number, gradient in gradients.items()}
        by_edge = {edge: capture(entering, [edge], True)[0] for edge in edges}
    finally:
        before.put_back()
        after.put_back()
    if not after.hooks:
        return [(edge, gradient) for edge, gradient in by_edge.items() if gradient is not None]
    results = tuple(None if behind is None else by_edge[behind, number] for behind, number in node.next_functions)
    for hook in after.hooks:
        replaced = hook(results, tuple(given))
        if replaced is not None:
            results = replaced if isinstance(replaced, tuple) else (replaced,)
    return [
        ((behind, number), gradient)
        for (behind, number), gradient in zip(node.next_functions, results, strict=True)
        if behind is not None and gradient is not None
    ]


def _num_outputs(node: Node) -> int:
    """How many outputs a node has; what a Python function hooks in a module has as many as inputs."""
    metadata = getattr(node, "_input_metadata", None)
    return len(node.next_functions) if metadata is None else len(metadata)


class _Hooks:
    """A node's own hooks, taken off; a handle of one more hook is the only way to them."""

    def __init__(self, node: Node, register: str) -> None:
        handle = getattr(node, register)(lambda *_: None)
        self._dict: dict[int, Any] = handle.hooks_dict_ref() or {}
        handle.remove()
        self._before = dict(self._dict)
        self.hooks = list(self._before.values())
        self._dict.clear()

    def put_back(self) -> None:
        self._dict.update(self._before)
