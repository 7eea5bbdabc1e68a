"""Run a single autograd node, for the case that the engine cannot stop at the right edges of several nodes."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
from torch.autograd.graph import GradientEdge, Node, _engine_run_backward

from shardwright.frames.cut import EngineCall, hook_on

Edge = tuple[Node, int]


class _HasRun(BaseException):
    """Raised to end an engine call after the node has run."""


def run_node(node: Node, gradients: dict[int, torch.Tensor], retain_graph: bool) -> list[tuple[Edge, torch.Tensor]]:
    """Run a node once, with its hooks.

    The engine runs it, because only the engine creates the zeros for outputs without a gradient that a Python function
    may request.

    Args:
        node: The node; it has edges.
        gradients: The gradients of its outputs, by number.
        retain_graph: Passed to the engine; the tensors saved by the node are retained in any case.

    Returns:
        The edges out of the node that got a gradient, with the gradients.
    """
    edges = node.next_functions
    results: list[torch.Tensor | None] = []

    def stop(given: Sequence[torch.Tensor | None], _: object) -> None:
        results.extend(given)
        raise _HasRun

    handle = hook_on(node, "register_hook", stop)  # the last hook, so that it sees the results as changed by the others
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
    handle = hook_on(node, register, lambda *_: None)  # the others are accessible only through a new handle
    hooks = handle.hooks_dict_ref()
    handle.remove()
    return bool(hooks)
