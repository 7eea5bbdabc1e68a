"""A trainer in the shape of those of TRL, written for ``transformers`` alone, and what it is trained on.

Its arguments stand in another order, it has a class of arguments of its own, makes its batches, counts in its loss what
it logs, and evaluates without the class below it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

from tests.trainers.own_more import MORE

WIDTH, SAMPLES, BATCH, STEPS = 8, 32, 8, 4

Sample = dict[str, torch.Tensor]


class Scorer(nn.Module):
    """Scores a vector; its parts can lie on different ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.last(torch.tanh(self.second(torch.tanh(self.first(inputs))))).squeeze(-1)}


@dataclass
class OwnArguments(transformers.TrainingArguments):
    """Arguments, of which one is computed with the number of processes."""

    beta: float = field(default=0.5)
    whole_batch: int | None = field(default=None)

    def __post_init__(self) -> None:
        """Compute the rest."""
        super().__post_init__()
        self.whole_batch = self.whole_batch or self.per_device_train_batch_size * self.world_size


class Pairs:
    """Puts chosen rows first, and the rejected ones after them."""

    def __call__(self, samples: Sequence[Sample]) -> dict[str, Any]:
        return {"inputs": torch.cat([torch.stack([one[name] for one in samples]) for name in ("chosen", "rejected")])}


class OwnTrainer(transformers.Trainer):
    """A trainer of preferences, with a reference model whose place is before that of the arguments."""

    row_blocks = 2

    def __init__(
        self,
        model: nn.Module,
        reference: nn.Module | None = None,
        args: OwnArguments | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
    ) -> None:
        assert args is not None
        self.whole_batch = args.whole_batch
        super().__init__(model, args, Pairs(), train_dataset, eval_dataset)
        self.reference: Any = None
        if reference is not None:
            self.reference = self.accelerator.prepare_model(reference, evaluation_mode=True)
        self.counted = {"train": defaultdict(list), "eval": defaultdict(list)}
        self.texts: deque[str] = deque(maxlen=4)
        self.prepared = self.tokens = 0
        self.steps = 0

    def get_train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.train_dataset, BATCH // self.args.world_size, collate_fn=self.data_collator)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=self.args.learning_rate)
        return self.optimizer

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        with nullcontext():
            self.steps += 1
            return super().training_step(*args, **kwargs)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if return_outputs:
            raise ValueError("outputs are not returned")
        mode = "train" if self.model.training else "eval"
        chosen, rejected = model(inputs["inputs"])["logits"].chunk(2)
        difference = chosen - rejected
        if self.reference is not None:
            with torch.no_grad():
                first, second = self.reference(inputs["inputs"])["logits"].chunk(2)
            difference = difference - (first - second)
        self.tokens += self.accelerator.gather_for_metrics(inputs["inputs"].ne(0).sum()).sum().item()
        self.counted[mode]["accuracy"].append(self.accelerator.gather(difference.gt(0).double()).mean().item())
        self.counted[mode]["tokens"] = [float(self.tokens)]
        self.texts.append(f"{difference.shape[0]} rows")
        return -functional.logsigmoid(self.args.beta * difference).mean()

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> Any:
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            loss = self.compute_loss(model, inputs)
        return loss, None, None

    def log(self, logs: dict[str, float], *others: Any) -> None:
        mode = "train" if self.model.training else "eval"
        logs.update({name: sum(values) / len(values) for name, values in self.counted[mode].items()})
        super().log(logs, *others)
        self.counted[mode].clear()


class Sampling(OwnTrainer):
    """A trainer that makes its batches with the model, at random, as GRPO does."""

    def _prepare_inputs(self, inputs: Any) -> Any:
        inputs = super()._prepare_inputs(inputs)
        with torch.no_grad():
            scores = self.model(inputs["inputs"])["logits"]
        self.prepared += 1
        kept = torch.rand(scores.shape, dtype=torch.float64) < scores.sigmoid()
        return {"inputs": inputs["inputs"] * (1 + kept.unsqueeze(1))}


class Adapted(OwnTrainer):
    """A trainer of adapters, without a reference model: that is the model without them."""

    name: str | None = None

    def __init__(self, model: nn.Module, *others: Any) -> None:
        import peft

        adapters = peft.LoraConfig(r=2, target_modules=["first", "second"], init_lora_weights=False)
        adapted = peft.get_peft_model(model, adapters)  # type: ignore[arg-type]
        if self.name is not None:
            adapted.add_adapter(self.name, adapters)
        super().__init__(adapted.double(), *others)
        self.reference = self.without

    @contextmanager
    def switched(self) -> Iterator[None]:
        with self.model.disable_adapter():
            yield

    def without(self, inputs: torch.Tensor) -> Any:
        with self.switched():
            return self.model(inputs)


class AdaptedBeforehand(Adapted):
    """The same, whose reference has adapters of its own."""

    name = "ref"

    @contextmanager
    def switched(self) -> Iterator[None]:
        before = self.model.active_adapter
        self.model.set_adapter("ref")
        try:
            yield
        finally:
            self.model.set_adapter(before)


class OfAllRows(OwnTrainer):
    """A trainer whose loss of a row depends on all others."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        logits = model(inputs["inputs"])["logits"]
        self.counted["train" if self.model.training else "eval"]["rows"].append(float(len(logits)))
        return -logits.log_softmax(0)[: len(logits) // 2].mean()


TRAINERS: dict[str, tuple[type[Any], bool]] = {
    **MORE,
    "pairs": (OwnTrainer, False),
    "reference": (OwnTrainer, True),
    "sampling": (Sampling, False),
    "adapters": (Adapted, False),
    "two adapters": (AdaptedBeforehand, False),
    "all rows": (OfAllRows, False),
}


def trained(over: Callable[[Any], Any], name: str, folder: str, replicas: int) -> tuple[Any, list[dict[str, float]]]:
    """The trainer of a training, and what it has logged; ``over`` makes the classes that are used."""
    kind, has_reference = TRAINERS[name]
    generator = torch.Generator().manual_seed(2)

    def samples(count: int) -> list[Sample]:
        drawn = torch.randn(count, 2, WIDTH, generator=generator, dtype=torch.float64)
        return [{"chosen": one[0], "rejected": one[1]} for one in drawn]

    torch.manual_seed(1)
    model, reference = Scorer().double(), Scorer().double() if has_reference else None
    arguments = over(OwnArguments)(
        folder,
        per_device_train_batch_size=BATCH // replicas,
        per_device_eval_batch_size=BATCH // replicas,
        max_steps=STEPS,
        logging_steps=1,
        learning_rate=0.5,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        save_strategy="no",
        remove_unused_columns=False,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        use_cpu=True,
    )
    trainer = over(kind)(model, reference, arguments, samples(SAMPLES), samples(getattr(kind, "evaluated", 16)))
    trainer.train()
    trainer.evaluate()
    times = ("runtime", "per_second", "total_flos")
    log = [{key: value for key, value in one.items() if not key.endswith(times)} for one in trainer.state.log_history]
    return trainer, log
