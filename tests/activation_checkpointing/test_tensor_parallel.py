"""Checkpoints of modules that are divided over tensor-parallel ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobs.ranks import outputs_of_ranks, run_ranks

REPLACED = """
import logging, torch, shardwright as smp
from shardwright.frames.checkpointing import mark_of
from torch import nn
from transformers import GPT2Config, GPT2Model
smp.init(tensor_parallel_degree=2, ddp=True)
model = GPT2Model(GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=20, n_positions=16))
smp.set_tensor_parallelism(model.h)
smp.set_activation_checkpointing(model.h[0])
smp.set_activation_checkpointing(model.h[1].attn)
wrapped = smp.DistributedModel(model).module
print([mark_of(layer) for layer in wrapped.h], type(wrapped.h[0]).__name__)
"""

ATTENTION = """
import torch, shardwright as smp
from torch import nn
from torch.utils import checkpoint as torch_checkpoint

runs = []
original = torch_checkpoint.checkpoint
torch_checkpoint.checkpoint = lambda function, *args, **kwargs: runs.append(1) or original(function, *args, **kwargs)

def run(**keys):
    degrees = {"pipeline_parallel_degree": 2, "tensor_parallel_degree": 2}
    smp.init(**degrees, ddp=True, microbatches=2, auto_partition=False, default_partition=0, **keys)
    torch.manual_seed(0)
    options = dict(num_layers=3, num_attention_heads=2, attention_head_size=4, hidden_size=8, intermediate_size=16)
    module = smp.nn.DistributedTransformer(**options, attention_dropout_prob=0.25, hidden_dropout_prob=0.25)
    smp.set_partition(module.seq_layers[1], 1)
    model = smp.DistributedModel(module)

    @smp.step
    def train(x):
        loss = model((x, None))
        loss = (loss[0] if isinstance(loss, tuple) else loss).square().mean()
        model.backward(loss)
        return loss.detach()

    torch.manual_seed(5 + smp.rdp_rank())
    losses = train(torch.randn(4, 6, 8)).concat()
    found = losses, [p.grad.clone() for p in model.local_parameters()]
    smp.shutdown()
    return found

kept = run(checkpoint_attentions=False)
none = len(runs)
again = run(checkpoint_attentions=True)
assert not none and runs, (none, runs)
assert torch.equal(kept[0], again[0])
assert all(map(torch.equal, kept[1], again[1]))
print("same")
"""


def test_a_mark_goes_on_to_the_substitute_and_one_that_is_lost_is_told_of(tmp_path: Path) -> None:
    script = tmp_path / "replaced.py"
    script.write_text(REPLACED)
    pytest.importorskip("transformers")
    for ended in run_ranks(script, ranks=2, folder=tmp_path):
        assert ended.code == 0, ended.err
        assert "[Checkpointing(isolated=True, preserves_rng_state=True, group=0), None] TransformersLayer" in ended.out
        assert "smp.set_activation_checkpointing of 'h.1.attn' has no effect: it was a part of 'h.1'" in ended.err


def test_scores_of_divided_attention_are_computed_again_with_the_same_bits(tmp_path: Path) -> None:
    script = tmp_path / "attention.py"
    script.write_text(ATTENTION)
    assert outputs_of_ranks(script, ranks=4, folder=tmp_path) == ["same\n"] * 4
