"""What a rank does with what the public example scripts give and read; run by ``tests.compat.behaviour``."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import smdistributed.modelparallel.torch as smp
import torch
from smdistributed.modelparallel.test.torch.utils import dump_model, verify
from smdistributed.modelparallel.torch.nn.huggingface import gpt2, gptneo
from smdistributed.modelparallel.torch.optimizers import FusedLAMB, FusedLamb
from smdistributed.modelparallel.torch.state_mod import state
from smdistributed.modelparallel.torch.utils import get_distribution_axis, rmsg
from torch import nn

_SIZES = {"vocab_size": 24, "n_positions": 8, "n_embd": 16, "n_layer": 2, "n_head": 4}
_SIZES |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_IDS = torch.arange(32).view(4, 8) % 24


def _gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(**_SIZES))


def fused_layers() -> None:
    """Distributed layers take the places of a model's at a degree of 1 too, compute the same, and are saved as such."""
    plain = _gpt2()
    with smp.model_creation(tensor_parallelism=True, dtype=torch.get_default_dtype(), flash_attention=True):
        module = _gpt2()
    model = smp.DistributedModel(module, trace_device="gpu")
    layers = model.get_module().transformer.seq_layers
    assert [type(layer) is not type(own) for layer, own in zip(layers, plain.transformer.h, strict=True)] == [True] * 2
    assert all(isinstance(layer, smp.nn.DistributedTransformerLayer) for layer in layers)
    assert set(layers) <= set(model.distributed_modules())
    for layer in layers:
        smp.set_activation_checkpointing(layer)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), dynamic_loss_scale=True)
    own = torch.optim.SGD(plain.parameters(), lr=0.1)

    @smp.step
    def train(model: Any, ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
        model.backward(loss)
        return loss

    for _ in range(3):
        optimizer.zero_grad()
        own.zero_grad()
        loss = train(model, _IDS).reduce_mean()
        expected = plain(input_ids=_IDS, labels=_IDS).loss
        expected.backward()
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=0)
        if smp.state.cfg.sharded_data_parallel_degree > 1:
            nn.utils.clip_grad_norm_(plain.parameters(), smp.state.cfg.sdp_gradient_clipping)
        optimizer.step()
        own.step()
    assert model.state_dict().keys() != plain.state_dict().keys()
    folder = Path(smp.allgather(os.environ["COMPAT_FOLDER"], smp.WORLD)[0])
    smp.save_checkpoint(str(folder), tag="fullmodel.pt", partial=False, model=model)
    smp.barrier()
    saved = smp.load(str(folder / "fullmodel.pt"), partial=False)
    for name, values in plain.state_dict().items():
        if name in saved:
            torch.testing.assert_close(saved[name], values, rtol=1e-4, atol=1e-6)
    assert plain.state_dict().keys() - saved.keys() <= {"lm_head.weight"}
    smp.save_checkpoint(str(folder), tag="partial", partial=True, model=model, optimizer=optimizer)
    smp.resume_from_checkpoint(str(folder), tag="partial", partial=True)
    torch.testing.assert_close(train(model, _IDS).reduce_mean(), plain(input_ids=_IDS, labels=_IDS).loss.detach())


def said_once() -> None:
    """What switches nothing on is taken, at ``smp.init`` and by the optimizer; see the test for what is said."""
    assert smp.state.cfg.sdp_gradient_clipping == 1.0
    model = smp.DistributedModel(nn.Linear(4, 4))
    scale = {"scale_window": 1000, "min_scale": 1, "delayed_shift": 2}
    for _ in range(2):
        optimizer = smp.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            static_loss_scale=None,
            dynamic_loss_scale=True,
            dynamic_loss_args=scale,
        )
        assert isinstance(optimizer, smp.DistributedOptimizer)
        assert isinstance(optimizer, torch.optim.SGD)
    for wrong in ({"dynamic_loss_scale": 3}, {"static_loss_scale": -1.0}, {"dynamic_loss_args": {"scale": 3}}):
        with pytest.raises(smp.ConfigError, match=r"smp.DistributedOptimizer"):
            smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), **wrong)


