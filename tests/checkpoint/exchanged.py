"""Models that jobs and ``transformers`` exchange by the command line: a function for each case."""

from __future__ import annotations

import json

import pytest
import shardwright as smp
import torch
from shardwright._core import CheckpointReader
from torch import nn

WORDS, WIDTH = 97, 64


def gpt2(seed: int, layers: int = 2) -> nn.Module:
    """A small model with tied weights, and some above 4 KiB."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    sizes = {"vocab_size": WORDS, "n_positions": 16, "n_embd": WIDTH, "n_layer": layers, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, **drops, use_cache=False))


def batch() -> torch.Tensor:
    """Words that every process knows."""
    return torch.arange(28).reshape(4, 7) % WORDS


@smp.step
def train_step(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    loss = model(input_ids=ids, labels=ids).loss
    model.backward(loss)
    return loss


@smp.step
def logits_step(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids).logits


def is_divided(model: smp.DistributedModel) -> bool:
    """Whether ranks hold different parameters."""
    return 0 < len(dict(model.local_named_parameters())) < len(dict(model.named_parameters()))


def save_trained(folder: str) -> None:
    """Train and save; the logits of one process with the same weights are written beside."""
    model = smp.DistributedModel(gpt2(0))
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    for _ in range(2):
        optimizer.zero_grad()
        train_step(model, batch())
        optimizer.step()
    assert smp.pp_size() == 1 or is_divided(model)
    smp.save_checkpoint(folder, "t", user_content={"epoch": 3})
    said = json.loads(CheckpointReader(folder).manifest)["user_content"]["huggingface_config"]
    assert (said["n_embd"], said["architectures"]) == (WIDTH, ["GPT2LMHeadModel"])
    assert smp.resume_from_checkpoint(folder) == {"epoch": 3}
    state = model.state_dict()
    if smp.rank() == 0:
        alone = gpt2(1).eval()
        alone.load_state_dict(state)
        with torch.no_grad():
            smp.save(alone(batch()).logits, f"{folder}/logits", partial=False)


def take_imported(folder: str, late: bool) -> None:
    """Load what was imported: logits are those of the model that was."""
    model = smp.DistributedModel(gpt2(2).double())
    model.eval()
    if late:
        logits_step(model, batch())
    assert smp.resume_from_checkpoint(folder) is None
    found = logits_step(model, batch())
    assert smp.pp_size() == 1 or is_divided(model)
    if smp.rank() == 0:
        logits = torch.cat([one.detach() for one in found.outputs])
        expected = smp.load(f"{folder}/logits", partial=False)["logits"]
        torch.testing.assert_close(logits, expected, rtol=1e-12, atol=1e-12)
    smp.barrier()


def imported_has_no_optimizer(folder: str) -> None:
    """Its state is asked for or left out, and never missing in silence; another model is refused."""
    model = smp.DistributedModel(gpt2(2).double())
    smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    with pytest.raises(smp.CheckpointError, match=r"state of an optimizer.*load_optimizer=False"):
        smp.resume_from_checkpoint(folder, model=model)
    assert smp.resume_from_checkpoint(folder, model=model, load_optimizer=False) is None
    train_step(model, batch())
    other = smp.DistributedModel(gpt2(2, layers=3).double())
    with pytest.raises(smp.CheckpointError, match=r"transformer\.h\.2\.ln_1\.weight"):
        smp.resume_from_checkpoint(folder, model=other)
