"""State of modules and hooks."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import shardwright as smp
import torch
from torch import nn
from torch.nn.utils import parametrize

from tests.silently_wrong.scenario import (
    compare_gradients,
    divided,
    inner,
    plain_step,
    scenario,
    square,
    step_of,
    train,
    train_both,
    train_changing,
)
from tests.silently_wrong.stages import WIDTH, Layer, Noting, TwoStages, batch


@scenario
def eval_mode_in_the_step() -> Any:
    return train_changing(lambda model: model.eval())


@scenario
def an_attribute_set_in_the_step_on_a_module_elsewhere() -> Any:
    def change(model: Any) -> None:
        inner(model).there.flag = 3.0

    return train_changing(change)


@scenario
def an_attribute_set_in_the_step_on_a_module_here() -> Any:
    def change(model: Any) -> None:
        inner(model).here.flag = 3.0

    return train_changing(change)


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.linear(x))


class DroppingStages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.here, self.there = Layer(), Dropping()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.there(self.here(x))


@scenario
def a_module_without_parameters_changed_in_the_step() -> Any:
    def change(model: Any) -> None:
        inner(model).there.drop.p = 1.0

    return train_changing(change, DroppingStages())


class NotingStages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.here, self.there = Layer(), Noting()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.there(self.here(x))


@scenario
def an_attribute_of_a_child_elsewhere_read_in_the_step() -> Any:
    return train(NotingStages(), lambda model, x: square(model, x) + inner(model).there.penalty)


class ReadingStages(NotingStages):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.there(self.here(x))
        return y + self.there.penalty


@scenario
def an_attribute_of_a_child_elsewhere_read_by_its_parent_with_pins() -> Any:
    return train(ReadingStages(), square)


@scenario
def an_attribute_of_a_child_read_by_its_parent_with_an_automatic_partition() -> Any:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.more = (
                ReadingStages(),
                ReadingStages(),
                nn.Sequential(*(Layer() for _ in range(6))),
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.more(self.two(self.one(x)))

    plain = Deep()
    model = smp.DistributedModel(copy.deepcopy(plain))
    train_both(model, plain)
    return compare_gradients(model, plain)


class TiedStages(nn.Module):
    """A weight in two modules of rank 1, and a module of rank 1 that runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.here, self.there, self.last = Layer(), Layer(), Layer()
        self.last.linear.weight = self.there.linear.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.here(self.there(self.there(self.here(x)))))


@scenario
def hooks_of_tied_and_reused_parameters() -> Any:
    module = TiedStages()
    plain = copy.deepcopy(module)
    seen: dict[str, list[torch.Tensor]] = {}
    for name, parameter in module.named_parameters():
        parameter.register_hook(lambda g, name=name: seen.setdefault(name, []).append(g.clone()) or g * 2)
        parameter.register_post_accumulate_grad_hook(
            lambda p, name=name: seen.setdefault("post " + name, []).append(p.grad.clone())
        )
    model = divided(module, there=1, last=1)
    train_both(model, plain)
    for parameter in plain.parameters():
        parameter.grad *= 2
    local = dict(model.local_named_parameters())
    assert set(seen) == {*local, *(f"post {name}" for name in local)}, seen.keys()
    for name in local:
        (before,), (after,) = seen[name], seen["post " + name]
        wanted = dict(plain.named_parameters())[name].grad
        torch.testing.assert_close(before * 2, wanted)
        torch.testing.assert_close(after, wanted)
    return compare_gradients(model, plain)


@scenario
def a_parameter_hook_registered_in_the_step() -> Any:
    return train_changing(lambda model: inner(model).there.linear.weight.register_hook(lambda g: g * 2))


@scenario
def a_hook_of_an_own_parameter_registered_in_the_step() -> Any:
    return train_changing(lambda model: inner(model).here.linear.weight.register_hook(lambda g: g * 2))


@scenario
def a_post_accumulate_hook_registered_in_the_step() -> Any:
    return train_changing(
        lambda model: inner(model).here.linear.weight.register_post_accumulate_grad_hook(lambda p: None)
    )


class HookingStages(TwoStages):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: Any = self.there(self.here(x))
        if result.requires_grad:
            result.grad_fn.register_prehook(lambda gradients: (gradients[0] * 2,))
        return self.again(result)


