"""Saving and going on: a function for each case, which the ranks of a running job call."""

from __future__ import annotations

import json
import random
from argparse import Namespace
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import shardwright as smp
import torch
from shardwright._core import CheckpointReader
from shardwright.sharded_data_parallel.parameters import shard_of
from torch import nn

from tests.checkpoint.models import Counting, Odd, Training


def seed() -> None:
    """Other streams on every rank."""
    torch.manual_seed(5 + smp.rank())
    random.seed(6 + smp.rank())
    np.random.seed(7 + smp.rank())
    random.gauss(0.0, 1.0)  # leaves the second of two


def values(training: Training, *, buffers: bool = True) -> dict[str, torch.Tensor]:
    """All values that training has changed on this rank."""
    model = training.model
    found = {name: shard_of(one).detach().clone() for name, one in model.local_named_parameters()}
    found |= {name: one.clone() for name, one in model.local_named_buffers() if buffers and name != "passing"}
    for number, (key, state) in enumerate(training.optimizer.state.items()):
        found |= {f"{number} {tuple(key.shape)} {name}": shard_of(one).clone() for name, one in state.items()}
    return found


def scale(training: Training) -> Any:
    """The state of the loss scaler, if there is one."""
    found = getattr(training.optimizer, "loss_scaler", None)
    return None if found is None else found.state_dict()


def save_and_go_on(folder: str, steps: int = 3, kind: str = "AdamW", path: str | None = None) -> None:
    """Train, save in the folder or at a path, and train on; what comes of it is written into the folder."""
    training = Training(kind)
    seed()
    training.run(steps)
    smp.save_checkpoint(path or folder, "a", user_content=training.content())
    training.run(steps)
    smp.save(
        {
            "values": values(training),
            "losses": training.losses,
            "lr": training.scheduler.get_last_lr(),
            "scale": scale(training),
        },
        f"{folder}/after_{smp.rank()}",
        partial=False,
    )


def resume(
    folder: str, steps: int = 3, kind: str = "AdamW", late: bool = False, same: bool = True, path: str | None = None
) -> None:
    """Go on from what was saved: bit for bit as if nothing had been, where the layout is the same."""
    training = Training(kind, seed=99)
    if late:
        training.run(1)
    content = smp.resume_from_checkpoint(path or folder)
    training.take(content)
    training.run(steps)
    assert len(training.losses) == 2 * steps
    if not same:
        return
    expected = smp.load(f"{folder}/after_{smp.rank()}", partial=False)
    assert training.losses[steps:] == expected["losses"][steps:]  # those before are rank 0's
    assert training.scheduler.get_last_lr() == expected["lr"]
    assert scale(training) == expected["scale"]
    found = values(training)
    assert found.keys() == expected["values"].keys()
    for name, value in expected["values"].items():
        assert value.dtype == found[name].dtype, name
        assert torch.equal(value, found[name]), name


def each_element_once(folder: str) -> None:
    """Every tensor is there under its name, written once, by ranks that write about the same."""
    training = Training()
    training.run(1)
    smp.save_checkpoint(folder, "a")
    manifest = json.loads(CheckpointReader(folder).manifest)
    names = {one["name"]: one for one in manifest["tensors"]}
    plain = Odd()
    aliases = {one["name"]: one["of"] for one in manifest["aliases"]}
    assert {f"model/{name}" for name in plain.state_dict()} == {
        name for name in [*names, *aliases] if name.startswith("model/")
    }
    assert aliases == {"model/again.weight": "model/first.weight"}
    assert names["model/nothing"]["shape"] == [0, 3]
    assert names["model/scale"]["shape"] == []
    assert names["model/small"]["dtype"] == "BF16"
    assert names["model/flags"]["dtype"] == "BOOL"
    assert "optimizer/first.weight/exp_avg" in names
    assert "optimizer/scale/step" in names
    assert "optimizer/frozen/exp_avg" not in names
    sizes = [one["bytes"] - one["data_begin"] for one in manifest["files"]]
    assert len(sizes) == smp.size()
    assert CheckpointReader(folder).verify() == []
    if smp.pp_size() == 1 and smp.size() > 1:
        assert max(sizes) < 1.2 * min(sizes), sizes
    smp.barrier()


def extra_state(folder: str) -> None:
    """What modules keep that is no tensor comes back, on the rank that has the module."""
    module = nn.Sequential(*(Counting() for _ in range(4)))
    for number, part in enumerate(module):
        part.calls = (number, number + 1)
    training = Training(module=module)
    training.run(1)
    smp.save_checkpoint(folder, "a", user_content=[1])
    for part in training.model.module:
        part.calls = ()
    assert smp.resume_from_checkpoint(folder) == [1]
    local = dict(training.model.local_named_modules())
    found = {name: part.calls for name, part in local.items() if isinstance(part, Counting)}
    assert found
    assert found == {name: (int(name), int(name) + 1) for name in found}


