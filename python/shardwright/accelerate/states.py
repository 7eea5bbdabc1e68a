"""``save_state`` and ``load_state`` of ``Accelerator``, by checkpoints of this library."""

from __future__ import annotations

import os
from typing import Any

import torch
from accelerate.data_loader import get_sampler

from shardwright.checkpoints import resume_from_checkpoint, save_checkpoint
from shardwright.errors import CheckpointError

TAG = "accelerate"


def save_state(accelerator: Any, folder: str | None) -> str:
    """Save all that an accelerator has prepared. All ranks call this."""
    folder = _folder(accelerator, folder, saving=True)
    model, optimizer = _only(accelerator)
    content = {
        "schedulers": [scheduler.state_dict() for scheduler in accelerator._schedulers],
        "scaler": None if accelerator.scaler is None else accelerator.scaler.state_dict(),
        "step": accelerator.step,
        "objects": [one.state_dict() for one in accelerator._custom_objects],
        "loaders": [_order_of(loader) for loader in accelerator._dataloaders],
    }
    save_checkpoint(folder, TAG, model=model, optimizer=optimizer, user_content=content)
    accelerator.project_configuration.iteration += 1
    return folder


def load_state(accelerator: Any, folder: str | None) -> None:
    """Load what :func:`save_state` saved. All ranks call this."""
    model, optimizer = _only(accelerator)
    content = resume_from_checkpoint(_folder(accelerator, folder, saving=False), TAG, model=model, optimizer=optimizer)
    if len(content["schedulers"]) != len(accelerator._schedulers) or len(content["objects"]) != len(
        accelerator._custom_objects
    ):
        raise CheckpointError("accelerator.load_state: other schedulers or registered objects than were saved")
    for scheduler, state in zip(accelerator._schedulers, content["schedulers"], strict=True):
        scheduler.load_state_dict(state)
    for one, state in zip(accelerator._custom_objects, content["objects"], strict=True):
        one.load_state_dict(state)
    if accelerator.scaler is not None and content["scaler"] is not None:
        accelerator.scaler.load_state_dict(content["scaler"])
    accelerator.step = content["step"]
    for loader, order in zip(accelerator._dataloaders, content.get("loaders", ()), strict=False):
        _put_in_order(loader, order)


def _order_of(loader: Any) -> dict[str, Any]:
    """What the order of a loader's samples depends on: the epoch, the seed of its sampler, and its generator."""
    sampler, iteration = get_sampler(loader), getattr(loader, "iteration", None)
    generator = getattr(sampler, "generator", None)
    return {
        "iteration": iteration,
        "epoch": getattr(sampler, "epoch", None),
        "seed": getattr(sampler, "initial_seed", None),
        "generator": generator.get_state() if isinstance(generator, torch.Generator) else None,
    }


def _put_in_order(loader: Any, order: dict[str, Any]) -> None:
    sampler = get_sampler(loader)
    if order["iteration"] is not None:
        loader.iteration = order["iteration"]
    for name, value in (("epoch", order["epoch"]), ("initial_seed", order["seed"])):
        if value is not None and hasattr(sampler, name):
            setattr(sampler, name, value)
    if order["generator"] is not None:
        if getattr(sampler, "generator", None) is None:
            sampler.generator = torch.Generator()
        sampler.generator.set_state(order["generator"])


def _only(accelerator: Any) -> tuple[Any, Any]:
    """The model and the optimizer; a checkpoint has one of each."""
    if len(accelerator._models) != 1 or len(accelerator._optimizers) > 1:
        raise CheckpointError(
            f"accelerator.save_state and load_state with {len(accelerator._models)} models and "
            f"{len(accelerator._optimizers)} optimizers, of which a checkpoint has one: call smp.save_checkpoint and "
            "smp.resume_from_checkpoint for each model"
        )
    optimizers = [one.optimizer for one in accelerator._optimizers]
    return accelerator._models[0], optimizers[0] if optimizers else None


def _folder(accelerator: Any, given: str | None, *, saving: bool) -> str:
    if given is not None:
        return os.path.abspath(given)
    if not accelerator.project_configuration.automatic_checkpoint_naming:
        raise CheckpointError("accelerator.save_state and load_state: a folder is needed")
    number = accelerator.save_iteration if saving else accelerator.save_iteration - 1
    return os.path.join(accelerator.project_dir, "checkpoints", f"checkpoint_{number}")