@scenario
def a_hook_on_the_node_of_a_result() -> Any:
    return train(HookingStages(), square)


class ThreadedStages(TwoStages):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with ThreadPoolExecutor(1, "prefetch") as pool:
            return self.again(pool.submit(self.there, self.here(x)).result())


@scenario
def a_module_elsewhere_called_in_a_thread_of_the_script() -> Any:
    return train(ThreadedStages(), square)


@scenario
def freezing_in_the_step() -> Any:
    return train_changing(lambda model: inner(model).there.requires_grad_(False))


@scenario
def freezing_between_steps() -> Any:
    plain = TwoStages()
    model = divided(copy.deepcopy(plain))
    step = step_of()
    step(model, batch())
    for parameter in model.parameters():  # those of the other rank answer too
        parameter.register_hook(lambda gradient: gradient * 1.0).remove()
        parameter.register_post_accumulate_grad_hook(lambda parameter: None).remove()
    for frozen in (False, True, False):
        for module in (plain, model):
            module.zero_grad()
            inner(module).there.requires_grad_(not frozen)
        step(model, batch())
        plain_step(plain, batch(), square)
        exact = compare_gradients(model, plain)
        assert exact.worst < 1e-12
        assert (next(plain.there.parameters()).grad is None) == frozen
    return exact


class Writing(nn.Module):
    """Changes a list that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, seen: list[torch.Tensor]) -> torch.Tensor:
        y = self.linear(x)
        seen.append(y)
        return y


class WritingStages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.here, self.there = Layer(), Writing()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen: list[torch.Tensor] = []
        y = self.there(self.here(x), seen)
        return y + sum(seen)


@scenario
def a_list_that_a_module_elsewhere_appends_to() -> Any:
    return train(WritingStages(), square)


@scenario
def other_weights_by_functional_call() -> Any:
    def loss(model: Any, x: torch.Tensor) -> torch.Tensor:
        other = {"there.linear.weight": torch.ones(WIDTH, WIDTH)}
        return torch.func.functional_call(inner(model), other, (x,)).square().mean()

    model = divided(TwoStages())
    step_of(lambda model, x: square(model, x) + loss(model, x))(model, batch())
    return "nothing"


@scenario
def a_weight_assigned_after_the_partition() -> Any:
    model = divided(TwoStages())
    step = step_of()
    step(model, batch())
    model.module.there.linear.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))
    step(model, batch())
    return "nothing"


class CachedStages(TwoStages):
    """Has weights cached that are computed by parametrizations, but not while it is traced."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with contextlib.nullcontext() if smp.is_tracing() else parametrize.cached():
            return super().forward(x)


@scenario
def parametrize_cached_around_a_module_elsewhere() -> Any:
    return train(CachedStages(), square)


class Growing(Layer):
    """Makes weights of its own when it first runs."""

    def __init__(self, make: Callable[[], nn.Module | nn.Parameter]) -> None:
        super().__init__()
        self.make, self.more = make, nn.ModuleList()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        if not hasattr(self, "made"):
            made = self.make()
            if isinstance(made, nn.ModuleList):
                self.more.append(made[0])
            else:
                self.made = made
            if isinstance(made, nn.Sequential):
                made.append(nn.Linear(WIDTH, WIDTH))
        return x * self.made if isinstance(self.made, nn.Parameter) else self.made(x)


class GrowingStages(TwoStages):
    def __init__(self, where: str, make: Callable[[], nn.Module | nn.Parameter]) -> None:
        super().__init__()
        setattr(self, where, Growing(make))


@scenario
def a_parameter_made_in_a_forward() -> Any:
    return train(GrowingStages("again", lambda: nn.Parameter(torch.ones(WIDTH))), square)


@scenario
def a_module_made_in_a_forward_elsewhere() -> Any:
    return train(GrowingStages("there", lambda: nn.Linear(WIDTH, WIDTH)), square)


@scenario
def a_module_made_in_a_forward_and_put_in_a_list() -> Any:
    return train(GrowingStages("there", lambda: nn.ModuleList([nn.Linear(WIDTH, WIDTH)])), square)


@scenario
def a_module_made_in_a_forward_and_filled_later() -> Any:
    return train(GrowingStages("there", nn.Sequential), square)


@scenario
def a_module_without_parameters_made_in_a_forward() -> Any:
    return train(GrowingStages("there", lambda: nn.Tanh()), square)
