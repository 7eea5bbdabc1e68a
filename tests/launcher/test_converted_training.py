"""Scripts with the lines that ``shardwright convert`` prints, started by its command, train as they did before."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml

from tests.jobs.patience import HANG_SECONDS

MODEL = """
import json
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

class Block(nn.Sequential):
    pass

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
model = nn.Sequential(*(Block(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)), nn.Linear(6, 1))
data = TensorDataset(torch.randn(32, 6), torch.randn(32, 1))
losses = []
"""
OPTIMIZER = "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)\n"
PREPARED = """
loader = DataLoader(data, batch_size={batch})
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

@step
def train_step(model, inputs, targets):
    loss = nn.functional.mse_loss(model(inputs), targets)
    accelerator.backward(loss)
    return loss

for _ in range(2):
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = train_step(model, inputs, targets)
{clip}
            optimizer.step()
            optimizer.zero_grad()
        mean = loss.detach() if step is plain else loss.reduce_mean()
        losses.append(accelerator.gather(mean).mean().item())
"""
ALONE = """
@smp.step
def train_step(model, inputs, targets):
    loss = nn.functional.mse_loss(model(inputs), targets)
    model.backward(loss)
    return loss

for _ in range(2):
    for inputs, targets in DataLoader(data, batch_size={batch} * smp.dp_size()):
        mine = slice(smp.dp_rank() * {batch}, (smp.dp_rank() + 1) * {batch})
        loss = train_step(model, inputs[mine], targets[mine])
{clip}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(torch.stack(smp.allgather(loss.reduce_mean(), smp.DP_GROUP)).mean().item())
"""
END = """
weights = {name: value.tolist() for name, value in model.state_dict().items()}
if is_first:
    print(json.dumps({"losses": losses, "weights": weights}))
"""
BATCH = 4


class Training(NamedTuple):
    """A file, and what a plain loop does that trains as it says."""

    file: dict[str, Any]
    steps: int = 1
    clip: float = 0.0
    is_alone: bool = False


TRAININGS = {
    "FSDP": Training(
        {
            "distributed_type": "FSDP",
            "num_processes": 2,
            "fsdp_config": {
                "fsdp_version": 1,
                "fsdp_sharding_strategy": "FULL_SHARD",
                "fsdp_activation_checkpointing": True,
                "fsdp_transformer_layer_cls_to_wrap": "Block",
            },
        },
    ),
    "DeepSpeed": Training(
        {
            "distributed_type": "DEEPSPEED",
            "num_processes": 2,
            "deepspeed_config": {"zero_stage": 3, "gradient_accumulation_steps": 2, "gradient_clipping": 0.05},
        },
        steps=2,
        clip=0.05,
    ),
    "a file of DeepSpeed": Training(
        {
            "train_batch_size": 16,
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 4,
            "gradient_clipping": 0.05,
            "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "betas": [0.9, 0.95], "weight_decay": 0.1}},
            "zero_optimization": {"stage": 1},
        },
        clip=0.05,
        is_alone=True,
    ),
}


def run(folder: Path, words: list[str]) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(
        [sys.executable, *words], cwd=folder, capture_output=True, text=True, timeout=HANG_SECONDS, env=environment
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stdout


def parts(lines: list[str]) -> dict[str, str]:
    """The printed lines, by the comment that says where they go."""
    found: dict[str, list[str]] = {"": []}
    where = ""
    for line in lines:
        if line.startswith("# "):
            where = line
        found.setdefault(where, []).append(line)
    return {where: "\n".join(each) + "\n" for where, each in found.items()}


@pytest.mark.parametrize("training", TRAININGS.values(), ids=TRAININGS)
def test_a_converted_script_trains_as_accelerate_does_alone(training: Training, tmp_path: Path) -> None:
    file = tmp_path / ("config.json" if training.is_alone else "config.yaml")
    file.write_text(json.dumps(training.file) if training.is_alone else yaml.safe_dump(training.file))
    told = json.loads(run(tmp_path, ["-m", "shardwright", "convert", "--json", str(file)]))
    given = parts(told["script"])
    clip = textwrap.indent(given.get("# Before each optimizer.step():", ""), " " * (8 if training.is_alone else 12))
    if training.is_alone:
        sizes = [re.search(r"`batch_size=(\d+)`", row["text"]) for row in told["keys"]]
        (batch,) = [int(size[1]) for size in sizes if size]
        text = given[""] + MODEL + "model = smp.DistributedModel(model)\n"
        text += given["# Once smp.DistributedModel has the model:"] + ALONE.format(batch=batch, clip=clip)
    else:
        batch = BATCH
        text = given[""] + MODEL + "step, plain = smp.step, None\n" + given.get("# Once the model is created:", "")
        text += OPTIMIZER + given.get("# Before accelerator.prepare():", "") + PREPARED.format(batch=batch, clip=clip)
    assert told["command"][-1] == "train.py"
    (tmp_path / "train.py").write_text(text + "is_first = smp.rank() == 0\n" + END)
    ours = json.loads(run(tmp_path, ["-m", *told["command"]]))

    head = (
        f"from accelerate import Accelerator\naccelerator = Accelerator(gradient_accumulation_steps={training.steps})\n"
    )
    head += "step = plain = lambda function: function\nis_first = True\n"
    clipped = f"            if {training.clip} and accelerator.sync_gradients:\n"
    clipped += f"                accelerator.clip_grad_norm_(model.parameters(), {training.clip})\n"
    (tmp_path / "plain.py").write_text(head + MODEL + OPTIMIZER + PREPARED.format(batch=2 * batch, clip=clipped) + END)
    plain = json.loads(run(tmp_path, ["plain.py"]))

    assert ours["losses"] == pytest.approx(plain["losses"], rel=1e-10)
    assert ours["weights"].keys() == plain["weights"].keys()
    for name, weight in plain["weights"].items():
        torch.testing.assert_close(torch.tensor(ours["weights"][name]), torch.tensor(weight), rtol=1e-9, atol=1e-10)
