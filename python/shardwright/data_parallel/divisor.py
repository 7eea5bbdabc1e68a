"""What a step's gradients are divided by, agreed on by the data-parallel ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch

from shardwright.data_parallel.collectives import ReplicaCollectives
from shardwright.data_parallel.shards import ParameterShards
from shardwright.data_parallel.weights import StepWeights
from shardwright.errors import ShardwrightError
from shardwright.job.objects import exchange_in_step
from shardwright.job.runtime import Runtime

#: What a data-parallel rank says of its step.
_ABSENT, _UNWEIGHTED, _WEIGHTED = 0, 1, 2
_CHANNEL = "weights"


#: By the id of a model, how many buckets of its gradients were sent during backward, over each group.
SentBuckets = Mapping[int, tuple[int, ...]]
#: By the id of a model, who takes part in the reduction of gradients over each group, which divided parameters do, and
#: how that changed last.
Trained = Mapping[int, tuple[tuple[str, str, str], str]]
#: By the id of a model, which buffers the first replica sends to the others, over each group, and their last change.
Buffers = Mapping[int, tuple[tuple[str, str], str]]


class _Reduced(Protocol):
    """How the gradients of a model are reduced, as :class:`~shardwright.data_parallel.replicas.Replicas` does it."""

    @property
    def sent_buckets(self) -> tuple[int, ...]: ...

    @property
    def trained(self) -> tuple[tuple[str, str, str], str]: ...

    @property
    def buffers(self) -> tuple[tuple[str, str], str]: ...


class ReducedModel(Protocol):
    """A model whose gradients are reduced."""

    @property
    def model_id(self) -> int:
        """Its id, the same on all ranks."""

    @property
    def replicas(self) -> _Reduced:
        """Its replicas."""


class Divisor(NamedTuple):
    """What this rank's gradients are divided by for the mean over microbatches.

    Attributes:
        value: The number of microbatches, or what makes the mean over all data-parallel ranks the weighted one.
        weighted: Whether weights were given.
        sent: Which gradients each data-parallel rank has sent during backward, before it divided them.
        hooked: Whether parameters have hooks on any data-parallel rank.
    """

    value: float
    weighted: bool
    sent: Mapping[int, SentBuckets]
    hooked: bool = False


class Note(NamedTuple):
    """What a data-parallel rank says at the end of a training step.

    Attributes:
        kind: Whether it ran the step, and with weights.
        total: The sum of its weights.
        sent: Which gradients it has sent during backward.
        trained: Whose gradients it reduces.
        buffers: Which buffers it has.
        hooked: Whether parameters have hooks.
    """

    kind: int
    total: float
    sent: SentBuckets
    trained: Trained
    buffers: Buffers
    hooked: bool = False


def agreed_divisor(runtime: Runtime, models: Sequence[ReducedModel], *, hooked: bool = False) -> Divisor:
    """What gradients are divided by, agreed on by the data-parallel ranks, which wait here for each other.

    Args:
        runtime: The rank.
        models: Those that take part in the step.
        hooked: Whether parameters have hooks on this rank.

    Raises:
        ShardwrightError: Some of the replicas gave weights, and others did not, or they train different parameters
            or have different buffers.
    """
    own = runtime[StepWeights].total
    if runtime[ReplicaCollectives].dp is None or not torch.is_grad_enabled():
        return Divisor(runtime.step.num_microbatches, False, {}) if own is None else Divisor(own or 1.0, True, {})
    sent = {one.model_id: numbers for one in models if any(numbers := one.replicas.sent_buckets)}
    trained = {one.model_id: one.replicas.trained for one in models}
    buffers = {one.model_id: one.replicas.buffers for one in models}
    kind = _UNWEIGHTED if own is None else _WEIGHTED
    notes = exchange(runtime, Note(kind, own or 0.0, sent, trained, buffers, hooked))
    all_sent = {rank: note.sent for rank, note in notes.items()}
    is_hooked = any(note.hooked for note in notes.values())
    present = [rank for rank, note in notes.items() if note.kind != _ABSENT]
    without = [rank for rank in present if notes[rank].kind == _UNWEIGHTED]
    if 0 < len(without) < len(present):
        raise ShardwrightError(
            f"step {runtime.step.number}: of the data-parallel ranks {present}, {without} called model.backward "
            "without a weight and the others with one; give weights on all of them or on none"
        )
    if without:
        return Divisor(runtime.step.num_microbatches, False, all_sent, is_hooked)
    # Where nothing counts, as where no sample has a label, the sum of gradients is zero, and so is the mean.
    total = math.fsum(note.total for note in notes.values())
    return Divisor(total / len(notes) or 1.0, True, all_sent, is_hooked)


def exchange(
    runtime: Runtime, own: Note | None = None, trained: Trained | None = None, buffers: Buffers | None = None
) -> dict[int, Note]:
    """Tell the data-parallel ranks this rank's note, or that it has no batch; returns those of all, by rank.

    By messages and not by a collective, whose place among those that backward has begun would differ from rank to rank.

    Raises:
        ShardwrightError: Ranks have different owners of parameters, to whom gradients are to be reduced, train
            different parameters, or have different buffers to broadcast.
    """
    digests = runtime[ParameterShards].digests
    note = Note(_ABSENT, 0.0, {}, trained or {}, buffers or {}) if own is None else own
    said = exchange_in_step(runtime, runtime.place.other_roots(), _CHANNEL, (digests, *note))
    said[runtime.place.rank] = (digests, *note)
    check_digests(runtime, {rank: theirs for rank, (theirs, *_) in said.items()})
    notes = {rank: Note(*said[rank][1:]) for rank in runtime.place.dp_ranks}
    _check_trained(runtime, {rank: each.trained for rank, each in notes.items()})
    _check_buffers(runtime, {rank: each.buffers for rank, each in notes.items()})
    return notes


def _check_trained(runtime: Runtime, trained: Mapping[int, Trained]) -> None:
    """Check that all ranks that hold the same parameters of a model, or parts of them, train the same ones."""
    place = runtime.place
    for model, others, told in _differing(place.rank, (place.dp_ranks, place.rdp_ranks, place.dp_ranks), trained):
        raise ShardwrightError(
            f"step {runtime.step.number}: all data-parallel ranks have to train the same parameters, from the "
            f"first pass of an accumulation to the optimizer's step, and those of model {model} differ between "
            f"rank {place.rank} and ranks {others}. Last trained: {told}. Freeze, unfreeze "
            "and replace parameters on all ranks alike"
        )


def _check_buffers(runtime: Runtime, buffers: Mapping[int, Buffers]) -> None:
    """Check that all ranks that hold the same buffers of a model, or parts of them, have the same ones."""
    place = runtime.place
    for model, others, told in _differing(place.rank, (place.dp_ranks, place.rdp_ranks), buffers):
        raise ShardwrightError(
            f"step {runtime.step.number}: the first data-parallel rank sends its buffers to the others before "
            f"each training step, so all of them have to have the same ones, and those of model {model} differ "
            f"between rank {place.rank} and ranks {others}. Last changed: {told}. Register "
            "and set buffers on all ranks alike, with the same shapes and dtypes, or wrap the model with "
            "broadcast_buffers=False"
        )


def _differing(
    here: int, groups: Sequence[Sequence[int]], said: Mapping[int, Mapping[int, tuple[tuple[str, ...], str]]]
) -> Iterator[tuple[int, list[int], str]]:
    """Yield each model of which ranks of a group say something else than this one, those ranks, and the last changes.

    Of a model a rank says one digest for each group, and its last change in words.
    """
    for model, (digests, _) in said[here].items():
        for number, ranks in enumerate(groups):
            having = [rank for rank in ranks if model in said[rank]]
            others = [rank for rank in having if said[rank][model][0][number] != digests[number]]
            if others:
                told = "; ".join(f"on rank {rank} {text}" for rank in having if (text := said[rank][model][1]))
                yield model, others, told or "as at first"


def check_digests(runtime: Runtime, digests: Mapping[int, tuple[str, str]]) -> None:
    """Check that data-parallel ranks have assigned the same owners.

    Raises:
        ShardwrightError: They have not.
    """
    same_part = [digests[rank][1] for rank in runtime.place.rdp_ranks]
    if len({over_dp for over_dp, _ in digests.values()}) > 1 or len({*same_part}) > 1:
        raise ShardwrightError(
            f"data-parallel ranks {runtime.place.dp_ranks} do not shard the same optimizers: with "
            "shard_optimizer_state, all of them have to create the same smp.DistributedOptimizers in the same order, "
            "with the same parameter groups"
        )
