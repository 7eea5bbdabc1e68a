"""The scripts that TRL ships, unmodified, over ranks by ``shardwright run --trainers``, beside the same script alone.

Model, tokenizer and data are folders and files made here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import LlamaForSequenceClassification

from tests.stacks.comparing import TIMES, compared
from tests.stacks.kinds import BATCH, STEPS, llama, sentences, tokenizer

#: What TRL computes of each call of the model and averages over calls: of microbatches it is another average, as with
#: its own accumulation.
OF_CALLS = {"entropy", "kl", "logits/chosen", "logits/rejected", "max_reward", "mean_token_accuracy", "min_reward"}
#: What the options of ``shardwright run`` are called, with the replicas that come of them.
LAYOUTS: dict[str, tuple[list[str], int]] = {
    "pp2": (["--ranks", "2", "--pp", "2"], 1),
    "dp2": (["--ranks", "2"], 2),
}
#: A reward by words, which the script of GRPO imports from the folder in which it is started.
_REWARD = '''"""Rewards."""


def words(completions, **_):
    """What a completion is worth: by its words, without a model."""
    return [float(len(set(one.split()))) - 0.1 * len(one) for one in completions]
'''


@dataclass(frozen=True)
class Script:
    """A script of TRL.

    Attributes:
        name: Its module in ``trl.scripts``.
        columns: The columns of its data; completions begin with a space.
        more: Further arguments.
        model: The folder of the model to train.
        layouts: In which layouts it computes what one process does.
        lora: Whether it trains adapters, as ``more`` tells it.
    """

    name: str
    columns: tuple[str, ...]
    more: tuple[str, ...] = ()
    model: str = "model"
    layouts: tuple[str, ...] = tuple(LAYOUTS)
    lora: bool = False

    @property
    def title(self) -> str:
        """What the table calls it."""
        return f"script-{self.name}{'-lora' if self.lora else ''}"


#: Masks of dropout are drawn for microbatches.
_LORA = ("--use_peft", "--lora_r", "2", "--lora_dropout", "0", "--lora_target_modules", "q_proj", "v_proj")
_GENERATION = ("--num_generations", "4", "--max_completion_length", "6", "--beta", "0.1", "--reward_funcs", "own.words")
SCRIPTS = (
    Script("sft", ("text",), ("--max_length", "32")),
    Script("sft", ("text",), ("--max_length", "32", *_LORA), lora=True),
    Script("dpo", ("prompt", "chosen", "rejected"), ("--max_length", "32")),
    Script("dpo", ("prompt", "chosen", "rejected"), ("--max_length", "32", *_LORA), lora=True),
    Script("reward", ("prompt", "chosen", "rejected"), ("--max_length", "32"), model="classifier"),
    # Each replica draws completions of its own.
    Script("grpo", ("prompt",), _GENERATION, layouts=("pp2",)),
)


def _data(columns: Sequence[str]) -> str:
    """The folder of data; a name such as ``text`` alone is that of a format."""
    return "-".join(("data", *columns))


def prepare(folder: Path) -> None:
    """Make what scripts read: two models with their tokenizer, data of each kind, a reward."""
    folder.mkdir()
    for name, model in (("model", llama()), ("classifier", llama(LlamaForSequenceClassification, num_labels=1))):
        model.save_pretrained(folder / name)
        tokenizer().save_pretrained(folder / name)
    for columns in {script.columns for script in SCRIPTS}:
        most = 4 if columns == ("prompt",) else 8
        texts = [
            [f" {one}" if name in ("chosen", "rejected") else one for one in sentences(40, number, most=most)]
            for number, name in enumerate(columns)
        ]
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*texts, strict=True)]
        (folder / _data(columns)).mkdir()
        (folder / _data(columns) / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "own.py").write_text(_REWARD)


def place(script: Script, layout: str, microbatches: int, folder: Path) -> Path:
    """Where a script saves."""
    return folder / f"{script.title}-{layout}-{microbatches}"


def run(script: Script, layout: str, microbatches: int, folder: Path, seconds: float) -> None:
    """Run a script in the folder that :func:`prepare` has filled.

    Args:
        script: It.
        layout: ``plain``, or one of :data:`LAYOUTS`.
        microbatches: Into how many a batch is divided.
        folder: Where models and data are.
        seconds: When it is ended.

    Raises:
        subprocess.TimeoutExpired: It has not ended by then.
    """
    out = place(script, layout, microbatches, folder)
    options, replicas = LAYOUTS.get(layout, ([], 1))
    given = {
        "model_name_or_path": script.model,
        "dataset_name": _data(script.columns),
        "output_dir": str(out),
        "per_device_train_batch_size": str(BATCH // replicas),
        "max_steps": str(STEPS),
        "save_steps": str(STEPS),
        "logging_steps": "1",
        "learning_rate": "0.05",
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "report_to": "none",
        "dtype": "float32",
        "bf16": "False",
        "use_cpu": "True",
        "seed": "7",
    }
    arguments = [word for name, value in given.items() for word in (f"--{name}", value)]
    ours = ["-m", "shardwright.command", "run", *options, "--microbatches", str(microbatches), "--trainers"]
    command = [*([] if layout == "plain" else ours), "-m", f"trl.scripts.{script.name}", *arguments, *script.more]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "CI": "true", "HF_DATASETS_CACHE": str(folder / "cache")}
    with Path(f"{out}.output").open("w") as output:
        process = subprocess.Popen(
            [sys.executable, *command], cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.terminate()  # the launcher ends its ranks
            process.wait()
            raise


def outcome(script: Script, layout: str, microbatches: int, folder: Path, seconds: float) -> tuple[str, str]:
    """Run a script over ranks, and alone if it has not been yet; whether both are equal, and how far they are apart."""
    if not folder.exists():
        prepare(folder)
    alone, ours = place(script, "plain", 1, folder), place(script, layout, microbatches, folder)
    try:
        if not alone.exists():
            run(script, "plain", 1, folder, seconds)
        run(script, layout, microbatches, folder, seconds)
    except subprocess.TimeoutExpired:
        return "hung", ""
    if not _has_ended(ours):
        return "wrong", Path(f"{ours}.output").read_text()[-2000:]
    (first, weights), (second, others) = _seen(alone), _seen(ours)
    left_out = OF_CALLS if microbatches > 1 else set()
    keys = {
        key
        for key, value in first[-1].items()
        if isinstance(value, int | float) and not key.endswith(TIMES) and key not in left_out
    }
    return compared((first, second), sorted(keys), (weights, others))


def _has_ended(out: Path) -> bool:
    return (out / f"checkpoint-{STEPS}" / "trainer_state.json").exists() and any(out.glob("*model.safetensors"))


def _seen(out: Path) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    """What a script has logged of each step, and the weights that it has saved at its end."""
    state = json.loads((out / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())
    (file,) = out.glob("*model.safetensors")
    return [entry for entry in state["log_history"] if "loss" in entry], load_file(file)


def cases() -> Iterator[tuple[Script, str, int]]:
    """Each script in each of its layouts, with one microbatch and several."""
    for script in SCRIPTS:
        for layout in script.layouts:
            for microbatches in (1, 4):
                yield script, layout, microbatches