def shapes() -> None:
    """Groups and parameters say what a rank holds, also of parameters that stay whole."""
    torch.manual_seed(0)
    model = smp.DistributedModel(nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 1200)))
    every = list(model.parameters())
    groups = [{"params": every[:1]}, {"params": every[1:], "weight_decay": 0.0}]
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(groups, lr=0.1))
    degree = smp.state.cfg.sharded_data_parallel_degree
    for _ in range(2):
        now = list(model.parameters())
        assert [len(group) for group in optimizer.fp16_groups] == [1, 3]
        assert [one for group in optimizer.fp16_groups for one in group] == now or degree > 1
        flat, masters = optimizer.fp16_partitioned_groups_flat, optimizer.fp32_partitioned_groups_flat
        for group, held, whole, master in zip(
            optimizer.fp16_groups, optimizer.fp16_partitioned_groups, flat, masters, strict=True
        ):
            if degree > 1:
                assert [one.ds_tensor.shape for one in group] == [one.shape for one in held]
                assert sum(one.ds_tensor.ds_numel for one in group) == whole.numel() == master.numel()
                assert all(one.ds_numel == one.ds_shape.numel() >= one.ds_tensor.numel() for one in group)
            assert torch.equal(torch.cat([one.flatten() for one in held]), whole)
            assert master.dtype is torch.float32
            torch.testing.assert_close(master.to(whole.dtype), whole, rtol=0, atol=0)
        model.backward(model(torch.randn(4, 5, dtype=now[0].dtype)).float().sum())
        optimizer.step()
        optimizer.zero_grad()
    sizes = smp.allgather([one.numel() for one in optimizer.fp16_partitioned_groups_flat], smp.WORLD)
    held = [sum(of) for of in zip(*sizes, strict=True)]
    whole_ones = sum(one.ds_numel for one in every if one.ds_tensor.numel() == one.ds_numel) if degree > 1 else 0
    assert sum(held) == 5 * 7 + 7 + 7 * 1200 + 1200 + whole_ones * (degree - 1) or degree == 1


def helpers() -> None:
    """What scripts import for themselves does what its name says."""
    assert state is smp.state
    assert FusedLAMB is FusedLamb
    assert rmsg("done") == f"[{smp.rank()}] done"
    plain = _gpt2()
    block = plain.transformer.h[1].state_dict()
    layer = gpt2.translate_hf_block_state_dict_to_smdistributed(block)
    assert "attention.query_key_value.weight" in layer
    assert layer["attention.query_key_value.weight"].shape == (48, 16)
    back = gpt2.translate_layer_state_dict_to_hf_gpt2_block(layer)
    assert back.keys() == block.keys()
    assert all(torch.equal(back[name], values) for name, values in block.items())
    assert "attn.bias" in gpt2.translate_layer_state_dict_to_hf_gpt2_block(layer, max_seq_len=8)
    assert gptneo.translate_hf_gptneo_state_dict_to_smdistributed({}) == {}

    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    class Block(GPT2Block):
        """A script's own."""

    hooks = gpt2.get_hf_gpt2_transformer_layer_hooks()
    smp.tp_register_with_module(Block, smp.nn.DistributedTransformerLayer, *hooks)
    module = _gpt2()
    with smp.tensor_parallelism():
        module.transformer.h[0] = Block(module.config, 0)
    original = copy.deepcopy(module)
    model = smp.DistributedModel(module)
    made = model.get_module().transformer.h[0]
    assert isinstance(made, smp.nn.DistributedTransformerLayer)
    if smp.tp_size() == 1:
        kept = gpt2.translate_layer_state_dict_to_hf_gpt2_block(made.state_dict())
        original.transformer.h[0].load_state_dict(kept)
        expected = original(input_ids=_IDS, labels=_IDS).loss
        torch.testing.assert_close(model(input_ids=_IDS, labels=_IDS).loss, expected)
    axes = {get_distribution_axis(one) for one in model.parameters()}
    assert axes == ({None} if smp.tp_size() == 1 else {None, 0, 1} - {2} if None in axes else axes)
    dense = made.attention.dense.weight
    assert get_distribution_axis(dense) == (None if smp.tp_size() == 1 else 1)
    assert get_distribution_axis(model.get_module().transformer.wte.weight) is None
    path = str(Path(os.environ["COMPAT_FOLDER"]) / "model.safetensors")
    dump_model(model, path)
    verify(model, path)
    with torch.no_grad():
        dense.add_(1)
    with pytest.raises(AssertionError, match="attention"):
        verify(model, path)


CASES = {case.__name__: case for case in (fused_layers, said_once, shapes, helpers)}
