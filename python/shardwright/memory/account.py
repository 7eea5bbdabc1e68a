"""The account of one rank: what it holds, and the peak of one step."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from shardwright import _core
from shardwright.activation_checkpointing.arguments import forget_most_kept, most_kept
from shardwright.execution.turn import Turn
from shardwright.memory.locked import locked_bytes
from shardwright.memory.optimizers import (
    distinct_bytes,
    expected_bytes,
    expected_gradient_bytes,
    expected_master_bytes,
    state_bytes,
    streamed_bytes,
)
from shardwright.model.models import Models
from shardwright.offloading import OffloadedActivations
from shardwright.optimizer.offloading import StateStorage, most_resident_bytes
from shardwright.optimizer.reach.known import Reach, known_reach
from shardwright.optimizer.sharding.elementwise import original_class
from shardwright.scheduling import RankMemory, Scheduling

if TYPE_CHECKING:
    from shardwright.execution.task import Phase
    from shardwright.job.runtime import Runtime

#: The names of the categories, in the order of reports.
CATEGORIES = ("parameters", "gradients", "optimizer_state", "activations", "buffers", "communication")
#: What is allocated to see whether the C library's heap grows by it.
_PROBE_BYTES = 1 << 22


@dataclass(frozen=True, kw_only=True)
class RankAccount:
    """The memory of one rank, in bytes.

    Attributes:
        rank: The global rank.
        pp_rank: Its rank in the pipeline.
        host: Its host.
        device: What its tensors are on, as text.
        predicted: Bytes by category; None where not known.
        measured: Likewise. Gradients and activations are those of one step: the most, between tasks.
        in_flight: The most microbatches in flight on it, as simulated.
        offloaded: The most bytes of activations that were offloaded at once.
        offloaded_optimizer_state: Bytes of optimizer state, and of master weights, on a disk or in locked host memory.
        device_memory: Of a device: ``allocated`` and ``reserved`` by PyTorch, ``peak`` of what was allocated, and
            ``transfers``, the transport's own buffer there; None on CPU ranks.
        locked: Bytes of host memory that are locked for devices: for transfers, offloading and checkpoints.
        resident: Of the process in host memory; None where the system does not tell.
        peak: The most that it had in host memory.
        limit: The least limit on the process's memory; None without one.
        advice: Settings that would save memory: setting, bytes, what it costs; the largest saving first.
    """

    rank: int
    pp_rank: int
    host: str
    device: str
    predicted: dict[str, int | None]
    measured: dict[str, int | None]
    in_flight: int
    offloaded: int
    offloaded_optimizer_state: int
    device_memory: dict[str, int] | None
    locked: int
    resident: int | None
    peak: int | None
    limit: int | None
    advice: list[tuple[str, int, str]]

    def to_dict(self) -> dict[str, Any]:
        """Convert to a dict of plain values."""
        return asdict(self)


class MemoryAccount:
    """Measures the first step that trains, and knows what the rank holds.

    Attributes:
        activations: The most bytes of activations in that step, between tasks; None before, and where the memory in
            use is not known.
        gradients: The bytes of gradients at the end of that step's tasks; None before.
    """

    def __init__(self, runtime: Runtime) -> None:
        """Start without a measurement."""
        self._runtime = runtime
        self._meter: _core.MemoryMeter | None = None
        self._trained = False
        self._is_over = False
        self.activations: int | None = None
        self.gradients: int | None = None

    # --- one step

    def begin_step(self) -> None:
        """Begin to measure, unless a step that trained has been measured."""
        if self._is_over or not torch.is_grad_enabled() or (in_use := self._in_use()) is None:
            return
        if not self._can_measure():
            self._is_over = True
            return
        self._trained = False
        forget_most_kept()
        self._meter = _core.MemoryMeter(in_use)
        self._runtime[Turn].observers.append(self)

    def begins(self, phase: Phase, microbatch: int) -> None:
        """See a task begin, or the backward of one."""
        self._trained |= phase == "backward"
        if self._meter is not None and (in_use := self._in_use()) is not None:
            self._meter.sample(in_use, phase == "backward")

    def placed(self) -> None:
        """Begin anew, since the rank has just released what others own."""
        if (in_use := self._in_use()) is not None:
            self._meter = _core.MemoryMeter(in_use)

    def end_tasks(self) -> None:
        """Take the measurement when the tasks of a step have ended well."""
        if self._meter is not None and self._trained and (in_use := self._in_use()) is not None:
            self.activations = self._meter.activations(in_use)
            self.gradients = _gradient_bytes(self._held()[0])
            self._is_over = True
        self.leave_step()

    def leave_step(self) -> None:
        """End the measurement, however the step ended."""
        self._meter = None
        observers = self._runtime[Turn].observers
        if self in observers:
            observers.remove(self)

    def _in_use(self) -> int | None:
        device = self._runtime.place.device
        if device.type == "cuda":
            return torch.cuda.memory_allocated(device)
        return _core.heap_bytes()

    def _can_measure(self) -> bool:
        """Whether torch allocates from what is measured: another allocator of host memory may have been preloaded."""
        if self._runtime.place.device.type == "cuda":
            return True
        before = _core.heap_bytes()
        held = torch.empty(_PROBE_BYTES, dtype=torch.uint8)
        after = _core.heap_bytes()
        del held
        return before is not None and after is not None and after - before >= _PROBE_BYTES // 2

    # --- what the rank holds

    def measured(self) -> _core.MemoryCategories:
        """Return what the rank holds now, and the gradients and activations of the measured step."""
        parameters, buffers = self._held()
        memory = _core.process_memory()
        optimizers = self._runtime[Models].optimizers
        return _core.MemoryCategories(
            parameters=distinct_bytes(parameters),
            gradients=_gradient_bytes(parameters) if self.gradients is None else self.gradients,
            optimizer_state=state_bytes(optimizers) - streamed_bytes(optimizers) if optimizers else None,
            activations=self.activations,
            buffers=distinct_bytes(buffers),
            communication=None if memory is None else memory[2],
        )

    def predicted(self, in_flight: int) -> _core.MemoryCategories:
        """Return what was expected: from the partition, the microbatches in flight and the class of the optimizer."""
        parameters, buffers = self._held()
        place, optimizers = self._runtime.place, self._runtime[Models].optimizers
        shards, slices = 1, dict[int, int]()
        if place.shards_optimizer_state:  # over DP_GROUP, in which TP_GROUPs hold slices of distributed modules
            shards = len(place.dp_ranks)
            for placement in self._runtime[Models].placements:
                over_rdp = placement.replicas.over_rdp(placement.owned_parameters())
                slices.update((id(parameter), len(place.tp_ranks)) for parameter in over_rdp)
        expected = expected_bytes(optimizers, slices) if optimizers else None
        masters = expected_master_bytes(optimizers, slices)
        if expected is not None and self._runtime.find(StateStorage) is not None:
            at_hand = most_resident_bytes(on_device=place.device.type == "cuda")
            expected, masters, shards = min((expected + masters) // shards, at_hand), 0, 1
        return _core.MemoryCategories.expected(
            parameter_bytes=distinct_bytes(parameters),
            gradient_bytes=expected_gradient_bytes(parameters),
            buffer_bytes=distinct_bytes(buffers),
            activation_bytes=self._activations_of_a_microbatch(),
            in_flight=in_flight,
            optimizer_bytes=expected,
            master_bytes=masters,
            optimizer_shards=shards,
        )

    def of_microbatches(self) -> RankMemory:
        """Return what a microbatch in flight keeps here, and what all may keep under ``memory_limit_bytes``."""
        limit, measured = self._runtime.place.cfg.memory_limit_bytes, self.measured()
        if self.activations is None:
            each = self._activations_of_a_microbatch() or 0
        else:
            each = self.activations // max(self.in_flight(), 1)
        if limit is None:
            return RankMemory(each, None)
        held = (measured.parameters, measured.gradients, measured.optimizer_state, measured.buffers)
        return RankMemory(each, max(limit - sum(bytes_ or 0 for bytes_ in held), 0))

    def in_flight(self) -> int:
        """Return the most microbatches in flight on this rank, as simulated: with equal stages, or measured ones."""
        place, decision = self._runtime.place, self._runtime[Scheduling].decision
        if decision is not None and decision.in_flight is not None:
            return decision.in_flight[place.pp_rank]
        counts = _core.in_flight(
            self._runtime[Scheduling].text, ranks=place.pp_size, microbatches=self._runtime.step.num_microbatches
        )
        return counts[place.pp_rank]

    def of_rank(self) -> RankAccount:
        """Return the account of this rank."""
        place, node = self._runtime.place, self._runtime.node
        in_flight = self.in_flight()
        predicted, measured = _by_category(self.predicted(in_flight)), _by_category(self.measured())
        best = {name: predicted[name] if measured[name] is None else measured[name] for name in CATEGORIES}
        advice = _core.MemoryCategories(**best).advice(
            place.cfg,
            in_flight=in_flight,
            microbatches=self._runtime.step.num_microbatches,
            replicas=len(place.dp_ranks),
            checkpointed=most_kept(),
            offloadable=self._offloadable(best["optimizer_state"] or 0),
            on_device=place.device.type == "cuda",
        )
        memory = _core.process_memory()
        return RankAccount(
            rank=place.rank,
            pp_rank=place.pp_rank,
            host=node.host(place.rank),
            device=str(place.device),
            predicted=predicted,
            measured=measured,
            in_flight=in_flight,
            offloaded=self._offloaded(),
            offloaded_optimizer_state=streamed_bytes(self._runtime[Models].optimizers),
            device_memory=self._device_memory(),
            locked=node.comm_stats()["locked_bytes"] + locked_bytes(),
            resident=None if memory is None else memory[0],
            peak=None if memory is None else memory[1],
            limit=_core.memory_limit(),
            advice=advice,
        )

    def _device_memory(self) -> dict[str, int] | None:
        device = self._runtime.place.device
        if device.type != "cuda":
            return None
        return {
            "allocated": torch.cuda.memory_allocated(device),
            "reserved": torch.cuda.memory_reserved(device),
            "peak": torch.cuda.max_memory_allocated(device),
            "transfers": self._runtime.node.comm_stats()["device_buffer_bytes"],
        }

    def _offloaded(self) -> int:
        offloaded = self._runtime.find(OffloadedActivations)
        return 0 if offloaded is None else offloaded.counts()["most_bytes"]

    def _offloadable(self, state: int) -> int:
        """Return how much of the optimizers' state would leave the memory that the rank computes in."""
        optimizers = self._runtime[Models].optimizers
        may_be = all(known_reach(original_class(one)) in (Reach.ELEMENT, Reach.PARAMETER) for one in optimizers)
        at_hand = most_resident_bytes(on_device=self._runtime.place.device.type == "cuda")
        return max(state - at_hand, 0) if may_be and self._runtime.find(StateStorage) is None else 0

    def _held(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        parameters: list[torch.Tensor] = []
        buffers: list[torch.Tensor] = []
        for placement in self._runtime[Models].placements:
            parameters += placement.owned_parameters()
            buffers += [
                buffer for module, name in placement.owned_buffers() if (buffer := module._buffers[name]) is not None
            ]
        return parameters, buffers

    def _activations_of_a_microbatch(self) -> int | None:
        """As the trace found them, of all models; None without a trace of each."""
        total = 0
        for placement in self._runtime[Models].placements:
            decision = None if placement.ownership is None else placement.ownership.decision
            loads = [] if decision is None else decision.report.get("devices", [])
            own = [load.get("activation_bytes") for load in loads if load["pp_rank"] == self._runtime.place.pp_rank]
            if not own or own[0] is None:
                return None
            total += own[0]
        return total


def _by_category(categories: _core.MemoryCategories) -> dict[str, int | None]:
    return {name: getattr(categories, name) for name in CATEGORIES}


def _gradient_bytes(parameters: list[torch.Tensor]) -> int:
    return distinct_bytes(p.grad for p in parameters if p.grad is not None)
