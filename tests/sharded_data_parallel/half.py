"""Shards in bfloat16, with float32 master weights: a function for each case, which the ranks of a running job call."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import shardwright as smp
import torch

from tests.optimizer_sharding.problems import batch

from .problems import built, train


def trained(folder: str, label: str, max_norm: float = 1e6, saved: bool = False) -> None:
    """Train in bfloat16, with or without shards, and leave what came of it."""
    model = smp.DistributedModel(built("blocks"))
    optimizer: Any = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    losses = []
    for step in range(4):
        optimizer.zero_grad()
        loss = train(model, batch(step, smp.dp_rank()).float())
        losses.append(float(loss.reduce_mean()) if smp.pp_rank() == 0 else 0.0)
        if smp.state.cfg.sharded_data_parallel_degree == 1:
            optimizer.clip_master_grads(max_norm)
        else:
            with pytest.raises(smp.ConfigError, match="sdp_gradient_clipping"):
                optimizer.clip_master_grads(max_norm)
        optimizer.step()
        if saved and step == 1:
            state, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
            optimizer.zero_grad()
            train(model, batch(9, smp.dp_rank()).float())
            optimizer.step()
            model.load_state_dict(weights)
            optimizer.load_state_dict(state)
    state, weights = optimizer.state_dict(), model.state_dict()
    if smp.rank() == 0:
        masters = {number: entry["master_weight"].tolist() for number, entry in state["state"].items()}
        found = {"losses": losses, "masters": masters}
        assert all(value.dtype == torch.bfloat16 for value in weights.values())
        (Path(folder) / label).write_text(json.dumps(found))
