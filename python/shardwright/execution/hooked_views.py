"""Views with hooks that a module on another rank writes to in place.

Gradients through the write bypass the hooks, gradients through other uses do not. The gradient of such an argument is
sent back as one tensor, so a module that both writes to it and uses it otherwise is refused.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.autograd.graph import GradientEdge, Node

from shardwright.errors import FrameError
from shardwright.frames import Frame
from shardwright.frames.cut import owned_by, slot_of
from shardwright.frames.remote import is_remote


def hooked_views(frame: Frame, given: Sequence[torch.Tensor], inputs: Sequence[tuple[GradientEdge, int]]) -> list[int]:
    """Return the indices of arguments that are views with hooks, on themselves or on views between them and a base."""
    return [index for edge, index in inputs if _is_hooked(frame, given[index], owned_by(edge.node))]


def _is_hooked(frame: Frame, tensor: torch.Tensor, node: Node | None) -> bool:
    if is_remote(tensor) or not tensor._is_view() or tensor._base is None:
        return False
    base = tensor._base.grad_fn
    while node is not None and node is not base:
        if node in frame.guarded:
            return True
        behind = [following for following, _ in node.next_functions if following is not None]
        node = behind[0] if len(behind) == 1 else None
    return False


def refuse_other_uses(name: str, frame: Frame, indices: Sequence[int], written: Sequence[int]) -> None:
    """Raise :class:`FrameError` if a module wrote to one of these arguments and also used it otherwise.

    Args:
        name: The name of the module.
        frame: Its frame, with the edges of its results and of the arguments that it wrote to.
        indices: The indices of the arguments that are views with hooks.
        written: The indices of the arguments that it wrote to.
    """
    slots = {slot for slot, index in frame.inputs if index in indices and index in written}
    if not slots:
        return
    stack = [edge.node for edge, _ in frame.results]
    seen, uses = set(stack), dict.fromkeys(slots, 0)
    while stack:
        for behind, _ in stack.pop().next_functions:
            if behind is None:
                continue
            slot = slot_of(behind)
            if slot in uses:
                uses[slot] += 1
            if behind not in seen:
                seen.add(behind)
                stack.append(behind)
    if any(count > 1 for count in uses.values()):
        raise FrameError(
            f"module {name!r} wrote in place to an argument that it has used otherwise too, and on which its caller "
            "has put a hook as a view: the hook would not see the gradient of those uses alone. Register it on a "
            "clone(), or write to one"
        )
