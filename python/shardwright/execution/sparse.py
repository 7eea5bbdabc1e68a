"""Sparse COO and nested tensors among arguments and results, which are sent as several dense tensors.

The indices in a list of tensors do not change: an empty tensor replaces each sparse or nested one, and its parts are
appended at the end of the list. In-place writes to such tensors would not reach the other rank, and are refused.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from shardwright import _core
from shardwright.errors import UnsupportedValueError
from shardwright.frames import Frame
from shardwright.frames.remote import RemoteTensor
from shardwright.frames.watch import Watched

#: The index of each sparse or nested tensor in a list, with the description of its parts.
Composites = list[tuple[int, _core.Composite]]


def take_apart(
    tensors: list[torch.Tensor], where: str, arguments: Sequence[torch.Tensor] = ()
) -> tuple[list[torch.Tensor], Composites]:
    """Replace the sparse and nested tensors in a list by dense ones.

    Args:
        tensors: The tensors of a value.
        where: A description of the value, for error messages.
        arguments: Tensors that the receiver already has and that need not be sent.

    Returns:
        The dense tensors, and the descriptions of the sparse and nested ones.

    Raises:
        UnsupportedValueError: A sparse tensor needs a gradient and is not coalesced, or a nested one is not jagged.
    """
    places = [place for place, tensor in enumerate(tensors) if has_parts(tensor)]
    if not places:
        return tensors, []
    numbers = {id(tensor): number for number, tensor in enumerate(arguments)}
    dense, composites = list(tensors), Composites()
    offsets_at: dict[int, int] = {}
    for place in places:
        tensor: Any = tensors[place]
        dense[place] = torch.empty(0)
        number = numbers.get(id(tensor))
        if number is not None:
            composites.append((place, _core.Composite.of_argument(number)))
        elif tensor.is_nested:
            values, offsets = _nested_parts(tensor, where)
            # Nested tensors have the same ragged size only if their offsets are the same object.
            at = offsets_at.setdefault(id(offsets), len(dense))
            if at == len(dense):
                dense.append(offsets)
            composites.append((place, _core.Composite.of_nested(len(dense), at, tensor._ragged_idx)))
            dense.append(values)
        else:
            indices, shape, coalesced = len(dense), list(tensor.shape), tensor.is_coalesced()
            composites.append((place, _core.Composite.of_sparse(indices, indices + 1, shape, coalesced)))
            dense += _sparse_parts(tensor, where)
    return dense, composites


def has_parts(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is sent as several dense ones."""
    return type(tensor) is not RemoteTensor and (tensor.is_sparse or tensor.is_nested)


def refuse_parts(tensor: Any, where: str) -> None:
    """Raise `UnsupportedValueError` if a sparse or nested tensor cannot be recreated from its parts."""
    if tensor.is_nested:
        if tensor.layout is not torch.jagged or tensor.lengths() is not None:
            raise UnsupportedValueError(
                f"{where} is or holds a nested tensor that is not jagged or has gaps; it cannot cross ranks: make it "
                "with layout=torch.jagged, or pass a padded one",
                "nested tensor that is not jagged or has gaps",
            )
    elif tensor.requires_grad and not tensor.is_coalesced():
        raise UnsupportedValueError(
            f"{where} is or holds a sparse tensor that requires a gradient and is not coalesced; it cannot cross ranks "
            "because an element may stand in it several times; pass its coalesce()",
            "sparse tensor that requires a gradient and is not coalesced",
        )


def _sparse_parts(tensor: torch.Tensor, where: str) -> list[torch.Tensor]:
    """Return copies of indices and values, the values with the tensor's autograd history."""
    if not tensor.requires_grad:
        return [tensor._indices().clone(), tensor._values().clone()]
    refuse_parts(tensor, where)
    with torch.enable_grad():
        return [tensor._indices().clone(), tensor.values().clone()]


def _nested_parts(tensor: Any, where: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a copy of the values, with the tensor's autograd history, and the offsets themselves."""
    refuse_parts(tensor, where)
    with torch.enable_grad():
        return tensor.values().clone(), tensor.offsets()


def put_together(
    dense: list[torch.Tensor], composites: Composites, arguments: Sequence[torch.Tensor] = ()
) -> list[torch.Tensor]:
    """Recreate a list from :func:`take_apart`; sparse and nested tensors have the autograd history of their values."""
    if not composites:
        return dense
    tensors = list(dense)
    for place, composite in composites:
        with torch.enable_grad():
            if composite.argument is not None:
                tensors[place] = arguments[composite.argument]
            elif composite.nested is not None:
                values, offsets, dimension = composite.nested
                tensors[place] = torch.nested.nested_tensor_from_jagged(
                    dense[values], dense[offsets], jagged_dim=dimension
                )
            else:
                assert composite.sparse is not None, "there are three kinds"
                indices, values, sizes, coalesced = composite.sparse
                tensors[place] = torch.sparse_coo_tensor(
                    dense[indices], dense[values], sizes, is_coalesced=coalesced, check_invariants=True
                )
    return tensors


def watched_in(tensors: list[torch.Tensor], why: str) -> list[Watched]:
    """Return detectors of writes to the sparse and nested tensors of a list, except inference tensors."""
    found = [tensor for tensor in tensors if has_parts(tensor)]
    return [Watched(tensor, why) for tensor in found if not tensor.is_inference()]


def received_arguments(
    frame: Frame, module: str, dense: list[torch.Tensor], composites: Composites
) -> tuple[list[torch.Tensor], list[Watched]]:
    """Return the arguments of a module run for another rank, and detectors of writes to sparse and nested ones."""
    tensors = put_together(dense, composites)
    if not composites:
        return tensors, []
    frame.arguments += [weakref.ref(tensors[place]) for place, _ in composites]
    return tensors, watched_in(tensors, f"module {module!r} was given a sparse or nested tensor by another rank")


def received_results(
    frame: Frame, module: str, tensors: list[torch.Tensor], composites: Composites, given: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Return the results of a module on another rank, and refuse later writes to sparse and nested ones.

    Args:
        frame: The frame of the caller.
        module: The name of the module.
        tensors: The dense tensors of the results.
        composites: The descriptions of the sparse and nested results.
        given: The arguments, followed by the parts of sparse and nested arguments.
    """
    result = put_together(tensors, composites, given)
    for place, _ in composites:
        tensor = result[place]
        frame.watch(tensor, f"module {module!r} returned a sparse or nested tensor to another rank")
        if tensor.grad_fn is not None:
            frame.unhookable[tensor.grad_fn] = (
                f"a sparse or nested result of module {module!r} would see a gradient of its values only: register it "
                "inside the module"
            )
    return result


def watch_kept(
    frame: Frame, module: str, composites: Composites, notes: _core.ResultNotes, given: list[torch.Tensor]
) -> None:
    """Refuse later writes to sparse and nested arguments of which the module kept a part."""
    kept = {*notes.kept_arguments, *notes.watch_arguments}
    for place, composite in composites:
        if kept.intersection(composite.parts):
            frame.watch(given[place], f"module {module!r} kept a sparse or nested tensor that it was given")
