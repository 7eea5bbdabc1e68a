"""The methods of ``smp.DistributedModel`` that report what tensor parallelism has divided."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from shardwright.model.local import LocalTensors
from shardwright.tensor_parallel.module import DistributedModule, distributed_modules, named_shardings
from shardwright.tensor_parallel.replacement import Replacement
from shardwright.tensor_parallel.sharding import Sharding


class DividedTensors(LocalTensors):
    """Reports how the parameters and buffers of ``module`` are divided over tensor-parallel ranks."""

    _replacements: tuple[Replacement, ...] = ()
    _shardings: WeakIdKeyDictionary | None = None

    def tensor_parallelism_report(self) -> list[Replacement]:
        """Return, for each module marked for tensor parallelism, how it was replaced, in the model's order.

        The list is empty at a tensor parallelism degree of 1, where nothing is replaced.
        """
        return list(self._replacements)

    def distributed_modules(self) -> Iterator[DistributedModule]:
        """Return an iterator over the modules divided over tensor-parallel ranks, each once, in the model's order."""
        return (module for _, module in distributed_modules(self.module))

    def is_distributed_parameter(self, parameter: torch.Tensor) -> bool:
        """Return whether it is divided over tensor-parallel ranks: in slices, or on only one of them."""
        sharding = self._sharding_of(parameter)
        return sharding is not None and sharding.is_divided

    def is_scaled_batch_parameter(self, parameter: torch.Tensor) -> bool:
        """Return whether it is applied to the samples of all tensor-parallel ranks, not only this rank's."""
        sharding = self._sharding_of(parameter)
        return sharding is not None and sharding.scaled_batch

    is_distributed_buffer, is_scaled_batch_buffer = is_distributed_parameter, is_scaled_batch_parameter

    def default_reducer_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return an iterator over this rank's parameters reduced over DP_GROUP, with their names in the model."""
        return ((name, p) for name, p in self.local_named_parameters() if not self.is_scaled_batch_parameter(p))

    def scaled_batch_reducer_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return an iterator over this rank's parameters reduced over RDP_GROUP, with their names in the model."""
        return ((name, p) for name, p in self.local_named_parameters() if self.is_scaled_batch_parameter(p))

    def _sharding_of(self, tensor: torch.Tensor) -> Sharding | None:
        """Return how a tensor is divided over tp ranks; None if it does not belong to a distributed module."""
        known: Any = self._shardings
        if known is None or tensor not in known:  # parameters may have been replaced since the last lookup
            shardings = named_shardings(self.module)
            known = self._shardings = WeakIdKeyDictionary()
            for name, one in (*self.module.named_parameters(), *self.module.named_buffers()):
                known[one] = shardings.get(name)
        found: Sharding | None = known.get(tensor)
        return found
