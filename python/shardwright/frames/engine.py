"""Calls of the autograd engine by the library."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch.autograd.graph import GradientEdge, Node, _engine_run_backward

from shardwright.frames.cut import EngineCall, slot_of

# torch.autograd.backward and grad are not used, because they read metadata that nodes of Python functions do not have.
# The engine checks the gradients itself.


def accumulate(entering: Mapping[tuple[Node, int], torch.Tensor], retain_graph: bool) -> None:
    """Run the whole graph behind the entering edges, and accumulate gradients in leaves, and in the slots of cuts."""
    cuts = {edge: slot for edge in entering if (slot := slot_of(edge[0])) is not None}
    if cuts:  # nothing is behind them, and their nodes need not exist any more for the engine
        for edge, slot in cuts.items():
            slot.add(entering[edge])
        entering = {edge: gradient for edge, gradient in entering.items() if edge not in cuts}
    if entering:
        with EngineCall():
            _engine_run_backward(
                tuple(GradientEdge(node, number) for node, number in entering),
                tuple(entering.values()),
                retain_graph,
                False,
                (),
                allow_unreachable=True,
                accumulate_grad=True,
            )


def capture(
    entering: Mapping[tuple[Node, int], torch.Tensor], targets: Iterable[tuple[Node, int]], retain_graph: bool
) -> tuple[torch.Tensor | None, ...]:
    """Run from the entering edges to the targets, and return the gradients that arrive there."""
    with EngineCall():
        gradients: tuple[torch.Tensor | None, ...] = _engine_run_backward(
            tuple(GradientEdge(node, number) for node, number in entering),
            tuple(entering.values()),
            retain_graph,
            False,
            tuple(GradientEdge(node, number) for node, number in targets),
            allow_unreachable=True,
            accumulate_grad=False,
        )
    return gradients
