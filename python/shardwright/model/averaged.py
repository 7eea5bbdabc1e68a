"""``smp.AveragedModel``: averages of a divided model's weights, each rank keeping those of its own part."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.swa_utils import get_swa_multi_avg_fn

from shardwright.errors import ConfigError, ShardwrightError
from shardwright.execution.task import running_task
from shardwright.model.distributed import DistributedModel

if TYPE_CHECKING:
    from shardwright.model.state_dict import IncompatibleKeys

AverageOne = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
AverageMany = Callable[[list[torch.Tensor], list[torch.Tensor], torch.Tensor], Any]
_PREFIX = "module."
_COUNT = "n_averaged"


class AveragedModel:
    """What ``torch.optim.swa_utils.AveragedModel`` is for a whole model: running averages of its weights.

    Without a function all updates count alike (stochastic weight averaging); those of ``torch.optim.swa_utils``,
    such as ``get_ema_multi_avg_fn(0.999)`` for an exponential moving average, can be given as they are. Every rank
    keeps the averages of what it owns, so the ranks exchange nothing until a state dict is asked for.

    Attributes:
        model: The model whose weights are averaged.
        n_averaged: How many updates went into the averages.
    """

    def __init__(
        self,
        model: DistributedModel,
        *,
        avg_fn: AverageOne | None = None,
        multi_avg_fn: AverageMany | None = None,
        use_buffers: bool = False,
    ) -> None:
        """Begin with the weights as they are; the first update replaces them.

        Args:
            model: The model.
            avg_fn: ``avg_fn(averaged, current, n_averaged)``, the new average of one tensor.
            multi_avg_fn: ``multi_avg_fn(averaged, current, n_averaged)``, which updates lists of tensors in place.
            use_buffers: Average buffers too, instead of taking over their newest values.

        Raises:
            ConfigError: ``model`` is no ``smp.DistributedModel``, or both functions are given.
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
        self._take_over()

    def _pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Each average with what it is an average of; forgets what other ranks own since the model was divided."""
        pairs = []
        now: tuple[tuple[dict[str, torch.Tensor], Iterator[tuple[str, torch.Tensor]]], ...] = (
            (self._parameters, self.model.local_named_parameters()),
            (self._buffers, self.model.local_named_buffers()),
        )
        for averages, current in now:
            kept = {name: (averages.get(name), tensor) for name, tensor in current}
            averages.clear()
            for name, (average, tensor) in kept.items():
                averages[name] = tensor.detach().clone() if average is None else average
                pairs.append((averages[name], tensor))
        return pairs

    @torch.no_grad()
    def _take_over(self) -> None:
        for average, current in self._pairs():
            average.copy_(current)

    @torch.no_grad()
    def update_parameters(self) -> None:
        """Take the model's present weights into the averages; after an optimizer step, on every rank.

        Raises:
            ShardwrightError: Called in the code of a step.
        """
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
        """Let the model have the averaged weights within the block, for an evaluation; every rank does this.

        Nothing is copied. The trained weights and buffers are back afterwards; what a training step within the block
        changes would be lost.
        """
        pairs = self._pairs()
        self._exchange(pairs)
        try:
            yield self.model
        finally:
            self._exchange(pairs)

    @staticmethod
    def _exchange(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for average, current in pairs:
            average.data, current.data = current.data, average.data

    def local_state_dict(self) -> dict[str, Any]:
        """This rank's part of the averages, marked by ``_smp_is_partial``; nothing is sent."""
        with self.applied():
            return self._prefixed(self.model.local_state_dict())

    def state_dict(self, gather_to_rank0: bool = False) -> dict[str, Any]:
        """The averages of the whole model on the CPU, as ``torch.optim.swa_utils.AveragedModel`` has them.

        Every rank of the pipeline calls this.

        Args:
            gather_to_rank0: Give it to the first rank of the pipeline only, and ``{}`` to the others.
        """
        with self.applied():
            return self._prefixed(self.model.state_dict(gather_to_rank0))

    def _prefixed(self, state: Mapping[str, Any]) -> dict[str, Any]:
        if not state:
            return {}
        found: dict[str, Any] = OrderedDict({_COUNT: self.n_averaged.clone()})
        for key, value in state.items():
            # The values must not change with the model when the weights are exchanged back.
            copied = value.detach().clone() if isinstance(value, torch.Tensor) else value
            found[key if key.startswith("_smp_") else _PREFIX + key] = copied
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> IncompatibleKeys:
        """Load averages: a whole state dict, torch's own too, or what `local_state_dict` returned on every rank.

        Args:
            state_dict: The state dict.
            strict: Whether missing and unexpected keys, counted on the whole model, are errors.

        Raises:
            RuntimeError: In torch's words, if shapes differ, or keys do and `strict` is set.
        """
        given = dict(state_dict)
        count = given.pop(_COUNT, None)
        if count is None and strict:
            raise RuntimeError(f"the state dict of an smp.AveragedModel has no key {_COUNT!r}")
        with self.applied():
            loaded = self.model.load_state_dict({key.removeprefix(_PREFIX): given[key] for key in given}, strict)
        if count is not None:
            self.n_averaged = torch.as_tensor(count, dtype=torch.long).clone()
        return loaded
