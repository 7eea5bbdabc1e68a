"""Detection of leaves that a backward reaches and that do not belong to a model of the job."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable

import torch
from torch import nn
from torch.autograd.graph import Node

from shardwright.errors import FrameError
from shardwright.frames.cut import slot_of


class Leaves:
    """Raise an error for gradients of tensors that are trained outside the models.

    The gradient of such a tensor is neither averaged over microbatches nor reduced over data-parallel ranks, and it
    exists only on the rank that computed it.
    """

    def __init__(self) -> None:
        """Create an object that checks nothing before the first step."""
        self._parameters: Iterable[nn.Parameter] = ()
        self._known: frozenset[int] | None = None
        self._checks = False
        #: Whether graphs that are not traversed for another reason are traversed in this step.
        self.walks = False
        self._seen: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}

    def begin_step(self, parameters: Iterable[nn.Parameter], step: int, *, checks: bool) -> None:
        """Begin a step.

        Args:
            parameters: The parameters of all models on this rank.
            step: The number of the step; graphs that are not traversed for another reason are traversed in steps 1, 2,
                4, 8 and so on.
            checks: Whether the gradient of a tensor outside the models would differ from plain torch.
        """
        self._parameters, self._known = parameters, None
        self._checks = checks
        self.walks = checks and step & (step - 1) == 0

    def end_step(self) -> None:
        """End a step, and free its state."""
        self._parameters, self._known, self.walks = (), None, False
        self._seen.clear()

    @property
    def known(self) -> frozenset[int]:
        """The ids of all parameters whose gradients this rank may accumulate."""
        if self._known is None:  # computed only in steps that check a leaf
            self._known = frozenset(map(id, self._parameters))
        return self._known

    def _is_new(self, leaf: torch.Tensor) -> bool:
        """Whether it is a parameter that was not there when they were listed, as the whole one of shards may be."""
        self._known = None
        return id(leaf) in self.known

    def check_behind(self, nodes: Iterable[Node | None], name: str, microbatch: int) -> None:
        """Check the leaves of the graph behind nodes, in selected steps."""
        if not self.walks:
            return
        stack = [node for node in nodes if node is not None]
        seen = set(stack)
        while stack:
            node = stack.pop()
            variable = getattr(node, "variable", None)
            if isinstance(variable, torch.Tensor):
                self.check(variable, name, microbatch)
            if slot_of(node) is not None:
                continue
            for behind, _ in node.next_functions:
                if behind is not None and behind not in seen:
                    seen.add(behind)
                    stack.append(behind)

    def check(self, leaf: torch.Tensor, name: str, microbatch: int) -> None:
        """Raise :class:`FrameError` if a leaf that a backward reaches is trained outside the models."""
        if not self._checks or id(leaf) in self.known or self._is_new(leaf):
            return
        if isinstance(leaf, nn.Parameter):
            raise FrameError(
                f"backward of {name} (microbatch {microbatch}) reaches {_described(leaf)}, which belongs to no "
                "smp.DistributedModel: its gradient would not be averaged over microbatches and ranks. Put its module "
                "(a loss with weights, say) inside the module that smp.DistributedModel wraps, register it there "
                "before the first step, or freeze it with requires_grad_(False)"
            )
        before = self._seen.get(id(leaf))
        if before is None or before[0]() is not leaf:
            self._seen[id(leaf)] = (weakref.ref(leaf), microbatch)
        elif before[1] != microbatch:
            raise FrameError(
                f"backward of {name} reaches a tensor of shape {tuple(leaf.shape)} that was made outside the step "
                f"function and needs a gradient, in microbatches {before[1]} and {microbatch}: their gradients would "
                "add up without being averaged over microbatches and ranks. Make it a parameter of the module that "
                "smp.DistributedModel wraps, or make it inside the step function and return its gradient"
            )


def _described(parameter: nn.Parameter) -> str:
    """Describe a parameter, with its module if it can be found."""
    for holder in gc.get_objects():
        if isinstance(holder, nn.Module):
            for name, held in holder.__dict__.get("_parameters", {}).items():
                if held is parameter:
                    return f"parameter {name!r} of shape {tuple(parameter.shape)} of a {type(holder).__name__}"
    return f"a parameter of shape {tuple(parameter.shape)}"
