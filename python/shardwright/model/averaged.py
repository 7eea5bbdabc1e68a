"""``smp.AveragedModel``: averages of a divided model's weights. Each rank keeps those of its own part."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.swa_utils import get_swa_multi_avg_fn

from shardwright.errors import ConfigError, PartialUpdateError, ShardwrightError
from shardwright.execution.task import running_task
from shardwright.job.runtime import current_runtime
from shardwright.model.distributed import DistributedModel
from shardwright.model.hooks import versions
from shardwright.model.state_dict import IncompatibleKeys
from shardwright.model.updates import Updates
from shardwright.sharded_data_parallel.parameters import ShardedParameters, shard_of

AverageOne = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
AverageMany = Callable[[list[torch.Tensor], list[torch.Tensor], torch.Tensor], Any]
_PREFIX = "module."
_COUNT = "n_averaged"


class AveragedModel:
    """Running averages of a model's weights, like ``torch.optim.swa_utils.AveragedModel`` for an undivided model.

    By default, all updates have the same weight (stochastic weight averaging). The averaging functions of
    ``torch.optim.swa_utils``, such as ``get_ema_multi_avg_fn(0.999)`` for an exponential moving average, can be passed
    unchanged. Every rank keeps the averages of the tensors that it owns, so ranks communicate only for state dicts.

    Attributes:
        model: The model whose weights are averaged.
        n_averaged: The number of updates in the averages.
    """

    def __init__(
        self,
        model: DistributedModel,
        *,
        avg_fn: AverageOne | None = None,
        multi_avg_fn: AverageMany | None = None,
        use_buffers: bool = False,
    ) -> None:
        """Start with copies of the current weights. The first update replaces them.

        Args:
            model: The model.
            avg_fn: ``avg_fn(averaged, current, n_averaged)``, which returns the new average of one tensor.
            multi_avg_fn: ``multi_avg_fn(averaged, current, n_averaged)``, which updates lists of tensors in place.
            use_buffers: Average buffers too, instead of copying their current values.

        Raises:
            ConfigError: ``model`` is not an ``smp.DistributedModel``, or both functions are given.
        """
        if not isinstance(model, DistributedModel):
            raise ConfigError(
                f"smp.AveragedModel was given a {type(model).__name__}; it averages an smp.DistributedModel "
                "(torch.optim.swa_utils.AveragedModel averages other modules)"
            )
        if avg_fn is not None and multi_avg_fn is not None:
            raise ConfigError("smp.AveragedModel was given avg_fn and multi_avg_fn; only one of them is allowed")
        self.model = model
        self.n_averaged = torch.zeros((), dtype=torch.long)
        self._avg_fn = avg_fn
        self._multi_avg_fn = multi_avg_fn or get_swa_multi_avg_fn()  # type: ignore[no-untyped-call]
        self._use_buffers = use_buffers
        self._parameters: dict[str, torch.Tensor] = {}
        self._buffers: dict[str, torch.Tensor] = {}
        #: Why averages are partly those of a load; None if they are not.
        self._in_part: str | None = None
        self._take_over()

    def _pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return each average with its current tensor, and drop averages of tensors that this rank no longer owns.

        Of a parameter that is sharded over data-parallel ranks, both are this rank's shard.
        """
        self.model.placement.deferred_loads.run(self.model.module)  # else it would come into what is exchanged
        self.model.placement.reset_shards()
        pairs = []
        now: tuple[tuple[dict[str, torch.Tensor], Iterator[tuple[str, torch.Tensor]]], ...] = (
            (self._parameters, self.model.local_named_parameters()),
            (self._buffers, self.model.local_named_buffers()),
        )
        for averages, current in now:
            kept = {name: (averages.get(name), tensor) for name, tensor in current}
            averages.clear()
            for name, (average, tensor) in kept.items():
                shard = shard_of(tensor)
                if average is None:
                    average = shard.detach().clone()
                elif shard is not tensor and average.shape == tensor.shape:  # made before it was sharded
                    average = current_runtime()[ShardedParameters].cut(average)
                if average.device != shard.device:  # made before the model was divided
                    average = average.to(shard.device)
                averages[name] = average
                pairs.append((average, shard))
        return pairs

    @torch.no_grad()
    def _take_over(self) -> None:
        for average, current in self._pairs():
            average.copy_(current)

    @torch.no_grad()
    def update_parameters(self) -> None:
        """Update the averages with the model's current weights. Call it on every rank, after an optimizer step."""
        self._check_whole("smp.AveragedModel.update_parameters")
        if running_task() is not None:
            raise ShardwrightError("update_parameters was called in a step; call it after the optimizer's step")
        pairs = self._pairs()
        if int(self.n_averaged) == 0:
            self._take_over()
        else:
            averaged = len(self._parameters) + (len(self._buffers) if self._use_buffers else 0)
            for average, current in pairs[averaged:]:
                average.copy_(current)
            self._average(pairs[:averaged])
        self.n_averaged += 1

    def _average(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        if self._avg_fn is not None:
            for average, current in pairs:
                average.copy_(self._avg_fn(average, current.detach(), self.n_averaged.to(current.device)))
            return
        kinds: dict[tuple[torch.device, torch.dtype], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for average, current in pairs:
            averages, currents = kinds.setdefault((average.device, average.dtype), ([], []))
            averages.append(average)
            currents.append(current.detach())
        for (device, _), (averages, currents) in kinds.items():
            self._multi_avg_fn(averages, currents, self.n_averaged.to(device))

    @contextmanager
    def applied(self) -> Iterator[DistributedModel]:
        """Give the model the averaged weights within the block, for an evaluation. Every rank must enter it.

        Nothing is copied: weights and averages exchange their storage, or their values where weights are shards. The
        trained weights and buffers are restored on exit. Do not train within the block, because changes made there
        would be lost.
        """
        self._check_whole("smp.AveragedModel.applied")
        with self._exchanged():
            yield self.model

    @contextmanager
    def _exchanged(self) -> Iterator[None]:
        self._exchange(self._pairs())
        try:
            with self.model.placement.replicas.undone():
                yield
        finally:
            self._exchange(self._pairs())  # found again: the model may have been divided within the block

    def _check_whole(self, operation: str) -> None:
        current_runtime()[Updates].check_whole(operation)
        if self._in_part is not None:
            raise PartialUpdateError(
                f"{operation}: {self._in_part}; averages may have been loaded in part: load all of them first "
                "(smp.AveragedModel.load_state_dict)"
            )

    @torch.no_grad()
    def _exchange(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self.model.placement.reset_shards()
        has_shards = self.model.placement.sharding is not None
        for average, current in pairs:
            if has_shards:  # views of them are sent
                kept = average.clone()
                average.copy_(current)
                current.copy_(kept)
            else:
                average.data, current.data = current.data, average.data

    def local_state_dict(self) -> dict[str, Any]:
        """Return this rank's part of the averages, marked by ``_smp_is_partial``, without communication."""
        with self.applied():
            return self._prefixed(self.model.local_state_dict())

    def state_dict(self, gather_to_rank0: bool = False) -> dict[str, Any]:
        """Return the averages of the whole model on the CPU, as ``torch.optim.swa_utils.AveragedModel`` has them.

        Every rank of the pipeline must call this method.

        Args:
            gather_to_rank0: Return it on the first rank of the pipeline only, and ``{}`` on the others.
        """
        with self.applied():
            return self._prefixed(self.model.state_dict(gather_to_rank0))

    def _prefixed(self, state: Mapping[str, Any]) -> dict[str, Any]:
        if not state:
            return {}
        found: dict[str, Any] = OrderedDict({_COUNT: self.n_averaged.clone()})
        for key, value in state.items():
            # Copy: the model's storages change when the weights are exchanged back.
            copied = value.detach().clone() if isinstance(value, torch.Tensor) else value
            found[key if key.startswith("_smp_") else _PREFIX + key] = copied
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> IncompatibleKeys:
        """Load averages from a whole state dict, which may be PyTorch's, or from `local_state_dict` of every rank.

        Args:
            state_dict: The state dict.
            strict: Whether missing and unexpected keys, counted over the whole model, are errors.

        Raises:
            RuntimeError: Shapes differ, or keys differ and `strict` is set. The message is that of PyTorch.
        """
        given = dict(state_dict)
        count = given.pop(_COUNT, None)
        if count is None and strict:
            raise RuntimeError(f"the state dict of an smp.AveragedModel has no key {_COUNT!r}")
        values = {key.removeprefix(_PREFIX): given[key] for key in given}
        with self._exchanged():
            before = versions(self.model.module)
            try:
                loaded = self.model.load_values(values, strict)
            except BaseException as error:
                if versions(self.model.module) != before:
                    self._in_part = str(error)
                raise
        self._in_part = None
        if count is not None:
            self.n_averaged = torch.as_tensor(count, dtype=torch.long).clone()
        return loaded