def content(folder: str) -> None:
    """Everything that the codec knows comes back on every rank, with its type."""
    training = Training()
    given = {
        "plain": [None, True, 1, -(1 << 70), 0.1, float("inf"), -0.0, "text\udc80", b"\x00\xff", 1 + 2j],
        "tuple": ((), (1, (2,))),
        "sets": {1, "a", (2, 3)},
        "ordered": OrderedDict([("b", 1), ("a", {3: 4})]),
        "namespace": Namespace(lr=0.1, names=["x"]),
        "numpy": [np.float32(0.1), np.int64(3), np.arange(6).reshape(2, 3), np.array(["a", "bc"])],
        "torch": (torch.Size([2, 3]), torch.bfloat16, torch.device("cpu"), torch.randn(2, 0), torch.arange(3.0)),
    }
    smp.save_checkpoint(folder, "a", user_content=given if smp.rank() == 0 else None)
    found: Any = smp.resume_from_checkpoint(folder)
    items, wanted = found.pop("sets"), given.pop("sets")  # whose order depends on how hashes collide
    assert (type(items), items, {type(one) for one in items}) == (set, wanted, {int, str, tuple})
    assert repr(found) == repr(given)
    assert type(found["ordered"]) is OrderedDict
    assert type(found["namespace"]) is Namespace
    assert found["numpy"][2].dtype == np.int64
    training.run(1)
    smp.save_checkpoint(folder, "b", user_content={"a": [0, 1, 2, Namespace(b=training)]})
    other: Any = smp.resume_from_checkpoint(folder)
    with pytest.raises(smp.LeftOutError, match=r"user_content\['a'\]\[3\].b is not there.* a tests.checkpoint.models"):
        _ = other["a"][3].b


def full(folder: str, translate: bool = True) -> None:
    """A full checkpoint is a file that others read, and it loads again."""
    training = Training()
    training.run(1)
    smp.save_checkpoint(folder, "whole", partial=False, user_content={"a": 1}, translate_if_full=translate)
    expected = training.model.state_dict()
    read = smp.load(f"{folder}/whole", partial=False)
    assert list(read) == list(expected)
    for name, value in expected.items():
        assert torch.equal(read[name], value), name
    smp.save_checkpoint(folder, "parts", user_content={"a": 2})
    smp.save_checkpoint(folder, "later", partial=False, user_content={"a": 3}, translate_if_full=translate)
    training.run(1)
    assert smp.resume_from_checkpoint(folder) == {"a": 2}  # the newest of its kind
    for tag, number in (("whole", 1), (None, 3)):
        training.run(1)
        assert smp.resume_from_checkpoint(folder, tag, partial=False) == {"a": number}
        for name, value in training.model.state_dict().items():
            assert torch.equal(value, expected[name]), name
    with pytest.raises(smp.CheckpointError, match="tag is 'newest'; allowed"):
        smp.save_checkpoint(folder, "newest", partial=False)


def newest_is(folder: str, expected: Any) -> None:
    """The newest checkpoint loads, and is whole."""
    training = Training(seed=3)
    assert smp.resume_from_checkpoint(folder) == expected
    training.run(1)
    assert CheckpointReader(folder).verify() == []


def masters(folder: str, all_state: bool = True) -> None:
    """The masters are those that were saved, and round to the weights; the rest of sharded state can be left out."""
    training = Training(seed=99)
    smp.resume_from_checkpoint(folder, load_sharded_optimizer_state=all_state)
    assert bool(training.optimizer.state) == all_state
    manifest = json.loads(CheckpointReader(folder).manifest)
    saved = {one["name"]: one for one in manifest["tensors"] if one["name"].startswith("half_precision/")}
    assert saved
    assert all(one["dtype"] == "F32" for one in saved.values())
    named = {one: name for name, one in training.model.named_parameters()}
    found = training.optimizer.state_dict()["state"]
    checked = 0
    for number, parameter in enumerate(training.optimizer.param_groups[0]["params"]):
        master = found.get(number, {}).get("master_weight")
        if master is not None and f"half_precision/{named[parameter]}" in saved:
            assert torch.equal(master.to(parameter.dtype), parameter), named[parameter]
            checked += bool(master.numel() and not torch.equal(master, parameter.float()))
    assert checked > 3
    training.run(1)


def saved_partition(write: bool) -> None:
    """Ranks have what the file says, though costs say otherwise."""
    training = Training()
    if write:
        for name, rank in (("first", 1), ("layers", 0), ("layers.1", 1), ("last", 1)):
            smp.set_partition(training.model.module.get_submodule(name), rank)
    training.run(1)
    names = {name for name, _ in training.model.local_named_parameters()}
    assert ("layers.1.0.weight" in names) == (smp.pp_rank() == 1)
    assert ("layers.0.0.weight" in names) == (smp.pp_rank() == 0)
    assert ("last.bias" in names) == (smp.pp_rank() == 1)
    smp.barrier()


def full_of_layers(folder: str, model: str) -> None:
    """Names and values are those of the model that was wrapped; a changed state dict of it is taken back."""
    from tests.checkpoint.layouts.rank import build

    plain = build(model)
    with smp.tensor_parallelism():
        module = build(model)
    distributed = smp.DistributedModel(module)
    assert any(each.substitute for each in distributed.tensor_parallelism_report())
    smp.save_checkpoint(folder, "whole", partial=False)
    read = smp.load(f"{folder}/whole", partial=False)
    assert set(read) == set(plain.state_dict())
    for name, value in plain.state_dict().items():
        assert torch.equal(read[name], value), name
    changed = {name: value * 2 for name, value in plain.state_dict().items()}
    if smp.rank() == 0:
        torch.save(changed, f"{folder}/theirs.pt")
    smp.barrier()
    smp.resume_from_checkpoint(folder, "theirs.pt", partial=False)
    smp.save_checkpoint(folder, "again", partial=False)
    again = smp.load(f"{folder}/again", partial=False)
    for name, value in changed.items():
        assert torch.equal(again[name], value), name
