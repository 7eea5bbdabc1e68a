"""Running one autograd node, where the engine cannot be stopped at the right edges of many."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.autograd.graph import Node
from torch.nn.modules._functions import BackwardHookFunction

from shardwright.errors import FrameError
from shardwright.frames.cut import EngineCall, hook_on
from shardwright.frames.engine import capture

_Gradients = tuple[torch.Tensor | None, ...]
Edge = tuple[Node, int]


def run_node(node: Node, gradients: dict[int, torch.Tensor]) -> list[tuple[Edge, torch.Tensor]]:
    """Run a node once, with its own hooks, as the engine would.

    Args:
        node: The node.
        gradients: Its outputs' gradients, by number.

    Returns:
        The edges out of it that got a gradient, and which.
    """
    function = getattr(type(node), "_forward_cls", None)
    count = _num_outputs(node, function, gradients)
    given: _Gradients = tuple(gradients.get(number) for number in range(count))
    for hook in _hooks_of(node, "register_prehook"):
        replaced = hook(given)
        if replaced is not None:
            given = _as_tuple(replaced)
    edges = list(node.next_functions)
    with EngineCall(), torch.no_grad():
        if function is None:
            results = _as_tuple(node(*given))  # type: ignore[operator]
        else:
            results = _run_python(node, function, given)
            edges = [edge for edge in edges if edge[0] is not None]
    for hook in _hooks_of(node, "register_hook"):
        replaced = hook(results, given)
        if replaced is not None:
            results = _as_tuple(replaced)
    found: list[tuple[Edge, torch.Tensor]] = []
    for (behind, number), gradient in zip(edges, results, strict=False):
        if behind is not None and gradient is not None:
            # The engine's own check, which sums a gradient to the shape that the node expects.
            checked = capture({(behind, number): gradient}, [(behind, number)], True)[0]
            assert checked is not None, "it was just put in"
            found.append(((behind, number), checked))
    return found


def _run_python(node: Any, function: Any, given: _Gradients) -> _Gradients:
    if function is not BackwardHookFunction and any(gradient is None for gradient in given):
        raise FrameError(
            f"the autograd function {function.__qualname__} has several results of which one got no gradient, between "
            "modules on other ranks whose gradients arrive one after the other; use all of its results"
        )
    results = _as_tuple(node.apply(*given))
    return tuple(result for result, need in zip(results, node.needs_input_grad, strict=False) if need)


def _num_outputs(node: Node, function: Any, gradients: dict[int, torch.Tensor]) -> int:
    if function is None:
        return len(node._input_metadata)
    if function is BackwardHookFunction:
        return len(node.next_functions)
    kinds = [parameter.kind for parameter in inspect.signature(function.backward).parameters.values()]
    named = sum(kind is not inspect.Parameter.VAR_POSITIONAL for kind in kinds) - 1
    return max(named, *(number + 1 for number in gradients))


def _as_tuple(value: Any) -> _Gradients:
    return value if isinstance(value, tuple) else (value,)


def has_hooks(node: Node) -> bool:
    """Whether a node has hooks of its own; those on tensors do not show."""
    return bool(_hooks_of(node, "register_prehook") or _hooks_of(node, "register_hook"))


def _hooks_of(node: Node, register: str) -> list[Any]:
    """A node's own hooks; a handle of one more hook is the only way to them."""
    handle = hook_on(node, register, lambda *_: None)
    hooks = handle.hooks_dict_ref()
    handle.remove()
    return [] if hooks is None else list(hooks.values())
