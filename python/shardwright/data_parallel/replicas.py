"""Data parallelism of one model: equal weights at the start, averaged gradients after each step.

What is divided over tp ranks is equal, and averaged, over RDP_GROUP; everything else over DP_GROUP.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from shardwright.data_parallel.collectives import CHUNK_BYTES, Collectives, ReplicaCollectives
from shardwright.data_parallel.divisor import Divisor, exchange
from shardwright.data_parallel.participants import ModelPart
from shardwright.data_parallel.reducer import Reducer
from shardwright.data_parallel.shards import ParameterShards
from shardwright.data_parallel.sparse import reduce_sparse, sparse_parameters
from shardwright.data_parallel.taking_part import TakingPart
from shardwright.data_parallel.uneven import JoinState
from shardwright.errors import ShardwrightError
from shardwright.quantized import plain_tensors

T = TypeVar("T", bound=torch.Tensor)


class Replicas:
    """Keeps this rank's part of a model equal to that of the other data-parallel ranks."""

    def __init__(self, placement: ModelPart, options: dict[str, Any]) -> None:
        """Create it; communication begins with :meth:`join_group`."""
        self._placement = placement
        self._options = options
        #: Over DP_GROUP; None where it has one rank.
        self._reducer: Reducer | None = None
        #: Over RDP_GROUP, of distributed parameters; None where there are none, or it has one rank.
        self._rdp_reducer: Reducer | None = None
        self._comm_hook: tuple[Any, Callable[..., Any]] | None = None
        #: Parameters with sparse gradients, over DP_GROUP and over RDP_GROUP.
        self._sparse: tuple[list[nn.Parameter], list[nn.Parameter]] = ([], [])
        self._taking_part = TakingPart(placement)
        self._passes = 0
        self._average: bool = options["average_grads_across_microbatches"]
        #: Who still has batches, inside ``model.join()``.
        self.join_state: JoinState | None = None
        #: Whether means are over the whole group, also when some of its ranks have no batches left.
        self.divides_by_group = True

    def join_group(self) -> None:
        """Receive parameters and buffers of the first data-parallel rank, and start reducing gradients."""
        runtime = self._placement.runtime
        if len(runtime.place.dp_ranks) == 1:
            return
        parameters = self._placement.owned_parameters()
        self._equalise([*parameters, *self._buffers()])
        self._reducer = self._make_reducer(self._collectives, "")
        if self._placement.is_sharded and (over_rdp := runtime[ReplicaCollectives].rdp) is not None:
            self._rdp_reducer = self._make_reducer(over_rdp, ", distributed")
        self._begin_reducers(parameters, False)

    def equalise(self, tensors: list[torch.Tensor]) -> None:
        """Receive tensors that the model has got since from the first data-parallel rank."""
        if self._reducer is not None:
            self._equalise(tensors)

    def _make_reducer(self, collectives: Collectives, which: str) -> Reducer:
        reducer = Reducer(
            collectives,
            self._shards,
            f"model {self._placement.model_id}{which}",
            int(float(self._options["bucket_cap_mb"]) * 2**20),
            bool(self._options["overlapping_allreduce"]),
        )
        if self._comm_hook is not None:
            reducer.register_comm_hook(*self._comm_hook)
        return reducer

    @property
    def _shards(self) -> ParameterShards:
        return self._placement.runtime[ParameterShards]

    @property
    def _reducers(self) -> list[Reducer]:
        return [reducer for reducer in (self._reducer, self._rdp_reducer) if reducer is not None]

    @property
    def _collectives(self) -> Collectives:
        collectives = self._placement.runtime[ReplicaCollectives].dp
        assert collectives is not None, "there is a data-parallel group"
        return collectives

    def over_rdp(self, tensors: Sequence[T]) -> list[T]:
        """Select the tensors that are divided over tensor-parallel ranks."""
        if not self._placement.is_sharded:
            return []
        divided = self._placement.over_rdp
        return [tensor for tensor in tensors if id(tensor) in divided]

    def _divided(self, tensors: Sequence[T]) -> tuple[list[T], list[T]]:
        """Split tensors into those replicated over DP_GROUP and those replicated over RDP_GROUP."""
        over_rdp = self.over_rdp(tensors)
        ids = {id(tensor) for tensor in over_rdp}
        return [tensor for tensor in tensors if id(tensor) not in ids], over_rdp

    def _buffers(self) -> list[torch.Tensor]:
        found = (module._buffers[name] for module, name in self._placement.owned_buffers())
        return [buffer for buffer in found if buffer is not None]

    def _equalise(self, tensors: list[torch.Tensor], source: int | None = None) -> None:
        """Receive tensors from a data-parallel rank (by default the first), or from its counterpart in RDP_GROUP."""
        runtime = self._placement.runtime
        over_dp, over_rdp = self._divided(tensors)
        first = runtime.place.dp_ranks[0] if source is None else source
        self._broadcast(over_dp, first, self._collectives)
        if over_rdp and (collectives := runtime[ReplicaCollectives].rdp) is not None:
            topology = runtime.place.topology
            replica = set(topology.group("TP_GROUP", first))
            same = next((rank for rank in runtime.place.rdp_ranks if rank in replica), runtime.place.rdp_ranks[0])
            self._broadcast(over_rdp, same, collectives)

    @staticmethod
    def _broadcast(tensors: list[torch.Tensor], source: int, collectives: Collectives) -> None:
        """Broadcast tensors from one rank, several of a dtype at once."""
        lists: list[list[torch.Tensor]] = []
        open_lists: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        filled: dict[tuple[torch.dtype, torch.device], int] = {}
        for tensor in [part.data for whole in tensors for part in plain_tensors(whole)]:
            kind = (tensor.dtype, tensor.device)
            if kind not in open_lists or filled[kind] + tensor.nbytes > CHUNK_BYTES:
                open_lists[kind] = []
                filled[kind] = 0
                lists.append(open_lists[kind])
            open_lists[kind].append(tensor)
            filled[kind] += tensor.nbytes
        with torch.no_grad():
            for together in lists:
                flat = torch.cat([tensor.reshape(-1) for tensor in together])
                collectives.broadcast(flat, source)
                for tensor, part in zip(together, torch.split(flat, [t.numel() for t in together]), strict=True):
                    tensor.copy_(part.view(tensor.shape))

    @property
    def averages_microbatches(self) -> bool:
        """Whether the library averages gradients over microbatches; a communication hook does so itself."""
        return self._average and self._comm_hook is None

    def register_comm_hook(self, state: Any, hook: Callable[..., Any]) -> None:
        """Reduce gradients over data-parallel ranks with a hook."""
        self._comm_hook = (state, hook)
        for reducer in self._reducers:
            reducer.register_comm_hook(state, hook)

    @property
    def is_accumulating(self) -> bool:
        """Whether gradients of earlier steps are still to be reduced."""
        return self._passes % int(self._options["backward_passes_per_step"]) != 0

    @property
    def _reduces_this_step(self) -> bool:
        return (self._passes + 1) % int(self._options["backward_passes_per_step"]) == 0

    def begin_step(self, may_overlap: bool) -> bool:
        """Prepare for the gradients of a step.

        With ``may_overlap``, gradients may be reduced while backward runs: they become the parameters' gradients as
        they are, and no other model's are reduced then. The order of collectives is the same on all ranks. Returns
        whether they may be, still.
        """
        if self._reducer is None:
            return False
        if self.join_state is not None:
            self.join_state.begin_own_step()
        if torch.is_grad_enabled():
            self._share_buffers()
        may_overlap = may_overlap and self._reduces_this_step
        return self._begin_reducers(self._placement.replicated_parameters(), may_overlap)

    def _begin_reducers(self, parameters: list[nn.Parameter], may_overlap: bool) -> bool:
        sparse = set() if self._comm_hook is not None else sparse_parameters(self._placement.module)
        shardings = self._placement.sharded.by_id() if self._placement.is_sharded else {}
        over_dp, rest = self._taking_part.begin_pass(parameters, shardings)
        self._sparse = [one for one in over_dp if id(one) in sparse], [one for one in rest if id(one) in sparse]
        dense = [[one for one in part if id(one) not in sparse] for part in (over_dp, rest)]
        began = [
            reducer.begin_step(part, may_overlap)
            for reducer, part in zip((self._reducer, self._rdp_reducer), dense, strict=True)
            if reducer is not None
        ]
        return any(began)

    def leave_shards(self) -> None:
        """Forget parameters that shards have taken the place of, in whose memory nobody computes any more."""
        if self._reducer is not None:
            left = self._placement.replicated_parameters()
            self._taking_part.forget_others(left)
            self._begin_reducers(left, False)

    @property
    def trained(self) -> tuple[tuple[str, str, str], str]:
        """Who takes part in the reduction of gradients, in a form that ranks compare, and how that changed last."""
        return self._taking_part.digests, self._taking_part.changes

    def check_gradients(self) -> None:
        """Check that all gradients of the step are to be reduced.

        Raises:
            ShardwrightError: One is that of a parameter which was frozen when the step began.
        """
        if self._reducer is not None and torch.is_grad_enabled():
            self._taking_part.check()

    def _share_buffers(self) -> None:
        if self._options["broadcast_buffers"]:
            source = None if self.join_state is None else self.join_state.active_ranks[0]
            self._equalise(self._buffers(), source)

    @property
    def sent_buckets(self) -> tuple[int, ...]:
        """How many buckets were sent during backward, over DP_GROUP and over RDP_GROUP."""
        return tuple(reducer.sent for reducer in self._reducers)

    def abandon_step(self) -> None:
        """Discard the gradients of a failed step."""
        for reducer in self._reducers:
            reducer.abandon_step()

    def average_for_hooks(self) -> None:
        """Average the step's gradients over data-parallel ranks, so that hooks of parameters see the mean."""
        if self._reducer is not None and torch.is_grad_enabled():
            number = len(self._placement.runtime.place.dp_ranks)
            self._reducer.average_for_hooks(number)
            reduce_sparse(self._sparse[0], self._collectives, number)

    def reduce_gradients(self, divisor: Divisor) -> None:
        """Average gradients over data-parallel ranks, in every ``backward_passes_per_step``-th training step.

        The step's gradients were divided by ``divisor``; those that were sent during backward are still to be.
        """
        if self._reducer is None:
            return
        if not torch.is_grad_enabled():
            return
        if self._reduces_this_step:
            runtime = self._placement.runtime
            # Who is gone has weight 0, if there are weights.
            everyone = self.join_state is None or self.divides_by_group or divisor.weighted
            present = runtime.place.dp_ranks if everyone or self.join_state is None else self.join_state.active_ranks
            as_views = bool(self._options["gradient_as_bucket_view"])
            sent_divisor = divisor.value if self.averages_microbatches else 1
            sent = self._sent_anywhere(divisor)
            self._reducer.reduce(len(present), sent_divisor, as_views, sent[0])
            reduce_sparse(self._sparse[0], self._collectives, len(present))
            self._leave_to_owners(self._sparse[0])
            if self._rdp_reducer is not None:
                present = [rank for rank in present if rank in runtime.place.rdp_ranks]
                sent_divisor *= runtime.place.tensor_divisor
                self._rdp_reducer.reduce(max(1, len(present)), sent_divisor, as_views, sent[1])
                collectives = runtime[ReplicaCollectives].rdp
                assert collectives is not None, "there is a reducer over it"
                reduce_sparse(self._sparse[1], collectives, max(1, len(present)))
                self._leave_to_owners(self._sparse[1])

    def _sent_anywhere(self, divisor: Divisor) -> list[int]:
        """The most buckets that any rank has sent during backward, for each reducer."""
        model = self._placement.model_id
        return [
            max(divisor.sent.get(rank, {}).get(model, (0, 0))[number] for rank in reducer.ranks)
            for number, reducer in enumerate(self._reducers)
        ]

    def _leave_to_owners(self, parameters: Sequence[nn.Parameter]) -> None:
        for parameter in parameters:
            rank = self._placement.runtime.place.rank
            if self._shards.of(parameter) is not None and self._shards.own(parameter, rank) is None:
                parameter.grad = None

    def sharded_earlier(self, parameter: nn.Parameter, gradient: torch.Tensor) -> bool | None:
        """Whether a gradient from before a step is added to what the step's reduction gives, since it is reduced.

        Returns:
            None if it is reduced with the step's gradients, as that of a parameter without owners is; else whether this
            rank is one of the owners.

        Raises:
            ShardwrightError: The gradient is not what a reduction leaves on this rank.
        """
        if self._reducer is None or self._shards.of(parameter) is None:
            return None
        runtime, passes = self._placement.runtime, int(self._options["backward_passes_per_step"])
        if self.is_accumulating:
            return None
        is_owner = self._shards.own(parameter, runtime.place.rank) is not None
        if torch.is_grad_enabled() and (passes > 1 or not is_owner) and bool((gradient.detach() != 0).any()):
            where = f"step {runtime.step.number} begins on rank {runtime.place.rank} with gradients"
            if is_owner:
                raise ShardwrightError(
                    f"{where} of the last reduction, and accumulates others over backward_passes_per_step={passes} "
                    "steps; with shard_optimizer_state other ranks do not have them: call model.zero_grad() after "
                    f"every {passes} steps, or use a larger backward_passes_per_step"
                )
            raise ShardwrightError(
                f"{where} of parameters whose optimizer state is on other ranks (shard_optimizer_state), so that no "
                "step can have reduced them: call model.zero_grad(), which reaches parameters outside the optimizer's "
                "groups too, and run every forward and backward pass in the step function"
            )
        return is_owner if passes == 1 else None

    def end_step(self) -> None:
        """Count a successful step."""
        if self._reducer is not None and torch.is_grad_enabled():
            self._passes += 1
            self._taking_part.end_pass(is_reduced=not self.is_accumulating)

    def step_without_batch(self) -> None:
        """Take part in the collectives of a training step without a batch; contributes zeros."""
        parameters = self._placement.owned_parameters()
        kept = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        assert self._reducer is not None, "only data-parallel ranks wait for each other"
        self._share_buffers()
        self._begin_reducers(parameters, False)
        said = exchange(self._placement.runtime, trained={self._placement.model_id: self.trained})
        self.reduce_gradients(Divisor(1, False, {rank: note.sent for rank, note in said.items()}))
        for parameter, gradient in zip(parameters, kept, strict=True):
            parameter.grad = gradient

    def take_over_from(self, rank: int) -> None:
        """Receive parameters and buffers from a rank that trained longest."""
        self._equalise([*self._placement.owned_parameters(), *self._buffers()], rank)
