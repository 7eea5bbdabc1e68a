"""Further operations of blocks: first uses of tensors, loops and writes of many kinds, hooks on views, Python state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from tests.programs.layers import call_layer
from tests.programs.log import log_of_run
from tests.programs.tables import TRANSFORMS, USES, VIEW, WRITE, fit_width
from tests.programs.values import tensors_in

#: What a block changes before operations and puts back after them.
AROUND = ("stack", "item", "number", "training", "hook")


class WiderOperations:
    """The methods of a block for these operations."""

    parts: nn.ModuleList
    weight: nn.Parameter
    training: bool
    number: int
    level: float
    past: list[float]
    stack: list[torch.Tensor]
    held: dict[str, torch.Tensor]

    def execute(self, operations: Sequence[Any], tensors: list[torch.Tensor]) -> None:
        """Run operations."""
        raise NotImplementedError

    def do_resize(self, tensors: list[torch.Tensor], a: int, width: int) -> None:
        log_of_run[0].saw("several widths")
        tensors.append(fit_width(tensors[a % len(tensors)], width))

    def do_use(self, tensors: list[torch.Tensor], kind: str, a: int, b: int) -> None:
        log_of_run[0].saw("first uses")
        if kind in TRANSFORMS:
            log_of_run[0].saw("torch.func")
        tensors.extend(tensors_in(USES[kind](tensors[a % len(tensors)], tensors[b % len(tensors)])))

    def do_until(self, tensors: list[torch.Tensor], child: int, a: int, threshold: float, most: int) -> None:
        """Call a child as often as data says."""
        log_of_run[0].saw("loops by data")
        module, tensor, calls = self.parts[child % len(self.parts)], tensors[a % len(tensors)], 0
        while float(tensor.detach().abs().mean()) > threshold and calls < most:
            found = tensors_in(call_layer(module, [tensor]))
            tensor, calls = (found or [tensor])[0], calls + 1
        tensors.append(tensor)

    def do_infer(self, tensors: list[torch.Tensor], operations: Sequence[Any]) -> None:
        """Run operations in inference mode, and keep a number of what they give."""
        log_of_run[0].saw("inference mode")
        with torch.inference_mode():
            inner = list(tensors)
            self.execute(operations, inner)
            number = float(inner[-1].mean())
        tensors.append(tensors[-1] * (1 + abs(number)) / (2 + abs(number)))

    def do_fresh(self, tensors: list[torch.Tensor], kind: str, a: int, b: int) -> None:
        """Write to a tensor that was just made."""
        log_of_run[0].saw("in-place operations")
        tensor = tensors[a % len(tensors)] * 1
        WRITE[kind](tensor, tensors[b % len(tensors)].mean())
        tensors.append(tensor)

    def do_viewhook(self, tensors: list[torch.Tensor], name: str, view: str, a: int, scale: bool) -> None:
        """Put a hook on a view, and go on with that."""
        tensor = tensors[a % len(tensors)] * 1
        seen = VIEW[view](tensor)
        if not seen.requires_grad or seen.grad_fn is None:
            return
        log_of_run[0].saw("tensor hooks")
        log_of_run[0].saw("hooks on views")
        log_of_run[0].hook(name, seen, scale)
        tensors.extend([tensor, seen])

    def do_shrink(self, tensors: list[torch.Tensor]) -> None:
        """Change a weight in forward."""
        log_of_run[0].saw("weights written in forward")
        if self.training:
            with torch.no_grad():
                self.weight.mul_(0.99)

    def do_number(self, tensors: list[torch.Tensor], a: int) -> None:
        """Count calls in a Python number, and read it after the first look."""
        log_of_run[0].saw("Python state")
        self.number += 1
        tensor = tensors[a % len(tensors)] * 1
        tensors.append(tensor / self.number)

    def do_level(self, tensors: list[torch.Tensor], a: int) -> None:
        """Keep a running average in a Python float."""
        log_of_run[0].saw("Python state")
        self.level = 0.9 * self.level
        mean = tensors[a % len(tensors)].detach().tanh().mean()
        self.level += 0.1 * float(mean)
        tensors.append(tensors[a % len(tensors)] * self.level)

    def do_past(self, tensors: list[torch.Tensor], a: int) -> None:
        """Keep the last values in a list."""
        log_of_run[0].saw("Python state")
        tensor = tensors[a % len(tensors)] + sum(self.past)
        self.past.append(float(tensor.detach().tanh().mean()))
        del self.past[:-3]
        tensors.append(tensor)

    def do_around(self, tensors: list[torch.Tensor], kind: str, a: int, operations: Sequence[Any]) -> None:
        """Run operations while something is otherwise than before and afterwards, and look at that then."""
        log_of_run[0].saw("state that is put back")
        given, first = tensors[a % len(tensors)], list(self.parts)[:1]
        if kind == "stack":
            self.stack.append(given)
            self.execute(operations, tensors)
            given = self.stack.pop()
        elif kind == "item":
            key = f"given {len(self.held)}"
            self.held[key] = given
            self.execute(operations, tensors)
            given = self.held.pop(key)
        elif kind == "number":
            self.number += 1
            self.execute(operations, tensors)
            given = given / (1 + self.number)
            self.number -= 1
        elif kind == "training":
            before, self.training = self.training, not self.training
            self.execute(operations, tensors)
            given = given * (2 if self.training == before else 3)
            self.training = before
        else:
            handles = [part.register_forward_hook(_halved) for part in first if type(part) is type(self)]
            self.execute(operations, tensors)
            for handle in handles:
                handle.remove()
        tensors.append(given * 1)


def _halved(_module: nn.Module, _args: Any, result: Any) -> Any:
    return result / 2 if isinstance(result, torch.Tensor) else result
