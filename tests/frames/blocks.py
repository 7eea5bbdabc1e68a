"""Modules that run lists of operations: what random programs are made of."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH = 3
Operation = tuple[Any, ...]


@dataclasses.dataclass
class Log:
    """What hooks saw, and the tensors whose gradients were to be kept, of one run; and whether it checkpoints.

    A reentrant checkpoint drops gradients where no argument needs one, so plain torch is run without.
    """

    checkpointing: bool = False
    hooks: dict[str, list[torch.Tensor]] = dataclasses.field(default_factory=lambda: collections.defaultdict(list))
    retained: list[tuple[str, torch.Tensor]] = dataclasses.field(default_factory=list)


log_of_run = [Log()]


def _fit(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.shape == like.shape else tensor.mean()


UNARY = {
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "relu": torch.relu,
    "double": lambda t: t * 2,
    "square": lambda t: t * t,
    "clone": torch.clone,
    "detach": torch.Tensor.detach,
}
VIEW = {
    "first": lambda t: t[0] if t.dim() else t.view_as(t),
    "row": lambda t: t[:1] if t.dim() else t,
    "rest": lambda t: t[1:] if t.dim() and len(t) > 1 else t.view_as(t),
    "flat": lambda t: t.reshape(-1),
    "transposed": lambda t: t.transpose(0, 1) if t.dim() > 1 else t.unsqueeze(0),
    "columns": lambda t: t.narrow(-1, 0, 1) if t.dim() else t.view_as(t),
    "same": lambda t: t.view_as(t),
    "expanded": lambda t: t.unsqueeze(0).expand(2, *t.shape),
    "diagonal": lambda t: t.diagonal() if t.dim() > 1 else t,
}
WRITE = {
    "add": lambda t, u: t.add_(u),
    "mul": lambda t, u: t.mul_(u),
    "copy": lambda t, u: t.copy_(u),
    "tanh": lambda t, u: t.tanh_(),
    "zero": lambda t, u: t.zero_(),
    "relu": lambda t, u: torch.relu_(t),
    "row": lambda t, u: t[:1].mul_(2) if t.dim() else t.mul_(2),
    "alias": lambda t, u: t.detach().mul_(1.5),
}


class Block(nn.Module):
    """A module that runs a list of operations over its own tensors."""

    def __init__(self, operations: list[Operation], result: Operation, children: list[nn.Module]) -> None:
        super().__init__()
        self.operations = operations
        self.result = result
        self.weight = nn.Parameter(torch.randn(WIDTH) * 0.5)
        self.register_buffer("count", torch.ones(()))
        self.parts = nn.ModuleList(children)
        self.__dict__["state"] = None

    def forward(self, *given: Any, extra: Any = None) -> Any:
        tensors = tensors_in((given, extra))
        self.execute(self.operations, tensors)
        kind, places = self.result
        results = [tensors[place % len(tensors)] for place in places]
        if kind == "all":
            return tensors
        if kind == "dict":
            return {str(index): tensor for index, tensor in enumerate(results)}
        if kind == "list":
            return [*results, None, 1]
        return results[0] if kind == "one" else tuple(results)

    def execute(self, operations: list[Operation], tensors: list[torch.Tensor]) -> None:
        for name, *details in operations:
            getattr(self, f"do_{name}")(tensors, *details)

    def do_weigh(self, tensors: list[torch.Tensor], a: int) -> None:
        tensor = tensors[a % len(tensors)]
        tensors.append(tensor * (self.weight if tensor.dim() and tensor.shape[-1] == WIDTH else self.weight.sum()))

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
        other = _fit(other, one)
        tensors.append(one * other if product else one + other)

    def do_write(self, tensors: list[torch.Tensor], kind: str, a: int, b: int) -> None:
        tensor, other = tensors[a % len(tensors)], tensors[b % len(tensors)]
        WRITE[kind](tensor, _fit(other, tensor))

    def do_mode(self, tensors: list[torch.Tensor], grad: bool, operations: list[Operation]) -> None:
        with torch.set_grad_enabled(grad):
            self.execute(operations, tensors)

    def do_branch(self, tensors: list[torch.Tensor], a: int, yes: list[Operation], no: list[Operation]) -> None:
        self.execute(yes if float(tensors[a % len(tensors)].detach().sum()) > 0 else no, tensors)

    def do_hook(self, tensors: list[torch.Tensor], name: str, a: int, scale: bool) -> None:
        tensor = tensors[a % len(tensors)]
        dropped = tensor.grad_fn is None and tensor._is_view()  # made under no_grad; torch crashes on hooks there
        if not tensor.requires_grad or dropped or isinstance(tensor, nn.Parameter):
            return
        log = log_of_run[0]

        def hook(gradient: torch.Tensor | None) -> torch.Tensor | None:
            if gradient is None:  # torch tells hooks of some tensors that no gradient came
                return None
            log.hooks[name].append(gradient.detach().clone())
            return gradient * 0.5 if scale else None

        tensor.register_hook(hook)

    def do_retain(self, tensors: list[torch.Tensor], name: str, a: int) -> None:
        tensor = tensors[a % len(tensors)]
        if tensor.requires_grad and not tensor.is_leaf:
            tensor.retain_grad()
            log_of_run[0].retained.append((name, tensor))

    def do_count(self, tensors: list[torch.Tensor], a: int) -> None:
        self.count.mul_(0.5).add_(tensors[a % len(tensors)].detach().mean())
        tensors.append(tensors[a % len(tensors)] * self.count.clone())

    def do_buffer(self, tensors: list[torch.Tensor]) -> None:
        tensors.append(self.count)

    def do_store(self, tensors: list[torch.Tensor], a: int) -> None:
        self.__dict__["state"] = tensors[a % len(tensors)]  # not as a parameter, even if it is one

    def do_load(self, tensors: list[torch.Tensor]) -> None:
        if self.state is not None:
            tensors.append(self.state)

    def do_call(
        self, tensors: list[torch.Tensor], child: int, places: tuple[int, ...], style: str, repeat: int = 1
    ) -> None:
        module: nn.Module = self.parts[child % len(self.parts)]
        if style == "reach" and isinstance(module, Block) and len(module.parts):
            module = module.parts[0]
        for _ in range(repeat):
            given = [tensors[place % len(tensors)] for place in places]
            if not isinstance(module, Block):
                tensor = given[0]
                fits = tensor.dim() and tensor.shape[-1] == WIDTH
                result = module(tensor if fits else tensor.mean().expand(2, WIDTH))
            elif style == "keyword":
                result = module(*given[1:], extra=given[0])
            elif style == "list":
                result = module(given)
            elif style == "dict":
                result = module({"b": given[-1], "a": given})
            elif style in ("checkpoint", "reentrant") and log_of_run[0].checkpointing:
                result = checkpoint(module, *given, use_reentrant=style == "reentrant")
            else:
                result = module(*given)
            tensors.extend(tensors_in(result))
            del tensors[:-24]


def tensors_in(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, list | tuple):
        return []
    return [tensor for value in tree for tensor in tensors_in(value)]
