"""Running a single autograd node, if the engine cannot stop at the right edges of several."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
from torch.autograd.graph import GradientEdge, Node, _engine_run_backward

from shardwright.frames.cut import EngineCall, hook_on

Edge = tuple[Node, int]


class _HasRun(BaseException):
    """Ends an engine call after the node has run."""


def run_node(node: Node, gradients: dict[int, torch.Tensor], retain_graph: bool) -> list[tuple[Edge, torch.Tensor]]:
    """Run a node once, with its hooks.

    The engine runs it, as only that makes the zeros of outputs without a gradient, which a Python function may ask for.

    Args:
        node: The node; it has edges.
        gradients: Its outputs' gradients, by number.
        retain_graph: Whether it is told that the graph is needed again; what it has saved stays in any case.

    Returns:
        The edges out of it that got a gradient, and which.
    """
    edges = node.next_functions
    results: list[torch.Tensor | None] = []

    def stop(given: Sequence[torch.Tensor | None], _: object) -> None:
        results.extend(given)
        raise _HasRun

    handle = hook_on(node, "register_hook", stop)  # the last one: it sees what the others have made of its results
    try:
        with EngineCall(), contextlib.suppress(_HasRun):
            _engine_run_backward(
                tuple(GradientEdge(node, number) for number in gradients),
                tuple(gradients.values()),
                retain_graph,
                False,
                tuple(GradientEdge(behind, number) for behind, number in edges if behind is not None),
                allow_unreachable=True,
                accumulate_grad=False,
            )
    finally:
        handle.remove()
    return [
        ((behind, number), gradient)
        for (behind, number), gradient in zip(edges, results, strict=True)
        if behind is not None and gradient is not None
    ]


def has_hooks(node: Node) -> bool:
    """Return whether a node has hooks; hooks of tensors are not visible here."""
    return any(_is_hooked(node, register) for register in ("register_prehook", "register_hook"))


def _is_hooked(node: Node, register: str) -> bool:
    handle = hook_on(node, register, lambda *_: None)  # a handle of one more hook is the only way to the others
    hooks = handle.hooks_dict_ref()
    handle.remove()
    return bool(hooks)
