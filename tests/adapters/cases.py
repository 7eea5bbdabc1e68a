"""What scripts do with adapters in a step: each case runs the same code over ranks and in one process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import peft
import torch

from tests.adapters.networks import TARGETS, adapted, language_model, lora, prompts

#: Computes the loss of a microbatch.
Loss = Callable[[Any, torch.Tensor], torch.Tensor]


def run(model: Any, inputs: torch.Tensor, **given: Any) -> torch.Tensor:
    """What the model computes."""
    result = model(inputs, **given)
    values: torch.Tensor = getattr(result, "logits", result)
    return values


def plain_loss(model: Any, inputs: torch.Tensor) -> torch.Tensor:
    """Without any switch."""
    return run(model, inputs).square().mean()


def beside_base(model: Any, inputs: torch.Tensor) -> torch.Tensor:
    """How far the model is from its base, as in a loss with a reference."""
    with torch.no_grad(), model.disable_adapter():
        base = run(model, inputs)
    return (run(model, inputs) - base).square().mean()


def base_with_gradients(model: Any, inputs: torch.Tensor) -> torch.Tensor:
    """The base has gradients too, of what is trained in it."""
    with model.disable_adapter():
        base = run(model, inputs)
    return run(model, inputs).square().mean() + base.square().mean()


def both(model: Any, inputs: torch.Tensor) -> torch.Tensor:
    """Two adapters, one after another."""
    before = model.active_adapter
    model.set_adapter("other")
    others = run(model, inputs)
    model.set_adapter(before)
    return run(model, inputs).square().mean() + others.sin().mean()


def frozen(model: Any, inputs: torch.Tensor) -> torch.Tensor:
    """Another adapter, which is not trained, with gradients through it."""
    model.set_adapter("other", inference_mode=True)
    others = run(model, inputs)
    model.set_adapter("default")
    return (run(model, inputs) - others).square().mean()


def by_microbatch(model: Any, inputs: torch.Tensor) -> torch.Tensor:
    """Which adapter runs depends on the microbatch."""
    if int(inputs.sum()) % 2:
        return plain_loss(model, inputs)
    model.set_adapter("other")
    loss = run(model, inputs).sin().mean()
    model.set_adapter("default")
    return loss


def together(model: Any, inputs: torch.Tensor) -> torch.Tensor:
    """Both adapters at once."""
    model.base_model.set_adapter(["default", "other"])
    loss = run(model, inputs).square().mean()
    model.base_model.set_adapter("default")
    return loss + run(model, inputs).sin().mean()


def nested(model: Any, inputs: torch.Tensor) -> torch.Tensor:
    """Contexts in one another, an adapter that is set in one, and exceptions that leave them."""
    with model.disable_adapter():
        with model.disable_adapter():
            first = run(model, inputs)
        model.set_adapter("other")
        second = run(model, inputs)
    with suppress(KeyError), model.disable_adapter():
        raise KeyError("away")
    third = run(model, inputs)
    model.set_adapter("default")
    return first.square().mean() + second.sin().mean() + third.cos().mean() + plain_loss(model, inputs)


def layers_disabled(model: Any, inputs: torch.Tensor) -> torch.Tensor:
    """By the methods that the context uses."""
    model.disable_adapter_layers()
    base = run(model, inputs)
    model.enable_adapter_layers()
    return (run(model, inputs) - base).square().mean()


def ask(model: Any, inputs: torch.Tensor) -> torch.Tensor:
    """Code that asks what is active."""
    with model.disable_adapter():
        pass
    model.set_adapter("other")
    assert model.active_adapter == "other"
    assert model.active_adapters == ["other"]
    loss = run(model, inputs).square().mean() if model.active_adapter == "other" else 0
    model.set_adapter("default")
    assert model.active_adapters == ["default"]
    return loss + plain_loss(model, inputs)


@dataclass(frozen=True)
class Case:
    """Something that scripts do.

    Attributes:
        loss: Computes the loss of a microbatch.
        build: Makes the model.
        between: What is done to it between steps, by all ranks.
        trains: Whether it is trained; otherwise it is evaluated.
        marks: Whether a layer of each rank is marked for activation checkpointing.
        updated: What is done after an update, while there are gradients, by all ranks.
    """

    loss: Loss = plain_loss
    build: Callable[[], Any] = adapted
    between: Callable[[Any], None] = field(default=lambda model: None)
    trains: bool = True
    marks: bool = False
    updated: Callable[[Any, int], None] = field(default=lambda model, step: None)


def two(**given: Any) -> Callable[[], Any]:
    """Two adapters."""
    return lambda: adapted(lora, "other", **given)


def saved_modules() -> peft.PeftConfig:
    """Adapters with a head of their own."""
    return lora(target_modules=["first", "second"], modules_to_save=["head"])


def of(kind: Any, *names: str, **given: Any) -> Callable[[], Any]:
    """A model with adapters of a kind."""
    config = {"target_modules": ["first", "second", "third"], **given}
    return lambda: adapted(lambda: kind(**config), *names)


def unfrozen() -> Any:
    """A base of which something is trained beside the adapters."""
    model = adapted(lora)
    model.base_model.model.norm.requires_grad_(True)
    model.base_model.model.second.base_layer.bias.requires_grad_(True)
    return model


def one_then_other(model: Any) -> None:
    """Train another adapter from the next step on."""
    model.set_adapter("other")
    model.set_requires_grad(["default", "other"])


CASES: dict[str, Case] = {
    "disabled": Case(beside_base),
    "disabled, checkpointed": Case(beside_base, lambda: adapted(lora, checkpoints=True)),
    "disabled, with gradients": Case(base_with_gradients, unfrozen),
    "set": Case(both, two()),
    "set, checkpointed": Case(both, two(checkpoints=True)),
    "set, frozen": Case(frozen, lambda: _without_gradients(adapted(lora, "other"))),
    "set by microbatch": Case(by_microbatch, two()),
    "set together": Case(together, two()),
    "nested": Case(nested, two()),
    "nested, checkpointed": Case(nested, two(checkpoints=True)),
    "nested, marked": Case(nested, two(), marks=True),
    "asked": Case(ask, two()),
    "layers disabled": Case(layers_disabled),
    "set between steps": Case(plain_loss, two(), one_then_other),
    "evaluated": Case(nested, two(), trains=False),
    "modules to save, disabled": Case(beside_base, lambda: adapted(saved_modules)),
    "modules to save, set": Case(both, lambda: adapted(saved_modules, "other")),
    "dora": Case(beside_base, of(peft.LoraConfig, r=2, use_dora=True, init_lora_weights=False)),
    "rslora": Case(both, of(peft.LoraConfig, "other", r=2, use_rslora=True, init_lora_weights=False)),
    "ia3": Case(both, of(peft.IA3Config, "other", feedforward_modules=["third"])),
    "loha": Case(both, of(peft.LoHaConfig, "other", r=2)),
    "lokr": Case(both, of(peft.LoKrConfig, "other", r=2)),
    "vera": Case(beside_base, of(peft.VeraConfig, r=2)),
    "oft": Case(beside_base, of(peft.OFTConfig, oft_block_size=3, r=0)),
    "boft": Case(beside_base, of(peft.BOFTConfig, boft_block_size=3)),
    "normalization": Case(beside_base, of(peft.LNTuningConfig, target_modules=["norm"])),
    "embedding": Case(both, of(peft.LoraConfig, "other", r=2, target_modules=["table", "second"])),
    "tokens": Case(
        beside_base, lambda: adapted(lambda: peft.TrainableTokensConfig(token_indices=[1, 3], target_modules=["table"]))
    ),
    "lora and tokens": Case(beside_base, of(peft.LoraConfig, r=2, trainable_token_indices={"table": [1, 3]})),
}


def of_labels(model: Any, inputs: torch.Tensor) -> torch.Tensor:
    """The loss that the model computes."""
    loss: torch.Tensor = model(input_ids=inputs, labels=inputs).loss
    return loss


def allocate(model: Any, step: int) -> None:
    """Give up what is least important of all layers."""
    model.base_model.update_and_allocate(step)
    kept = model.peft_config["default"].rank_pattern
    assert step == 0 or 0 < sum(map(sum, kept.values())) < sum(map(len, kept.values()))


def ranks_of_layers() -> Any:
    """AdaLoRA on a model of ``transformers``."""
    schedule = {"tinit": 0, "tfinal": 1, "deltaT": 1, "total_step": 4}
    return language_model(adapters=peft.AdaLoraConfig(init_r=4, target_r=2, target_modules=TARGETS, **schedule))


def rows(model: Any, inputs: torch.Tensor) -> torch.Tensor:
    """An adapter for each row, or none."""
    names = ["other", "__base__", "default", "other"][: len(inputs)]
    mixed = run(model, inputs, adapter_names=names)
    return mixed.square().mean() + plain_loss(model, inputs)


def add(model: Any) -> None:
    """Add an adapter, which is trained from then on."""
    if "late" not in model.peft_config:
        torch.manual_seed(8)
        model.add_adapter("late", lora())
        model.double()
    model.set_adapter("late")


def exchange(model: Any) -> None:
    """Delete an adapter, and go on with the other."""
    if "default" in model.peft_config:
        model.delete_adapter("default")
        model.set_adapter("other")


def merge(model: Any) -> None:
    """Merge adapters and take them out again."""
    model.base_model.merge_adapter()
    model.base_model.unmerge_adapter()


CASES |= {
    "vera": Case(beside_base, of(peft.VeraConfig, r=2)),
    "rows": Case(rows, two(), trains=False),
    "added": Case(plain_loss, adapted, add),
    "added, disabled": Case(beside_base, adapted, add),
    "deleted": Case(plain_loss, two(), exchange),
    "merged": Case(plain_loss, two(), merge),
    "prompts": Case(plain_loss, prompts),
    "prompts, disabled": Case(base_with_gradients, prompts),
    "prompts, set": Case(both, lambda: prompts("other")),
    "language model": Case(both, lambda: language_model("other")),
    "language model, checkpointed": Case(nested, lambda: language_model("other", checkpoints=True)),
    "adalora": Case(of_labels, ranks_of_layers, updated=allocate),
    "adalora without a loss": Case(plain_loss, of(peft.AdaLoraConfig, init_r=2, target_r=1, total_step=100)),
}


def _without_gradients(model: Any) -> Any:
    model.set_requires_grad("other", False)
    return model


def left_switched(model: Any, inputs: torch.Tensor) -> torch.Tensor:
    """Switched and not back."""
    model.set_adapter("other")
    return plain_loss(model, inputs)


def added_inside(model: Any, inputs: torch.Tensor) -> torch.Tensor:
    """An adapter that one rank would get."""
    model.add_adapter("late", lora())
    return plain_loss(model, inputs)


def rescaled_inside(model: Any, inputs: torch.Tensor) -> torch.Tensor:
    """Scales that are changed on one rank."""
    with peft.helpers.rescale_adapter_scale(model, 0.5):
        return plain_loss(model, inputs)


#: What is refused, with a part of what is said then.
REFUSED: dict[str, tuple[Case, str]] = {
    "frozen adapter": (Case(both, lambda: _without_gradients(adapted(lora, "other"))), "model.set_requires_grad("),
    "trained adapter": (Case(frozen, two()), "inference_mode=False"),
    "left switched": (Case(left_switched, two()), "and not back"),
    "added inside": (Case(added_inside, two()), "call it outside of it, on every rank"),
    "rescaled inside": (Case(rescaled_inside, two()), "'scaling' of module"),
}
