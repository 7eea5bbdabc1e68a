"""Models of ``transformers`` that divided models save and load as folders: a function for each case."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import shardwright as smp
import torch
from shardwright.checkpoints.full import whole_in_one_process
from shardwright.job.runtime import current_runtime
from torch import nn

from tests.checkpoint.exchanged import is_divided
from tests.checkpoint.layouts.rank import WORDS, build


def inputs(model: str) -> dict[str, torch.Tensor]:
    """Words that every process knows."""
    ids = torch.arange(1, 21).reshape(4, 5) % WORDS
    return {"input_ids": ids} if model == "GPT-2" else {"input_ids": ids, "labels": ids.clone()}


@smp.step
def logits_step(model: Any, given: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(**given).logits  # type: ignore[no-any-return]


@smp.step
def train_step(model: Any, ids: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
    model.backward(loss)
    return loss


def tolerance() -> float:
    """How much logits may differ: models compute softmax and norms in float32, and divided layers in another order."""
    return 1e-12 if smp.tp_size() == 1 else 1e-6


def made(model: str, seed: int = 0) -> smp.DistributedModel:
    """The model, of which every weight depends on the seed."""
    with smp.tensor_parallelism():
        module = build(model)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(seed)
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape, dtype=torch.float64, generator=generator), alpha=0.1)
    distributed = smp.DistributedModel(module)
    if smp.tp_size() > 1:
        assert any(each.substitute for each in distributed.tensor_parallelism_report())
    return distributed


def logits_of(model: smp.DistributedModel, name: str) -> torch.Tensor | None:
    """The logits, on the rank that has them."""
    model.eval()
    found = logits_step(model, inputs(name))
    assert smp.pp_size() == 1 or is_divided(model)
    return torch.cat([one.detach() for one in found.outputs]) if smp.pp_rank() == 0 else None


def save_folder(folder: str, model: str, shard: int | str = "5GB") -> None:
    """Train and save; the job's logits are written beside."""
    own = made(model)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(own.parameters(), lr=0.1))
    train_step(own, inputs(model)["input_ids"])
    optimizer.step()
    if smp.rank() == 0:
        os.makedirs(folder)
        for name in ("tokenizer.json", "model-00001-of-00009.safetensors"):
            Path(folder, name).write_text("{}")
    smp.barrier()
    own.save_pretrained(folder, max_shard_size=shard)
    assert os.listdir(os.path.dirname(folder)) == [os.path.basename(folder)]
    smp.barrier()
    logits = logits_of(own, model)
    if smp.rank() == 0:
        assert Path(folder, "tokenizer.json").read_text() == "{}"
        assert not Path(folder, "model-00001-of-00009.safetensors").exists()
        said = json.loads(Path(folder, "config.json").read_text())
        assert (said["dtype"], said["architectures"]) == ("float64", [type(own.module).__name__])
        assert Path(folder, "generation_config.json").exists()
        assert Path(folder, "model.safetensors.index.json").exists() == (shard != "5GB")
        smp.save(logits, f"{folder}/logits", partial=False)
    state = whole_in_one_process(current_runtime(), "the comparison", own)
    if smp.rank() == 0:
        smp.save(dict(state), f"{folder}/state", partial=False)
    smp.barrier()


def load_folder(folder: str, model: str, late: bool) -> None:
    """Load what ``transformers`` has saved: logits are those of its model, also after a step."""
    own = made(model, seed=4)
    if late:
        logits_of(own, model)
    read = _names_read()
    own.load_pretrained(folder)
    logits = logits_of(own, model)
    if smp.rank() == 0:
        expected = smp.load(f"{folder}/logits", partial=False)
        torch.testing.assert_close(logits, expected["logits"], rtol=tolerance(), atol=tolerance())
    assert read
    if smp.pp_size() > 1:
        others = smp.allgather(read, smp.PP_GROUP)[1 - smp.pp_rank()]
        assert read - others, "this rank has read nothing that the other has not"
        assert others - read, "this rank has read all"
    smp.barrier()


def _names_read() -> set[str]:
    """The names of tensors that this rank reads from now on."""
    from shardwright.checkpoints.pretrained import loading

    read: set[str] = set()

    class Noting(loading.Folder):
        def tensor(self, name: str) -> torch.Tensor:
            read.add(name)
            return super().tensor(name)

    loading.Folder = Noting  # type: ignore[misc]
    return read


def refused_folders(folder: str) -> None:
    """Another model, a folder without a model, and arguments that cannot be; each is told on all ranks."""
    own = made("GPT-2")
    with pytest.raises(
        smp.CheckpointError, match=r"nothing was loaded(.|\n)*missing in the files: transformer\.h\.0\."
    ):
        own.load_pretrained(folder)
    with pytest.raises(smp.CheckpointError, match=r"has neither model\.safetensors nor"):
        own.load_pretrained(os.path.dirname(folder))
    with pytest.raises(smp.CheckpointError, match="max_shard_size is 'a lot'; allowed: "):
        own.save_pretrained(f"{folder}-new", max_shard_size="a lot")
    with pytest.raises(smp.CheckpointError, match="ranks gave different values of folder"):
        own.save_pretrained(f"{folder}-{smp.rank()}")
    smp.barrier()
    assert os.listdir(os.path.dirname(folder)) == [os.path.basename(folder)]
    before: dict[str, Any] = {name: one.clone() for name, one in own.local_named_parameters()}
    own.load_pretrained(folder, strict=False)
    assert all(torch.equal(one, before[name]) for name, one in own.local_named_parameters())
    logits_of(own, "GPT-2")


def untied_folder(folder: str, late: bool) -> None:
    """A folder in which the tied weights differ, before the model is divided and after."""
    own = made("GPT-2")
    if late:
        logits_of(own, "GPT-2")
    untied = r"one tensor in the model, two in the files: transformer\.wte\.weight and lm_head\.weight"
    with pytest.raises(smp.CheckpointError, match=rf"nothing was loaded(.|\n)*{untied}"):
        own.load_pretrained(folder)
    own.load_pretrained(folder, strict=False)


def undivided(module: nn.Module, given: dict[str, torch.Tensor]) -> torch.Tensor:
    """The logits of a model in one process."""
    with torch.no_grad():
        found: torch.Tensor = module.eval()(**given).logits
    return found
