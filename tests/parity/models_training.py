"""Training loops that are more than one step function of one model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from .models_control import WIDTH, Chain, chain_pins, dense
from .models_language import causal_step, gpt2
from .models_vision import ResNet, classify, images, resnet_pins
from .problem import BATCH, Models, Phase, Problem, normal, one, sgd, square_loss


def evaluate(models: Models, x: torch.Tensor) -> Any:
    return {"output": models["model"](x)}


def infer(models: Models, x: torch.Tensor) -> Any:
    with torch.inference_mode():
        output = models["model"](x)
        return {"output": output, "best": output.argmax(-1)}


def mixed_step(models: Models, x: torch.Tensor) -> Any:
    """Matrix products in bfloat16, the rest in single precision, wherever a module runs."""
    with torch.autocast("cpu", torch.bfloat16):
        output = models["model"](x.float())
        loss = output.float().square().mean()
    models["model"].backward(loss)
    return loss, output


def evaluate_images(models: Models, images: torch.Tensor, labels: torch.Tensor) -> Any:
    logits = models["model"](images)
    return logits, (logits.argmax(-1) == labels).double().mean()


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = dense(), nn.Linear(WIDTH, WIDTH)

    def forward(self, noise: torch.Tensor) -> Any:
        return self.two(self.one(noise))


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm, self.two = dense(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> Any:
        return self.two(self.norm(self.one(x)))


def gan() -> dict[str, nn.Module]:
    return {"generator": Generator(), "critic": Critic()}


def gan_pins(pp: int) -> dict[str, int]:
    return {"generator.two": 1, "critic.one": pp - 1}


def gan_batch(step: int, random: torch.Generator) -> tuple[torch.Tensor, ...]:
    return torch.randn(BATCH, WIDTH, generator=random), torch.randn(BATCH, WIDTH, generator=random)


def critic_step(models: Models, noise: torch.Tensor, real: torch.Tensor) -> Any:
    fake = models["generator"](noise).detach()
    on_real, on_fake = models["critic"](real), models["critic"](fake)
    loss = functional.softplus(-on_real).mean() + functional.softplus(on_fake).mean()
    models["critic"].backward(loss)
    return loss, on_real


def generator_step(models: Models, noise: torch.Tensor, real: torch.Tensor) -> Any:
    loss = functional.softplus(-models["critic"](models["generator"](noise))).mean()
    models["generator"].backward(loss)
    return (loss,)


def student_and_teacher() -> dict[str, nn.Module]:
    return {"student": Chain(), "teacher": Chain().requires_grad_(False)}


def teacher_pins(pp: int) -> dict[str, int]:
    return {"student.two": 1, "student.three": pp - 1, "teacher.one": 1, "teacher.two": pp - 1}


def distil(models: Models, x: torch.Tensor) -> Any:
    with torch.no_grad():
        target = models["teacher"](x)
    output = models["student"](x)
    loss = (output - target).square().mean()
    models["student"].backward(loss)
    return loss, target


def language_models() -> dict[str, nn.Module]:
    return {"student": gpt2(), "teacher": gpt2().requires_grad_(False)}


def distil_tokens(models: Models, ids: torch.Tensor) -> Any:
    with torch.no_grad():
        target = models["teacher"](ids).logits.log_softmax(-1)
    output = models["student"](ids).logits.log_softmax(-1)
    loss = functional.kl_div(output, target, log_target=True, reduction="batchmean")
    models["student"].backward(loss)
    return (loss,)


def generate(models: Models, ids: torch.Tensor) -> Any:
    return models["model"].generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0, eos_token_id=None)


def ids(step: int, random: torch.Generator) -> tuple[torch.Tensor, ...]:
    return (torch.randint(3, 37, (BATCH, 7), generator=random),)


def adam_in_groups(model: nn.Module) -> Optimizer:
    """Weight decay on matrices, none on vectors."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0, "lr": 0.02},
    ]
    return AdamW(groups, lr=0.01)


def falling(optimizer: Optimizer) -> LRScheduler:
    return LambdaLR(optimizer, lambda step: 1 / (step + 1))


def freeze_in_between(module: nn.Module, step: int) -> None:
    module.get_submodule("two").requires_grad_(step not in (1, 2))
    module.get_submodule("three").requires_grad_(step != 3)


PROBLEMS = {
    "groups, schedule and clipping": Problem(
        build=one(Chain),
        batch=normal(WIDTH),
        phases=(Phase(body=square_loss),),
        pins=chain_pins,
        optimizer=adam_in_groups,
        scheduler=falling,
        clip=0.1,
    ),
    "clipping, GPT-2": Problem(
        build=one(gpt2), batch=ids, phases=(Phase(body=causal_step),), clip=0.5, optimizer=sgd(momentum=0.9)
    ),
    "freezing in between": Problem(
        build=one(Chain),
        batch=normal(WIDTH),
        phases=(Phase(body=square_loss),),
        pins=chain_pins,
        prepare=freeze_in_between,
    ),
    "evaluation in between": Problem(
        build=one(Chain),
        batch=normal(WIDTH),
        phases=(
            Phase(body=square_loss),
            Phase(body=evaluate, training=False, zero=(), update=()),
        ),
        pins=chain_pins,
    ),
    "inference mode in between": Problem(
        build=one(Chain),
        batch=normal(WIDTH),
        phases=(Phase(body=infer, training=False, zero=(), update=()), Phase(body=square_loss)),
        pins=chain_pins,
    ),
    "autocast": Problem(
        build=one(lambda: Chain().float()), batch=normal(WIDTH), phases=(Phase(body=mixed_step),), pins=chain_pins
    ),
    "evaluation of a ResNet": Problem(
        build=one(ResNet),
        batch=images,
        phases=(
            Phase(body=evaluate_images, training=False, zero=(), update=()),
            Phase(body=classify),
        ),
        pins=resnet_pins,
    ),
    "gradient accumulation": Problem(
        build=one(Chain),
        batch=normal(WIDTH),
        phases=(Phase(body=square_loss, update=()), Phase(body=square_loss, zero=())),
        pins=chain_pins,
        passes_per_step=2,
    ),
    "GAN": Problem(
        build=gan,
        batch=gan_batch,
        phases=(
            Phase(body=critic_step, zero=("critic",), update=("critic",)),
            Phase(body=generator_step, zero=("generator", "critic"), update=("generator",)),
        ),
        pins=gan_pins,
    ),
    "frozen teacher": Problem(
        build=student_and_teacher,
        batch=normal(WIDTH),
        phases=(Phase(body=distil, zero=("student",), update=("student",)),),
        pins=teacher_pins,
    ),
    "GPT-2, generation": Problem(
        build=one(gpt2),
        batch=ids,
        phases=(
            Phase(body=causal_step),
            Phase(body=generate, training=False, zero=(), update=()),
        ),
    ),
    "frozen teacher, GPT-2": Problem(
        build=language_models,
        batch=ids,
        phases=(Phase(body=distil_tokens, zero=("student",), update=("student",)),),
    ),
}
