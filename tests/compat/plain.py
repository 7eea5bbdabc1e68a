"""What the scripts compute, in plain PyTorch: ``python -m tests.compat.plain SCRIPT ARGUMENTS``, one process.

Models and batches are the scripts' own; everything else is written anew here. It prints a JSON object of losses.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

SCRIPTS = Path(__file__).parents[2] / "examples" / "compat"
Report = dict[str, Any]


def script_of(name: str) -> Any:
    """Import one of the scripts."""
    spec = importlib.util.spec_from_file_location(f"compat_{name}", SCRIPTS / f"{name}.py")
    assert spec is not None, name
    assert spec.loader is not None, name
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Lamb(torch.optim.Optimizer):
    """LAMB as its paper has it, with gradients that are clipped by their norm first."""

    def __init__(self, groups: Iterable[Any], lr: float) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters."""
        every = [(group, one) for group in self.param_groups for one in group["params"] if one.grad is not None]
        norm = torch.stack([one.grad.norm() for _, one in every]).norm()
        for group, one in every:
            gradient = one.grad / max(1.0, norm.item())
            state = self.state.setdefault(one, {"step": 0, "m": torch.zeros_like(one), "v": torch.zeros_like(one)})
            state["step"] += 1
            state["m"] = 0.9 * state["m"] + 0.1 * gradient
            state["v"] = 0.999 * state["v"] + 0.001 * gradient**2
            first, second = state["m"] / (1 - 0.9 ** state["step"]), state["v"] / (1 - 0.999 ** state["step"])
            update = first / (second.sqrt() + 1e-6) + group["weight_decay"] * one
            ratio = one.norm() / update.norm() if group["weight_decay"] and one.norm() > 0 else 1.0
            one -= group["lr"] * ratio * update


def _seeded(script: Any, args: argparse.Namespace) -> nn.Module:
    torch.manual_seed(args.seed)
    model: nn.Module = script.make_model(args)
    return model


def _train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    losses: Iterable[Callable[[], torch.Tensor]],
    max_norm: float | None = None,
    after: Callable[[], None] = lambda: None,
) -> list[float]:
    found = []
    for loss_of in losses:
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()  # type: ignore[no-untyped-call]
        found.append(loss.item())
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        after()
    return found


def gpt2(script: Any, args: argparse.Namespace) -> Report:
    """A language model."""
    model: Any = _seeded(script, args)
    optimizer = torch.optim.AdamW(script.parameter_groups(model, args), lr=args.lr, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, script.learning_rate)

    def loss_of(step: int) -> torch.Tensor:
        ids = script.batch_of_step(args, step)
        loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
        return loss

    clips = args.fp16 or args.bf16 or (args.sharded_data_parallel_degree or 1) > 1
    losses = (lambda step=step: loss_of(step) for step in range(args.max_steps))
    found = _train(model, optimizer, losses, args.grad_clip if clips else None, schedule.step)
    return {"losses": found, "evaluated": loss_of(args.max_steps).item(), "parameters": _count(model)}


def bert(script: Any, args: argparse.Namespace) -> Report:
    """A masked language model."""
    model = _seeded(script, args)
    named = list(model.named_parameters())
    plain = ("bias", "LayerNorm.weight")
    groups = [
        {"params": [one for name, one in named if not name.endswith(plain)], "weight_decay": 0.01},
        {"params": [one for name, one in named if name.endswith(plain)], "weight_decay": 0.0},
    ]
    if args.optimizer == "lamb":
        optimizer: torch.optim.Optimizer = Lamb(groups, args.learning_rate)
    else:
        optimizer = torch.optim.AdamW(groups, lr=args.learning_rate)
    losses = (
        lambda step=step: script.loss_of(model, script.batch_of_step(args, step)) for step in range(args.max_steps)
    )
    return {"losses": _train(model, optimizer, losses), "parameters": _count(model)}


def classifier(script: Any, args: argparse.Namespace) -> Report:
    """A classifier of pictures; scaling by a power of two changes nothing."""
    model = _seeded(script, args)
    optimizer = torch.optim.Adadelta(model.parameters(), lr=args.lr)
    found = []

    def loss_of(step: int) -> torch.Tensor:
        pictures, targets = script.batch_of_step(args, step)
        with script.autocast(args, "cpu"):
            return functional.nll_loss(model(pictures).float(), targets)

    for epoch in range(args.epochs):
        steps = range(epoch * args.batches, (epoch + 1) * args.batches)
        found += _train(model, optimizer, (lambda step=step: loss_of(step) for step in steps))
        with torch.no_grad():
            pictures, targets = script.batch_of_step(args, -1 - epoch)
            found.append(functional.nll_loss(model(pictures), targets).item())
    return {"losses": found, "parameters": _count(model)}


def manual_partition(script: Any, args: argparse.Namespace) -> Report:
    """A model of two towers."""
    model = _seeded(script, args)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)

    def loss_of(step: int) -> torch.Tensor:
        users, items, ratings = script.batch_of_step(args, step)
        return functional.mse_loss(model(users, items), ratings)

    losses = (lambda step=step: loss_of(step) for step in range(args.max_steps))
    return {"losses": _train(model, optimizer, losses), "parameters": _count(model)}


def registered_modules(script: Any, args: argparse.Namespace) -> Report:
    """A model of own modules."""
    model = _seeded(script, args)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)

    def loss_of(step: int) -> torch.Tensor:
        ids, targets = script.batch_of_step(args, step)
        return functional.cross_entropy(model(ids).flatten(0, 1), targets.flatten())

    losses = (lambda step=step: loss_of(step) for step in range(args.max_steps))
    return {"losses": _train(model, optimizer, losses), "parameters": _count(model)}


def finetune(script: Any, args: argparse.Namespace) -> Report:
    """A model that was saved by ``save_pretrained``; saves it first if there is none."""
    if not os.path.exists(args.model_name_or_path):
        script.pretrained(args.model_name_or_path)
    model: Any = _seeded(script, args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)

    def loss_of(step: int) -> torch.Tensor:
        ids = script.batch_of_step(args, step)
        loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
        return loss

    losses = (lambda step=step: loss_of(step) for step in range(args.max_steps))
    found = _train(model, optimizer, losses)
    return {"losses": found, "evaluated": loss_of(args.max_steps).item(), "parameters": _count(model)}


def evaluated(script: Any, args: argparse.Namespace) -> float:
    """The loss of the model that a script has saved in ``output_dir``."""
    args.model_name_or_path = args.output_dir
    model: Any = script.make_model(args)
    ids = script.batch_of_step(args, args.max_steps)
    loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
    return loss.item()


PLAIN: dict[str, Callable[[Any, argparse.Namespace], Report]] = {
    one.__name__: one for one in (gpt2, bert, classifier, manual_partition, registered_modules, finetune)
}


def _count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def main() -> int:
    """Train, or evaluate what was saved."""
    name, *arguments = sys.argv[1:]
    saved = arguments[:1] == ["--saved"]
    script = script_of(name)
    args = script.parse_arguments(arguments[1:] if saved else arguments)
    report = {"evaluated": evaluated(script, args)} if saved else PLAIN[name](script, args)
    print(json.dumps(report), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
