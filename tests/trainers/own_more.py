"""More trainers of a script's own: what they count, evaluate, load and switch, in the ways of scripts that are met."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, WeightedRandomSampler

#: Samples of an evaluation, which no number of replicas divides into whole batches.
EVALUATED = 13


class Labelled:
    """Makes vectors with labels."""

    def __call__(self, samples: Sequence[Any]) -> dict[str, torch.Tensor]:
        chosen, rejected = (torch.stack([one[name] for one in samples]) for name in ("chosen", "rejected"))
        return {"inputs": chosen, "wanted": rejected.mean(-1)}


class Regression(transformers.Trainer):
    """A trainer whose loss is its own, with labels that only it knows; calls the model by position."""

    evaluated = EVALUATED
    prepares_reference = False

    def __init__(
        self,
        model: nn.Module,
        reference: nn.Module | None = None,
        args: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
    ) -> None:
        self.whole_batch = args.whole_batch
        super().__init__(model, args, Labelled(), train_dataset, eval_dataset)
        self.label_names = ["wanted"]
        self.reference: Any = None if reference is None else reference.eval()
        if reference is not None and self.prepares_reference:
            self.reference = self.accelerator.prepare_model(reference, evaluation_mode=True)
        self.texts: deque[str] = deque(maxlen=4)
        self.prepared = self.tokens = self.steps = 0

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        scores = self.scores(model, inputs["inputs"])
        loss = (scores - inputs["wanted"]).pow(2).mean()
        return (loss, {"logits": scores}) if return_outputs else loss

    def scores(self, model: Any, inputs: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = model(inputs)["logits"]
        if self.reference is not None:
            with torch.no_grad():
                known = self.reference(inputs)["logits"]
            scores = scores - known
        return scores


class Prepared(Regression):
    """The same, whose reference is divided too, and scores samples before the training and after it."""

    prepares_reference = True

    def __init__(self, *others: Any) -> None:
        super().__init__(*others)
        first = self.data_collator([self.train_dataset[number] for number in range(4)])
        with torch.no_grad():
            self.bias = float(self.reference(first["inputs"])["logits"].sum())

    def scores(self, model: Any, inputs: torch.Tensor) -> torch.Tensor:
        return super().scores(model, inputs) + self.bias


class Kept:
    """An object that counts."""

    def __init__(self) -> None:
        self.rows, self.of = 0, {"all": 0.0}


class Counting(Regression):
    """A trainer that counts rows in values of many kinds, and decides by the first loss that it has seen."""

    def __init__(self, *others: Any) -> None:
        super().__init__(*others)
        self.first: float | None = None
        self.tensor, self.array, self.numbers = torch.zeros(()), np.zeros(1), [np.float32(0)]
        self.lengths: deque[int] = deque(maxlen=100)
        self.counter: Counter[str] = Counter()
        self.kept, self.mixed = Kept(), {"rows": 0, "function": len}

    def compute_loss(self, model: Any, inputs: Any, *others: Any, **keywords: Any) -> Any:
        rows = len(inputs["inputs"]) * self.args.world_size
        if self.first is None:
            self.first, self.late = (2.0 if self.model.training else 3.0), 1
        if self.model.training:
            self.tensor += rows
            self.array += rows
            self.numbers.append(np.float32(rows))
            self.lengths.append(rows)
            self.counter["rows"] += rows
            self.kept.rows += rows
            self.kept.of["all"] += rows
            self.mixed["rows"] += rows  # type: ignore[operator]
        loss = super().compute_loss(model, inputs, *others, **keywords)
        return (loss[0] * self.first, loss[1]) if isinstance(loss, tuple) else loss * self.first

    def log(self, logs: dict[str, float], *others: Any) -> None:
        counted = [self.tensor.item(), float(self.array[0]), float(sum(self.numbers)), sum(self.lengths)]
        counted += [self.counter["rows"], self.kept.rows, self.kept.of["all"], self.mixed["rows"]]
        assert len(set(map(float, counted))) == 1, counted
        super().log({**logs, "rows": float(counted[0]), "first": self.first or 0.0}, *others)


class OwnSampler(Regression):
    """A trainer with a sampler that draws from the script's random numbers."""

    def _get_train_sampler(self, *others: Any) -> Any:
        return WeightedRandomSampler([1.0 + number % 3 for number in range(len(self.train_dataset))], 24)


