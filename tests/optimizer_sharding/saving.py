"""Saved state of sharded optimizers: a function for each case, which the ranks of a running job call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import shardwright as smp
import torch

from .cases import Pair, batch, check_weights, train
from .problems import OPTIMIZERS, Reference, built, groups_of


def save(model: str, optimizer: str, folder: str, replicas: int) -> None:
    """Train, and save in every form; the whole state is that of one process."""
    pair = Pair(model, optimizer)
    assert smp.dp_size() == replicas
    pair.run(3)
    whole, expected = pair.optimizer.state_dict(), pair.reference.optimizer.state_dict()
    assert whole.keys() == expected.keys()
    assert whole["param_groups"] == expected["param_groups"]
    assert list(whole["state"]) == list(expected["state"])
    for number, state in expected["state"].items():
        assert whole["state"][number].keys() == state.keys()
        for key, value in state.items():
            torch.testing.assert_close(whole["state"][number][key], value, rtol=1e-9, atol=1e-12)
    pair.reference.optimizer.load_state_dict(whole)
    target, rank = Path(folder), smp.rank()
    gathered = pair.optimizer.local_state_dict()
    if smp.rdp_rank() == 0:
        assert isinstance(gathered, list)
        assert len(gathered) == smp.rdp_size()
        torch.save(gathered, target / f"gathered_{smp.pp_rank()}.pt")
    torch.save(pair.optimizer.local_state_dict(gather_if_shard=False), target / f"share_{rank}.pt")
    weights = pair.model.state_dict()
    if rank == 0:
        torch.save(whole, target / "whole.pt")
        torch.save(weights, target / "weights.pt")
        torch.save(pair.reference.module.state_dict(), target / "plain_weights.pt")
        torch.save(pair.reference.optimizer.state_dict(), target / "plain.pt")
    smp.barrier()


def resume(model: str, optimizer: str, folder: str, form: str, *, late: bool = False) -> None:
    """Load what another job has saved, before the first step or after it, and go on as one process does."""
    source = Path(folder)
    plain = built(model)
    plain.load_state_dict(torch.load(source / "plain_weights.pt"))
    reference = Reference(plain, OPTIMIZERS[optimizer](groups_of(plain.parameters())), smp.dp_size(), 2)
    reference.optimizer.load_state_dict(torch.load(source / "plain.pt"))
    distributed = smp.DistributedModel(built(model))
    own: Any = smp.DistributedOptimizer(OPTIMIZERS[optimizer](groups_of(list(distributed.parameters()))))
    if late:
        train(distributed, batch(77, smp.dp_rank()))
        own.step()
    distributed.load_state_dict(torch.load(source / "weights.pt"))
    own.load_state_dict(_saved(source, form))
    for step in range(20, 23):
        own.zero_grad()
        reference.optimizer.zero_grad()
        train(distributed, batch(step, smp.dp_rank()))
        reference.accumulate(step)
        own.step()
        reference.optimizer.step()
        check_weights(distributed, plain, f"step {step} after a load of {form}")


def _saved(source: Path, form: str) -> Any:
    if form in ("whole", "plain"):
        return torch.load(source / f"{form}.pt")
    if form == "half":  # as a job with master weights saves it
        state = torch.load(source / "whole.pt")
        for number in range(sum(len(group["params"]) for group in state["param_groups"])):
            state["state"].setdefault(number, {})["master_weight"] = torch.ones(1)
        return {**state, "loss_scaler": {"loss_scale": 8.0, "dynamic": None}}
    if form == "gathered":
        return [torch.load(path) for path in sorted(source.glob("gathered_*.pt"))]
    if form == "same":  # as it was saved: each rank its own
        return torch.load(source / f"share_{smp.rank()}.pt")
    return [torch.load(path) for path in sorted(source.glob("share_*.pt"))]


def load_with_masters(model: str, optimizer: str, folder: str, form: str) -> None:
    """Load shares in a job with master weights, which follow the model."""
    source = Path(folder)
    distributed = smp.DistributedModel(built(model))
    own: Any = smp.DistributedOptimizer(OPTIMIZERS[optimizer](groups_of(list(distributed.parameters()))))
    train(distributed, batch(77, smp.dp_rank()))
    own.step()
    distributed.load_state_dict(torch.load(source / "weights.pt"))
    own.load_state_dict(_saved(source, form))
    found, parameters = own.state_dict()["state"], [one for group in own.param_groups for one in group["params"]]
    compared = 0
    for number, state in torch.load(source / "whole.pt")["state"].items():
        assert torch.equal(found[number]["master_weight"], parameters[number].float())
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                assert torch.equal(found[number][key], value.float()), (number, key)
                compared += 1
    assert compared > 0
    own.zero_grad()
    train(distributed, batch(78, smp.dp_rank()))
    own.step()


def write_weights(model: str, optimizer: str, folder: str, file: str) -> None:
    """Train for some steps, and write the weights."""
    pair = Pair(model, optimizer)
    for step in range(5):
        pair.optimizer.zero_grad()
        train(pair.model, batch(step, smp.dp_rank()))
        pair.optimizer.step()
    weights = pair.model.state_dict()
    if smp.rank() == 0:
        torch.save(weights, Path(folder) / file)
    every = smp.allgather(dict(pair.model.local_named_parameters()), smp.DP_GROUP)
    for other in every:
        for name, value in pair.model.local_named_parameters():
            assert torch.equal(value, other[name]), name
