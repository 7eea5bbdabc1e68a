"""Runs cases of adapters as a rank: ``program.py NAMES DEGREE``, with ``|`` between names; says how each came out."""

from __future__ import annotations

import sys
import traceback
import warnings
from typing import Any

import shardwright as smp
import torch

from tests.adapters.cases import CASES, REFUSED, Case, of_labels
from tests.adapters.networks import batch, far_modules

STEPS, MICROBATCHES = 3, 2
DEGREE = int(sys.argv[2])


def trained(model: Any) -> list[torch.nn.Parameter]:
    """The parameters that are trained."""
    return [one for one in model.parameters() if one.requires_grad]


def add_new(optimizer: Any, model: Any) -> None:
    """Train those parameters too that the model has got since."""
    known = {id(one) for group in optimizer.param_groups for one in group["params"]}
    if new := [one for one in trained(model) if id(one) not in known]:
        optimizer.add_param_group({"params": new})


def without_checkpoints(model: Any) -> None:
    """Compute nothing again: peft alone would do so with the adapters that are active by then."""
    base = model.get_base_model()
    if hasattr(base, "gradient_checkpointing_disable"):
        base.gradient_checkpointing_disable()
    else:
        base.checkpoints = False


def run_plainly(case: Case) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of one process."""
    model = case.build().train(case.trains)
    without_checkpoints(model)
    optimizer = torch.optim.SGD(trained(model), lr=0.1)
    losses = []
    for step in range(STEPS):
        total = 0.0
        flags = {name: one.requires_grad for name, one in model.named_parameters()}
        for rows in batch(step).chunk(MICROBATCHES):
            with torch.set_grad_enabled(case.trains):
                loss = case.loss(model, rows)
            for name, parameter in model.named_parameters():  # which peft has changed with what is active
                parameter.requires_grad_(flags[name])
            if case.trains:
                (loss / MICROBATCHES).backward()
            total += float(loss) / MICROBATCHES
        losses.append(total)
        optimizer.step()
        case.updated(model, step)
        optimizer.zero_grad()
        case.between(model)
        add_new(optimizer, model)
    return losses, model.state_dict()


def run_over_ranks(case: Case) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of all ranks."""
    module = case.build().train(case.trains)
    for part in far_modules(module):
        smp.set_partition(part, DEGREE - 1)
    if case.marks:
        for name in ("first", "second"):
            smp.set_activation_checkpointing(getattr(module.get_base_model(), name))
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(trained(model), lr=0.1))

    @smp.step
    def step(model: Any, rows: torch.Tensor) -> torch.Tensor:
        with torch.set_grad_enabled(case.trains):
            loss = case.loss(model, rows)
        if case.trains:
            model.backward(loss)
        return loss.detach()

    losses = []
    for number in range(STEPS):
        losses.append(float(step(model, batch(number)).reduce_mean()))
        if case.trains:
            optimizer.step()
            case.updated(model.module, number)
            optimizer.zero_grad()
        case.between(model.module)
        add_new(optimizer, model)
    return losses, model.state_dict()


def outcome(case: Case) -> str:
    """How far a case is from the plain one."""
    (plain, weights), (ours, state) = run_plainly(case), run_over_ranks(case)
    assert list(weights) == list(state), "the names of weights are others"
    away = max(float((weights[name] - state[name]).abs().max()) for name in weights)
    apart = max(abs(first - second) for first, second in zip(plain, ours, strict=True))
    before = case.build().state_dict()
    if case.trains:
        assert any(not torch.equal(weights[name], before.get(name, 0 * weights[name])) for name in weights), "untrained"
    rounding = 1e-6 if case.loss is of_labels else 1e-12  # the model computes its own loss in single precision
    return "exact" if apart < rounding and away < 1e-12 else f"losses {apart:.1e} apart, weights {away:.1e}"


def refusal(case: Case, words: str) -> str:
    """Whether a case is refused in these words, and the next step works."""
    try:
        run_over_ranks(case)
    except smp.FrameError as error:
        return "refused" if words in str(error) else f"refused by {error}"
    return "not refused"


def main() -> None:
    """Run them."""
    warnings.simplefilter("ignore")
    torch.set_default_dtype(torch.float64)
    smp.init({"pipeline_parallel_degree": DEGREE, "microbatches": MICROBATCHES, "stall_timeout_seconds": 60})
    for name in sys.argv[1].split("|"):
        try:
            said = outcome(CASES[name]) if name in CASES else refusal(*REFUSED[name])
        except Exception as error:
            traceback.print_exc()
            said = f"{type(error).__name__}: {error}"
        print(f"{name}: {' '.join(said.split())}", flush=True)


if __name__ == "__main__":
    main()