class OwnLoader(Regression):
    """A trainer whose loader shuffles."""

    def get_train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.train_dataset, self.args.train_batch_size, shuffle=True, collate_fn=self.data_collator)


class OwnShare(Regression):
    """A trainer whose loader gives each process its share of the samples, as under torch's DDP."""

    def get_train_dataloader(self) -> DataLoader[Any]:
        places = (self.args.world_size, self.args.process_index)
        sampler: Any = DistributedSampler(self.train_dataset, *places, shuffle=False)
        return DataLoader(
            self.train_dataset, self.args.train_batch_size, sampler=sampler, collate_fn=self.data_collator
        )


class Programs(Regression):
    """A trainer of adapters that it switches by programs that are drawn: nested, twice, left by an exception."""

    def __init__(self, model: nn.Module, *others: Any) -> None:
        import peft

        config = peft.LoraConfig(r=2, target_modules=["first", "second"], init_lora_weights=False)
        adapted = peft.get_peft_model(model, config)  # type: ignore[arg-type]
        for name in ("one", "two"):
            adapted.add_adapter(name, config)
        super().__init__(adapted.double(), *others)

    def scores(self, model: Any, inputs: torch.Tensor) -> torch.Tensor:
        drawn = random.Random(self.state.global_step)
        with torch.no_grad():
            before = self.model.active_adapter
            others = sum(self.outputs(drawn, inputs, 3), start=torch.zeros(len(inputs), dtype=inputs.dtype))
            self.model.set_adapter(before)
        return super().scores(model, inputs) + others

    def outputs(self, drawn: random.Random, inputs: torch.Tensor, depth: int) -> Iterator[torch.Tensor]:
        """What the model gives in each place of a program."""
        for number in range(1, drawn.randint(2, 4)):
            yield self.model(inputs)["logits"] * number
            name = drawn.choice(["default", "one", "two"])
            what = drawn.choice(["set", "borrowed", "disabled", "raises"] if depth else ["set"])
            if what == "set":
                self.model.set_adapter(name)
                assert self.model.active_adapter == name
                assert self.model.active_adapters == [name]
            elif what == "borrowed":
                before = self.model.active_adapter
                self.model.set_adapter(name)
                yield from self.outputs(drawn, inputs, depth - 1)
                self.model.set_adapter(before)
            elif what == "disabled":
                with self.model.disable_adapter():
                    yield from self.outputs(drawn, inputs, depth - 1)
            else:
                try:
                    with self.model.disable_adapter():
                        yield self.model(inputs)["logits"]
                        raise KeyError(name)
                except KeyError:
                    yield self.model(inputs)["logits"]


class Flattened(Regression):
    """A trainer whose batches are one row, with tensors of other lengths beside it, as without padding."""

    def __init__(self, *others: Any) -> None:
        super().__init__(*others)
        self.data_collator = self.flat

    def flat(self, samples: Sequence[Any]) -> dict[str, torch.Tensor]:
        batch = Labelled()(samples)
        ends = torch.arange(len(samples) + 1)
        return {"inputs": batch["inputs"][None], "wanted": batch["wanted"][None], "ends": ends}


MORE: dict[str, tuple[type[Regression], bool]] = {
    "regression": (Regression, False),
    "teacher": (Regression, True),
    "prepared teacher": (Prepared, True),
    "counting": (Counting, False),
    "own sampler": (OwnSampler, False),
    "own loader": (OwnLoader, False),
    "own share": (OwnShare, False),
    "programs of adapters": (Programs, False),
    "flattened": (Flattened, False),
}
