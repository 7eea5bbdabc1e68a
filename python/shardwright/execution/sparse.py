"""Sparse COO tensors among arguments and results: they travel as the tensors of their indices and values.

The places of a list of tensors stay what they are: at the place of a sparse tensor stands an empty one, and its parts
follow at the end. Writes to sparse tensors that crossed cannot be seen elsewhere, and are refused.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from shardwright.errors import UnsupportedValueError
from shardwright.frames import Frame
from shardwright.frames.remote import RemoteTensor
from shardwright.frames.watch import Watched

#: By place, what a sparse tensor is: the place of its indices, which its values follow, its sizes, and whether it is
#: coalesced; or the number of the argument that it is.
Described = dict[int, tuple[int, list[int], bool] | int]


def take_apart(
    tensors: list[torch.Tensor], where: str, arguments: Sequence[torch.Tensor] = ()
) -> tuple[list[torch.Tensor], Described]:
    """Dense tensors for a list in which some are sparse.

    Args:
        tensors: Those of a value.
        where: What the value is, for errors.
        arguments: What the receiver has already, and needs not be sent.

    Raises:
        UnsupportedValueError: A sparse tensor needs a gradient and is not coalesced.
    """
    places = [place for place, tensor in enumerate(tensors) if type(tensor) is not RemoteTensor and tensor.is_sparse]
    if not places:
        return tensors, {}
    numbers = {id(tensor): number for number, tensor in enumerate(arguments)}
    dense, described = list(tensors), Described()
    for place in places:
        tensor = tensors[place]
        dense[place] = torch.empty(0)
        number = numbers.get(id(tensor))
        if number is not None:
            described[place] = number
            continue
        described[place] = len(dense), list(tensor.shape), tensor.is_coalesced()
        dense += _parts(tensor, where)
    return dense, described


def _parts(tensor: torch.Tensor, where: str) -> list[torch.Tensor]:
    """Indices and values in memory of their own, the values with the tensor's history."""
    if not tensor.requires_grad:
        return [tensor._indices().clone(), tensor._values().clone()]
    if not tensor.is_coalesced():
        raise UnsupportedValueError(
            f"{where} is or holds a sparse tensor that requires a gradient and is not coalesced; it cannot cross ranks "
            "because an element may stand in it several times; pass its coalesce()"
        )
    with torch.enable_grad():
        return [tensor._indices().clone(), tensor.values().clone()]


def put_together(
    dense: list[torch.Tensor], described: Described, arguments: Sequence[torch.Tensor] = ()
) -> list[torch.Tensor]:
    """The list that was taken apart, with sparse tensors that have the history of the values."""
    if not described:
        return dense
    tensors = list(dense)
    for place, one in described.items():
        if isinstance(one, int):
            tensors[place] = arguments[one]
            continue
        number, sizes, coalesced = one
        with torch.enable_grad():
            tensors[place] = torch.sparse_coo_tensor(
                dense[number], dense[number + 1], sizes, is_coalesced=coalesced, check_invariants=True
            )
    return tensors


def watched_in(tensors: list[torch.Tensor], why: str) -> list[Watched]:
    """Those that notice writes to the sparse tensors of a list."""
    found = [tensor for tensor in tensors if type(tensor) is not RemoteTensor and tensor.is_sparse]
    return [Watched(tensor, why) for tensor in found if not tensor.is_inference()]


def received_arguments(
    frame: Frame, module: str, dense: list[torch.Tensor], described: Described
) -> tuple[list[torch.Tensor], list[Watched]]:
    """The arguments of a module that runs for another rank, and what notices that it writes to the sparse ones."""
    tensors = put_together(dense, described)
    if not described:
        return tensors, []
    frame.arguments += [weakref.ref(tensors[place]) for place in described]
    return tensors, watched_in(tensors, f"module {module!r} was given a sparse tensor by another rank")


def received_results(
    frame: Frame, module: str, tensors: list[torch.Tensor], returned: dict[str, Any], given: list[torch.Tensor]
) -> list[torch.Tensor]:
    """The results of a module on another rank; from now on nobody may write to the sparse ones.

    Args:
        frame: The caller's.
        module: The module.
        tensors: The results' tensors, sparse ones taken apart.
        returned: What the answer says of them.
        given: The arguments, then the parts of sparse ones.
    """
    described: Described = returned.get("sparse", {})
    result = put_together(tensors, described, given)
    for place in described:
        tensor = result[place]
        frame.watch(tensor, f"module {module!r} returned a sparse tensor to another rank")
        if tensor.grad_fn is not None:
            frame.unhookable[tensor.grad_fn] = (
                f"a sparse result of module {module!r} would see a gradient of its values only: register it inside "
                "the module"
            )
    return result


def watch_kept(frame: Frame, module: str, described: Described, returned: dict[str, Any], given: Any) -> None:
    """See that sparse arguments of which the module kept something are not written to."""
    kept = {*returned.get("kept_arguments", ()), *returned.get("watch_arguments", ())}
    for place, one in described.items():
        assert not isinstance(one, int), "arguments are sent"
        if kept & {one[0], one[0] + 1}:
            frame.watch(given[place], f"module {module!r} kept a sparse tensor that it was given")
