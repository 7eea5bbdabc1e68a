"""Who keeps the memory of a tensor that crossed ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from shardwright.frames.watch import RemoteMemory, kept_by_others

KEEPERS: dict[str, Callable[[torch.Tensor], object]] = {
    "nothing": lambda tensor: None,
    "a number": lambda tensor: tensor.sum().item(),
    "a copy": lambda tensor: tensor.clone(),
    "the tensor": lambda tensor: tensor,
    "a view": lambda tensor: tensor[1:],
    "an alias": lambda tensor: tensor.detach(),
    "an array": lambda tensor: tensor.numpy(),
    "the storage": lambda tensor: tensor.untyped_storage(),
    "a graph": lambda tensor: (tensor * torch.ones(1, requires_grad=True)).sum(),
}


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("what", KEEPERS)
def test_whoever_keeps_a_tensors_memory_is_found_and_nobody_else(what: str, shared: bool) -> None:
    tensor = torch.arange(2000.0)
    aliases = [tensor.detach(), torch.ones(3).detach(), *([tensor[5:].detach()] if shared else [])]
    keeper = KEEPERS[what](tensor)
    del tensor
    is_kept = what not in ("nothing", "a number", "a copy")
    assert kept_by_others(aliases, RemoteMemory()) == ([0, *([2] if shared else [])] if is_kept else [])
    del keeper
    assert kept_by_others(aliases, RemoteMemory()) == []


def test_what_another_rank_keeps_is_found_too() -> None:
    tensor, other = torch.ones(3), torch.ones(4)
    elsewhere = RemoteMemory()
    elsewhere.keep(other)
    aliases = [tensor.detach(), other.detach()]
    del tensor, other
    assert kept_by_others(aliases, elsewhere) == [1]
