"""What the scripts compute, in plain PyTorch: ``python -m tests.compat.published.plain SCRIPT ARGUMENTS``, one process.

Models, batches and parameter groups are the scripts' own; everything else is written anew here. It prints a JSON
object. With ``--saved`` after the script's name it evaluates the model that a job has saved whole.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, BertConfig, BertForPreTraining, set_seed

from tests.compat.plain import Lamb

Report = dict[str, Any]


def _dtype(args: Any) -> torch.dtype:
    return torch.float16 if args.fp16 else torch.bfloat16 if args.bf16 else torch.float32


def _made(args: Any, make: Callable[[], Any], model_dtype: torch.dtype) -> Any:
    """A model whose weights are drawn in a dtype, in float32."""
    set_seed(args.seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(model_dtype)
    try:
        model = make()
    finally:
        torch.set_default_dtype(before)
    return model.to(_dtype(args)).float()


class LanguageModel:
    """GPT-2 or GPT-Neo."""

    def __init__(self, script: Any, args: Any) -> None:
        self.script, self.args = script, args

    def make(self) -> Any:
        """The model, from its seed."""
        config = self.script.model_config_of(self.args)
        return _made(self.args, lambda: AutoModelForCausalLM.from_config(config), _dtype(self.args))

    def saved_from(self, state: dict[str, Any]) -> Any:
        """The model with weights that were saved."""
        model = self.make()
        missing, unexpected = model.load_state_dict(state, strict=False)
        assert set(missing) <= {"lm_head.weight"}, missing
        assert not unexpected, unexpected
        return model

    def train(self, model: Any) -> list[float]:
        """Train, and return the losses."""
        args, script = self.args, self.script
        optimizer = torch.optim.AdamW(
            script.get_param_groups_by_weight_decay(model),
            betas=(args.beta1, args.beta2),
            lr=args.lr,
            weight_decay=args.weight_decay,
        )
        schedule = script.AnnealingLR(optimizer, args)
        clips = args.grad_clip if args.fp16 else None
        if args.sharded_data_parallel_degree > 1:
            clips = args.sdp_gradient_clipping
        losses = []
        rows = script.Sequences(args, args.seed, args.max_steps * args.train_batch_size).ids
        for ids in rows.split(args.train_batch_size):
            optimizer.zero_grad()
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            if clips is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clips)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        return losses

    def evaluate(self, model: Any) -> float:
        """The mean loss of the validation batches."""
        args = self.args
        rows = self.script.Sequences(args, args.seed + 1, args.validation_batches * args.train_batch_size).ids
        losses = [model(input_ids=ids, labels=ids).loss.item() for ids in rows.split(args.train_batch_size)]
        return sum(losses) / len(losses)


class Bert:
    """BERT."""

    def __init__(self, script: Any, args: Any) -> None:
        self.script, self.args = script, args

    def make(self) -> Any:
        """The model, from its seed."""
        config: BertConfig = self.script.model_config_of(self.args)
        return _made(self.args, lambda: BertForPreTraining(config), torch.float32)

    def saved_from(self, state: dict[str, Any]) -> Any:
        """The model with weights that were saved."""
        model = self.make()
        missing, unexpected = model.load_state_dict(state, strict=False)
        assert all(one.startswith("cls.predictions.decoder") for one in missing), missing
        assert not unexpected, unexpected
        return model

    def loss_of(self, model: Any, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """The loss of a batch."""
        words, types, mask, labels, following = batch
        outputs = model(input_ids=words, token_type_ids=types, attention_mask=mask)
        loss: torch.Tensor = self.script.loss_of(
            outputs.prediction_logits, outputs.seq_relationship_logits, labels, following
        )
        return loss

    def train(self, model: Any) -> list[float]:
        """Train, and return the losses."""
        args = self.args
        named = list(model.named_parameters())
        undecayed = [one for name, one in named if "bias" in name or "LayerNorm" in name]
        known = {id(one) for one in undecayed}
        groups = [
            {"params": [one for _, one in named if id(one) not in known], "weight_decay": 0.01},
            {"params": undecayed, "weight_decay": 0.0},
        ]
        optimizer = Lamb(groups, args.learning_rate) if args.use_lamb else torch.optim.AdamW(groups, args.learning_rate)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.1, 1 - 0.1 * step))
        data = self.script.make_data(args, args.max_steps, args.seed).tensors
        losses = []
        for batch in zip(*(one.split(args.train_batch_size) for one in data), strict=True):
            optimizer.zero_grad()
            loss = self.loss_of(model, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            if args.sharded_data_parallel_degree > 1:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        return losses

    def evaluate(self, model: Any) -> float:
        """The loss of the validation batch."""
        return self.loss_of(model, self.script.make_data(self.args, 1, self.args.seed + 1).tensors).item()


def _folder(args: Any) -> Path:
    return Path(getattr(args, "checkpoint_dir", None) or args.output_dir)


def main() -> int:
    """Train and evaluate, or evaluate what was saved."""
    name, *arguments = sys.argv[1:]
    saved = arguments[:1] == ["--saved"]
    script = importlib.import_module(f"tests.compat.published.{name}")
    args = script.parse_args(arguments[1:] if saved else arguments)
    plain = {"language_model": LanguageModel, "bert": Bert}[name](script, args)
    if saved:
        state = script.smp.load(str(_folder(args) / "fullmodel.pt"), partial=False)
        model = plain.saved_from({name: one.float() for name, one in state.items()})
        report: Report = {"evaluated": plain.evaluate(model.eval())}
    else:
        model = plain.make()
        model.train()
        losses = plain.train(model)
        report = {
            "losses": losses,
            "evaluated": plain.evaluate(model.eval()),
            "parameters": sum(one.numel() for one in model.parameters()),
        }
    print(json.dumps(report), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
