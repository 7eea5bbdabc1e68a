"""State of parameters of a device that is loaded into host memory, past the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from shardwright.optimizer.offloading.storage import StateStorage


class Held:
    """A tensor of a state dict, which PyTorch leaves as it is, since it does not see that it is one."""

    def __init__(self, tensor: torch.Tensor) -> None:
        """Hold a tensor."""
        self._tensor = tensor

    def kept_for(self, parameter: torch.Tensor, storage: StateStorage) -> torch.Tensor:
        """Return it in the storage, with the dtype that PyTorch gives to state of a parameter.

        Args:
            parameter: The parameter.
            storage: The storage.

        Raises:
            OffloadError: The disk is full.
        """
        dtype = parameter.dtype if parameter.is_floating_point() else self._tensor.dtype
        tensor = self._tensor
        return tensor if tensor in storage and tensor.dtype is dtype else storage.keep(tensor.detach().to(dtype))


def held(state_dict: Mapping[str, Any], storage: StateStorage) -> dict[str, Any]:
    """Return a state dict in which large tensors are held.

    Args:
        state_dict: The state dict.
        storage: Where they go.
    """
    state = {
        key: {name: _held(name, value, storage) for name, value in entry.items()} if isinstance(entry, dict) else entry
        for key, entry in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


def _held(name: Any, value: Any, storage: StateStorage) -> Any:
    is_large = isinstance(value, torch.Tensor) and name != "step" and storage.takes(value)
    return Held(value) if is_large else value
