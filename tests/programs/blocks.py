"""Modules that run lists of operations: what random programs are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.programs.layers import call_layer
from tests.programs.log import log_of_run
from tests.programs.tables import UNARY, VIEW, WRITE, fit
from tests.programs.values import STRUCTURES, Pair, structured, tensors_in
from tests.programs.wider import WiderOperations

#: The width of modules and inputs for which none is given.
WIDTH = 3
#: No tensor of a program may become larger.
MAX_NUMBERS = 1 << 16
#: The name of an operation and its details; plain data, so that programs can be stored.
Operation = Sequence[Any]


class Block(WiderOperations, nn.Module):
    """A module that runs a list of operations over its own tensors."""

    def __init__(
        self, operations: Sequence[Operation], result: Operation, children: list[nn.Module], width: int = WIDTH
    ) -> None:
        super().__init__()
        self.width = width
        self.operations = operations
        self.result = result
        self.weight = nn.Parameter(torch.randn(width) * 0.5)
        self.register_buffer("count", torch.ones(()))
        self.parts = nn.ModuleList(children)
        self.__dict__["state"] = None
        self.number, self.level = 0, 1.0
        if "'past'" in repr(operations):  # a container is watched, wherever there is one
            self.past: list[float] = []
        if "'around'" in repr(operations):
            self.stack: list[torch.Tensor] = []
            self.held: dict[str, torch.Tensor] = {}

    def forward(self, *given: Any, extra: Any = None) -> Any:
        tensors = tensors_in((given, extra))
        with log_of_run[0].running(self, tensors):
            self.execute(self.operations, tensors)
        kind, places = self.result
        results = [tensors[place % len(tensors)] for place in places]
        if kind == "all":
            return tensors
        if kind == "dict":
            return {str(index): tensor for index, tensor in enumerate(results)}
        if kind == "list":
            return [*results, None, 1]
        if kind == "nested":
            return {"a": (results[0], [*results[1:], None]), 2: Pair({"x": results[-1]}, "text")}
        if kind == "nothing":
            return None
        if kind in STRUCTURES:
            log_of_run[0].saw("structures")
            return structured(kind, results)
        return results[0] if kind == "one" else tuple(results)

    def execute(self, operations: Sequence[Operation], tensors: list[torch.Tensor]) -> None:
        for name, *details in operations:
            getattr(self, f"do_{name}")(tensors, *details)
            if tensors[-1].numel() > MAX_NUMBERS:  # before anything is made of it; such a program is drawn again
                raise RuntimeError(f"{tensors[-1].numel()} numbers are more than a random program may make")

    def do_weigh(self, tensors: list[torch.Tensor], a: int) -> None:
        tensor = tensors[a % len(tensors)]
        tensors.append(tensor * (self.weight if tensor.dim() and tensor.shape[-1] == self.width else self.weight.sum()))

    def do_weight(self, tensors: list[torch.Tensor]) -> None:
        tensors.append(self.weight.view_as(self.weight))

    def do_unary(self, tensors: list[torch.Tensor], kind: str, a: int) -> None:
        tensors.append(UNARY[kind](tensors[a % len(tensors)]))

    def do_view(self, tensors: list[torch.Tensor], kind: str, a: int) -> None:
        tensors.append(VIEW[kind](tensors[a % len(tensors)]))

    def do_split(self, tensors: list[torch.Tensor], a: int) -> None:
        tensor = tensors[a % len(tensors)]
        tensors.extend(tensor.chunk(2, -1) if tensor.dim() else [tensor])

    def do_sum(self, tensors: list[torch.Tensor], a: int, b: int, product: bool) -> None:
        one, other = tensors[a % len(tensors)], tensors[b % len(tensors)]
        other = fit(other, one)
        tensors.append(one * other if product else one + other)

    def do_write(self, tensors: list[torch.Tensor], kind: str, a: int, b: int) -> None:
        log_of_run[0].saw("in-place operations")
        tensor, other = tensors[a % len(tensors)], tensors[b % len(tensors)]
        WRITE[kind](tensor, fit(other, tensor))

    def do_mode(self, tensors: list[torch.Tensor], grad: bool, operations: Sequence[Operation]) -> None:
        log_of_run[0].saw("no_grad parts")
        with torch.set_grad_enabled(grad):
            self.execute(operations, tensors)

    def do_branch(self, tensors: list[torch.Tensor], a: int, yes: Sequence[Operation], no: Sequence[Operation]) -> None:
        log_of_run[0].saw("branches")
        self.execute(yes if float(tensors[a % len(tensors)].detach().sum()) > 0 else no, tensors)

    def do_loop(self, tensors: list[torch.Tensor], a: int, operations: Sequence[Operation]) -> None:
        log_of_run[0].saw("branches")
        for _ in range(sum(float(value) > 0 for value in tensors[a % len(tensors)].detach().flatten()[:2])):
            self.execute(operations, tensors)

    def do_hook(self, tensors: list[torch.Tensor], name: str, a: int, scale: bool) -> None:
        tensor = tensors[a % len(tensors)]
        dropped = tensor.grad_fn is None and tensor._is_view()  # made under no_grad; torch crashes on hooks there
        if not tensor.requires_grad or dropped or isinstance(tensor, nn.Parameter):
            return
        log_of_run[0].saw("tensor hooks")
        log_of_run[0].hook(name, tensor, scale)

    def do_retain(self, tensors: list[torch.Tensor], name: str, a: int) -> None:
        tensor = tensors[a % len(tensors)]
        if tensor.requires_grad and not tensor.is_leaf:
            log_of_run[0].saw("tensor hooks")
            log_of_run[0].retain(name, tensor)

    def do_count(self, tensors: list[torch.Tensor], a: int) -> None:
        log_of_run[0].changes(self)
        self.count.mul_(0.5).add_(tensors[a % len(tensors)].detach().mean())
        tensors.append(tensors[a % len(tensors)] * self.count.clone())

    def do_buffer(self, tensors: list[torch.Tensor]) -> None:
        log_of_run[0].saw("shared buffers")  # whoever gets it may write to it
        tensors.append(self.count)

    def do_store(self, tensors: list[torch.Tensor], a: int) -> None:
        log_of_run[0].saw("state in attributes")
        self.__dict__["state"] = tensors[a % len(tensors)]  # not as a parameter, even if it is one

    def do_load(self, tensors: list[torch.Tensor]) -> None:
        log_of_run[0].saw("state in attributes")
        if self.state is not None:
            tensors.append(self.state)

    def do_hand(self, tensors: list[torch.Tensor], a: int) -> None:
        """Leave a tensor for the next call, or take what the last one left."""
        log_of_run[0].saw("state in attributes")
        state = self.state
        self.__dict__["state"] = tensors[a % len(tensors)] if state is None else None
        if state is not None:
            tensors.append(state)

    def do_borrow(self, tensors: list[torch.Tensor], child: int, a: int) -> None:
        """Compute with a child's own weight."""
        module = self.parts[child % len(self.parts)]
        if isinstance(module, Block):
            log_of_run[0].saw("another module's weight")
            tensors.append(tensors[a % len(tensors)] * module.weight.sum())

    def do_call(
        self, tensors: list[torch.Tensor], child: int, places: Sequence[int], style: str, repeat: int = 1
    ) -> None:
        module: nn.Module = self.parts[child % len(self.parts)]
        if style == "reach" and isinstance(module, Block) and len(module.parts):
            module = module.parts[0]
        for _ in range(repeat):
            given = [tensors[place % len(tensors)] for place in places]
            result = _call_block(module, given, style) if isinstance(module, Block) else call_layer(module, given)
            if style == "dropped":
                log_of_run[0].saw("unused results")
                result = tensors_in(result)[:1]
            tensors.extend(tensors_in(result))
            del tensors[:-24]


def _call_block(module: Block, given: list[torch.Tensor], style: str) -> Any:
    log = log_of_run[0]
    if style in ("keyword", "list", "dict", "nested", "none"):
        log.saw("argument structures")
    if style == "keyword":
        return module(*given[1:], extra=given[0])
    if style == "list":
        return module(given)
    if style == "dict":
        return module({"b": given[-1], "a": given})
    if style == "nested":
        return module({"x": [given[0], (given[-1], None)], "mask": given[0] > 0}, 3, extra=Pair(given, {"y": "text"}))
    if style == "none":
        return module(None, *given, extra=None)
    if style == "direct":
        return module.forward(*given)
    if style in STRUCTURES:
        log.saw("structures")
        return module(structured(style, given))
    if style == "mapped":
        return [*map(module, given)]
    if style in ("checkpoint", "reentrant"):
        log.saw("checkpoints")
        # A reentrant checkpoint drops gradients where no argument needs one, so plain torch is run with the other kind.
        return checkpoint(module, *given, use_reentrant=style == "reentrant" and log.checkpointing)
    return module(*given)
