"""What workers run: training loops that Ray Train starts as ranks."""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import time
from pathlib import Path
from typing import Any

import ray.train
import shardwright as smp
import shardwright.ray
import torch
from torch import nn

from tests.ray.plain import BATCH, EPOCHS, batches, loss_of, module, numbers, optimizer_of


def run(config: dict[str, Any]) -> None:
    """Run the loop of a case, and tell with what it fails."""
    try:
        globals()[config["loop"]](config)
    except Exception as error:
        told(config, error=type(error).__name__, text=str(error))
        raise


@smp.step
def train_step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss = loss_of(model(batch), batch)
    model.backward(loss)
    return loss


def made(config: dict[str, Any]) -> tuple[Any, Any]:
    """A model and an optimizer over the ranks of the worker group."""
    smp.init(config["smp"])
    model = smp.DistributedModel(module())
    return model, smp.DistributedOptimizer(optimizer_of(model))


def stepped(model: Any, optimizer: Any, batch: torch.Tensor) -> float:
    """A step on this replica's rows; the loss of all replicas."""
    optimizer.zero_grad()
    loss = train_step(model, batch).reduce_mean().item()
    optimizer.step()
    return sum(smp.allgather(loss, smp.DP_GROUP)) / smp.dp_size()


def told(config: dict[str, Any], **what: Any) -> None:
    """Tell the driver something in a line of this rank's file."""
    with Path(config["folder"], f"rank{smp.rank()}.jsonl").open("a") as file:
        print(json.dumps({"time": time.time(), **what}), file=file)


def weights_of(model: Any) -> dict[str, Any]:
    return {name: value.tolist() for name, value in model.state_dict().items()}


def on_tensors(config: dict[str, Any]) -> None:
    """Train on rows that each rank has; save and go on where that is asked for."""
    model, optimizer = made(config)
    saves, first, losses = config.get("saves", 0), 0, list[float]()
    if saves:
        content = shardwright.ray.resume()
        if content is not None:
            first, losses = content["step"], content["losses"]
    told(config, first=first, ranks=smp.size())
    beside = config.get("beside")
    while beside is not None and not Path(beside).exists():
        time.sleep(0.05)  # until another training has begun, which would wait in vain if they ran in turn
    every = batches()[: config.get("steps")]
    for number, whole in enumerate(every):
        if number < first:
            continue
        meet_fate(config, number, first)
        losses.append(stepped(model, optimizer, whole[smp.dp_rank() :: smp.dp_size()]))
        if saves and (number + 1) % saves == 0:
            content = {"step": number + 1, "losses": losses}
            with FateInSave(config, number + 1, first):
                shardwright.ray.report({"loss": losses[-1], "step": number + 1}, user_content=content)
    weights = weights_of(model)
    if not saves:
        ray.train.report({"loss": losses[-1]})
    told(config, losses=losses, weights=weights)


