"""Pieces of a parameter that an element-wise optimizer updates one after another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from shardwright.optimizer.offloading.chunks import Part, elements
from shardwright.optimizer.offloading.storage import Pages, StateStorage


class Pieces:
    """The state of a parameter while its pieces are updated. Each begins with what was there before the step."""

    def __init__(self, parameter: torch.Tensor, state: Mapping[str, Any], storage: StateStorage) -> None:
        """Begin with the first piece.

        Args:
            parameter: The parameter.
            state: Its state before the step.
            storage: Where its tensors are.
        """
        self._parameter = parameter
        self._storage = storage
        self._scalars = {key: value for key, value in state.items() if not self._is_whole(value)}
        #: Tensors of the parameter's shape, and what the step leaves of the others.
        self.state = {key: storage.keep(value) for key, value in state.items() if self._is_whole(value)}
        self._before = dict(self.state)

    def _is_whole(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.shape == self._parameter.shape

    def make(self, part: Part) -> tuple[nn.Parameter, dict[str, Any]]:
        """Return a piece with its gradient, and its state.

        Args:
            part: Which elements.
        """
        gradient = self._parameter.grad
        assert gradient is not None, "parameters without one are not updated"
        piece = nn.Parameter(elements(self._parameter, part), self._parameter.requires_grad)
        piece.grad = elements(gradient, part)
        scalars = {key: _copy(value) for key, value in self._scalars.items()}
        return piece, scalars | {key: elements(value, part) for key, value in self._before.items()}

    def take(self, part: Part, piece: torch.Tensor, state: Mapping[str, Any]) -> None:
        """Take over the state that a step has left of a piece.

        Args:
            part: Which elements.
            piece: The piece.
            state: Its state.

        Raises:
            OffloadError: The disk is full.
        """
        for key, value in state.items():
            if not (isinstance(value, torch.Tensor) and value.shape == piece.shape):
                self.state.setdefault(key, value)  # all pieces leave the same
                continue
            if key not in self.state:
                like = torch.empty_like(self._parameter, dtype=value.dtype, device="meta")
                self.state[key] = self._storage.empty_like(like)
            into = elements(self.state[key], part)
            if into.data_ptr() != value.data_ptr():
                into.copy_(value)

    def pages(self, part: Part) -> list[Pages]:
        """Return what the state of a piece has in the file.

        Args:
            part: Which elements.
        """
        whole = [value for value in self.state.values() if value in self._storage]
        return [self._storage.pages_of(value, part.begin, part.end) for value in whole]


def may_be_cut(parameter: torch.Tensor, values: torch.Tensor, state: Mapping[str, Any]) -> bool:
    """Return whether views of a parameter, of its gradient and of its state can be updated in place of them.

    Args:
        parameter: The parameter.
        values: Its values, which may be elsewhere.
        state: Its state.
    """
    gradient = parameter.grad
    whole = [value for value in state.values() if isinstance(value, torch.Tensor) and value.shape == parameter.shape]
    return (
        gradient is not None
        and gradient.layout is torch.strided
        and gradient.dtype is parameter.dtype
        and type(parameter) in (torch.Tensor, nn.Parameter)
        and all(one.layout is torch.strided and one.is_contiguous() for one in (values, gradient, *whole))
    )


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
