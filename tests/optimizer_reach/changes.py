"""What steps and hooks change besides the weights that an update is known to change, and where they do it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer

Change = Callable[[Any], None]


def _parameters(optimizer: Any) -> list[Any]:
    return [one for group in optimizer.param_groups for one in group["params"]]


def _trained(optimizer: Any) -> list[Any]:
    return [one for one in _parameters(optimizer) if one.grad is not None]


def option(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        group["k"] += 1


def rate(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        group["lr"] *= 0.5


def new_option(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        group["seen"] = group.get("seen", 0) + 1
        group["k"] = group["seen"]


def list_option(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        group.setdefault("counts", []).append(1)
        group["k"] = len(group["counts"])


def tensor_option(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        group.setdefault("factor", torch.ones(())).mul_(2)
        group["k"] = float(group["factor"])


def attribute(optimizer: Any) -> None:
    optimizer.count = getattr(optimizer, "count", 0) + 1
    for group in optimizer.param_groups:
        group["k"] = optimizer.count


def named_state(optimizer: Any) -> None:
    optimizer.state["all"]["k"] = optimizer.state["all"].get("k", 0) + 1
    for group in optimizer.param_groups:
        group["k"] = optimizer.state["all"]["k"]


def first_state(optimizer: Any) -> None:
    state = optimizer.state[_parameters(optimizer)[0]]
    state["k"] = state.get("k", 0) + 1
    for group in optimizer.param_groups:
        group["k"] = state["k"]


def number_of_parameters(optimizer: Any) -> None:
    optimizer.count = getattr(optimizer, "count", 0) + len(_trained(optimizer))


def none(optimizer: Any) -> None:
    for one in _parameters(optimizer):
        one.grad = None


def zeros(optimizer: Any) -> None:
    for one in _trained(optimizer):
        one.grad.zero_()


def scaled_data(optimizer: Any) -> None:
    for one in _trained(optimizer):
        one.grad.data.mul_(0.5)


def scaled(optimizer: Any) -> None:
    for one in _trained(optimizer):
        one.grad.mul_(0.5)


def replaced(optimizer: Any) -> None:
    for one in _trained(optimizer):
        one.grad = one.grad * 0.5


def made(optimizer: Any) -> None:
    for one in _parameters(optimizer):
        if one.grad is None:
            one.grad = torch.full_like(one, 0.25)


def zero_grad(optimizer: Any) -> None:
    optimizer.zero_grad()


def zero_grad_zeros(optimizer: Any) -> None:
    optimizer.zero_grad(set_to_none=False)


def weights(optimizer: Any) -> None:
    for one in _parameters(optimizer):
        one.mul_(0.9)


def untrained_weights(optimizer: Any) -> None:
    for one in _parameters(optimizer):
        if one.grad is None:
            one.mul_(0.9)


def fewer(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        group["params"] = group["params"][:1]


CHANGES: dict[str, Change] = {
    one.__name__: one
    for one in (
        *(option, rate, new_option, list_option, tensor_option, attribute, named_state),
        *(first_state, number_of_parameters, none, zeros, scaled_data, scaled, replaced, made),
        *(zero_grad, zero_grad_zeros, weights, untrained_weights, fewer),
    )
}
WHERE = ("step", "pre hook", "post hook", "before super().step()", "after super().step()", "both")


class Own(Optimizer):
    """An update of its own by the options of the group, and a change in its step."""

    change: Change = staticmethod(lambda optimizer: None)

    def __init__(self, params: Iterable[Any], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "k": 0})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is None:
                    continue
                state = self.state[one]
                state["momentum"] = 0.5 * state.get("momentum", torch.zeros_like(one)) + one.grad
                one.sub_(state["momentum"], alpha=group["lr"] / (2 + group["k"]))
        self.change(self)


def optimizer_with(change: Change, where: str, params: Any) -> Any:
    """An optimizer that makes a change in a place."""

    @torch.no_grad()
    def hook(optimizer: Any, *_: Any) -> None:
        change(optimizer)

    class Changing(Own):
        pass

    class Sub(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            if where == "before super().step()":
                change(self)
            loss = super().step(closure)
            if where == "after super().step()":
                change(self)
            return loss

    if where == "step":
        Changing.change = staticmethod(change)
        return Changing(params)
    if where == "both":  # hooks of an optimizer whose step calls that of a class which has been used by itself
        torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    kind: Any = torch.optim.SGD if where in ("pre hook", "post hook") else Sub
    made: Any = kind(params, lr=0.1, momentum=0.5)
    for group in made.param_groups:
        group["k"] = 0
    if where == "pre hook":
        made.register_step_pre_hook(hook)
    elif where in ("post hook", "both"):
        made.register_step_post_hook(hook)
    return made