def on_data(config: dict[str, Any]) -> None:
    """Train on the rows of Ray's data set."""
    model, optimizer = made(config)
    shard = ray.train.get_dataset_shard("train")
    losses, seen = [], []
    for _ in range(EPOCHS):
        of_epoch: list[list[int] | None] = []
        for batch in shard.iter_torch_batches(batch_size=BATCH // smp.dp_size(), prefetch_batches=2, drop_last=False):
            values = None if batch is None else batch["row"]
            losses.append(stepped(model, optimizer, values))
            of_epoch.append(None if values is None else numbers(values))
        seen.append(of_epoch)
    told(config, losses=losses, weights=weights_of(model), seen=seen, dp=smp.dp_rank(), pp=smp.pp_rank())


def by_processes(config: dict[str, Any]) -> None:
    """Train on Ray's own shards, and tell what is warned of."""
    warnings = logging.Handler(logging.WARNING)
    warnings.emit = lambda record: told(config, warning=record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shardwright").addHandler(warnings)
    model, optimizer = made(config)
    for batch in ray.train.get_dataset_shard("train").iter_torch_batches(batch_size=BATCH):
        stepped(model, optimizer, batch["row"])


class Failing(nn.Module):
    """A layer that fails in the second step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.calls = 0

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls > 3:
            raise ValueError(f"a layer on rank {smp.rank()} fails")
        return self.layer(values)


def failing(config: dict[str, Any]) -> None:
    """Fail in a step, in the layer of another rank than the one that runs the step function."""
    smp.init(config["smp"])
    with smp.partition(1):
        failing_layer = Failing()
    layers = nn.Sequential(module(), nn.Linear(1, 16).double(), failing_layer.double(), nn.Linear(16, 1).double())
    model = smp.DistributedModel(layers)
    optimizer = smp.DistributedOptimizer(optimizer_of(model))
    for batch in batches():
        stepped(model, optimizer, batch)


def trial(config: dict[str, Any]) -> None:
    """A trial of Tune, which drives a training of its own."""
    from tests.ray.driving import trainer

    folder, name = Path(config["folder"]), config["name"]
    other = folder / ("two" if name == "one" else "one") / "rank0.jsonl"
    trainer(on_tensors, folder, 2, {"smp": config["smp"], "beside": str(other)}, name=name).fit()


class FateInSave:
    """Ends this worker while it saves, or lets its disk be full, where the case asks for it."""

    def __init__(self, config: dict[str, Any], step: int, first: int) -> None:
        self._fate = config.get("in_save")
        self._meets = self._fate is not None and first == 0 and step == self._fate["step"]
        self._meets = self._meets and smp.rank() == self._fate["rank"]

    def __enter__(self) -> None:
        if not self._meets:
            return
        from shardwright.checkpoints import saving

        write = saving.write_part

        def ended(*given: Any) -> Any:
            found = write(*given)
            os.kill(os.getpid(), signal.SIGKILL)
            return found

        def on_full_disk(*given: Any) -> Any:
            limits = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
            try:
                return write(*given)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)

        saving.write_part = ended if self._fate["what"] == "killed" else on_full_disk
        self._put_back = lambda: setattr(saving, "write_part", write)

    def __exit__(self, *_: object) -> None:
        if self._meets:
            self._put_back()


def meet_fate(config: dict[str, Any], number: int, first: int) -> None:
    """End this worker, or fail, before a step, where the case asks for it; only in a run that has not been resumed."""
    fate = config.get("fate")
    if fate is None or first or number != fate["step"]:
        return
    if fate["what"] == "killed" and smp.rank() == fate["rank"]:
        os.kill(os.getpid(), signal.SIGKILL)
    if fate["what"] == "raises" and smp.rank() == fate["rank"]:
        raise ValueError("this rank does not like step 2")


def language_model() -> tuple[Any, Any]:
    """A tiny GPT-2, and rows for it."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=64,
        n_positions=16,
        n_embd=32,
        n_layer=4,
        n_head=2,
        bos_token_id=1,
        eos_token_id=1,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    ids = torch.randint(64, (64, 16), generator=torch.Generator().manual_seed(0))
    return GPT2LMHeadModel(config), [{"input_ids": row, "labels": row} for row in ids]


def arguments(folder: Path) -> Any:
    from transformers import TrainingArguments

    return TrainingArguments(
        str(folder / "out"),
        per_device_train_batch_size=8,
        max_steps=4,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )


def trained_by_transformers(folder: Path) -> list[float]:
    """What transformers' own trainer logs in this process."""
    import transformers

    model, given = language_model()
    training = transformers.Trainer(model, arguments(folder), train_dataset=given)
    training.train()
    return [line["loss"] for line in training.state.log_history if "loss" in line]


def by_our_trainer(config: dict[str, Any]) -> None:
    """Train by our trainer."""
    from shardwright.huggingface import Trainer

    smp.init(config["smp"])
    model, given = language_model()
    training = Trainer(model, arguments(Path(config["folder"])), train_dataset=given)
    training.train()
    told(config, losses=[line["loss"] for line in training.state.log_history if "loss" in line])
