"""Averaging gradients over the data-parallel group, overlapped with the end of backward."""

from __future__ import annotations

import functools
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from shardwright.data_parallel.bucket import GradBucket, make_buckets
from shardwright.data_parallel.collectives import WINDOW_BYTES, Collectives
from shardwright.data_parallel.shard_bucket import ShardBucket, make_shard_buckets
from shardwright.data_parallel.shards import ParameterShards

CommHook = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]


class Reducer:
    """Averages the gradients of one rank's parameters over its data-parallel group.

    Buckets are sent in one fixed order. A bucket may be sent while backward still runs, once each of its parameters
    got as many gradients as in the last step. That is a guess: if another gradient follows, or a parameter was
    without one, the ranks see it when they compare notes at the end, and reduce that bucket again. So the result
    never depends on the guess. A parameter without a gradient on this rank contributes zero as long as any rank has
    one, and keeps none otherwise.

    The gradient of a parameter with owners is averaged on these only, and None elsewhere.

    A bucket has memory from when it is filled until its sums are handed out, and only so many are on their way at once.
    Those that are sent during backward are kept until it has ended, unless the sums belong to another rank.

    Attributes:
        sent: How many buckets were sent during the backward of this step.
    """

    def __init__(
        self, collectives: Collectives, shards: ParameterShards, name: str, bucket_bytes: int, overlap: bool
    ) -> None:
        """Create a reducer over a group, with buckets of at most ``bucket_bytes``, given the owners of parameters.

        The ``name`` is the same on all ranks. With ``overlap``, buckets may be sent during backward.
        """
        self._collectives = collectives
        self._shards = shards
        self._shards_version = 0
        self._name = name
        self._bucket_bytes = bucket_bytes
        self._overlap = overlap
        self._hook: tuple[Any, CommHook] | None = None
        self._buckets: list[GradBucket] = []
        self._parameters: list[nn.Parameter] = []
        self._buckets_of: dict[nn.Parameter, list[GradBucket]] = {}
        self._counts: Counter[nn.Parameter] = Counter()
        self._expected: Counter[nn.Parameter] = Counter()
        self._ready: set[int] = set()
        self.sent = 0
        self._listening = False

    @property
    def ranks(self) -> list[int]:
        """The global ranks of the group."""
        return self._collectives.ranks

    def register_comm_hook(self, state: Any, hook: CommHook) -> None:
        """Reduce buckets with ``hook(state, bucket)``, which must average over ranks and microbatches."""
        self._hook = (state, hook)

    def begin_step(self, parameters: Iterable[nn.Parameter], may_overlap: bool) -> bool:
        """Begin a step with parameters of this rank that take part in it.

        With ``may_overlap``, gradients may be reduced while backward runs. Returns whether they will be, where
        possible.
        """
        wanted = list(parameters)
        if (
            self._shards_version != self._shards.version
            or len(wanted) != len(self._parameters)
            or any(a is not b for a, b in zip(wanted, self._parameters, strict=True))
        ):
            self._parameters = wanted
            self._make_buckets()
            self._expected.clear()
            if self._overlap:
                self._listen()
        self._counts.clear()
        self._ready.clear()
        self.sent = 0
        self._listening = self._overlap and may_overlap
        for bucket in self._buckets:
            bucket.clear()
            if self._hook is not None:
                self._collectives.offer_hook(self._hook_name(bucket), functools.partial(self._run_hook, bucket))
        return self._listening and bool(self._parameters)

    def _make_buckets(self) -> None:
        self._shards_version = self._shards.version
        sharded = [parameter for parameter in self._parameters if self._shards.of(parameter) is not None]
        known = set(sharded)
        buckets = make_buckets([one for one in self._parameters if one not in known], self._bucket_bytes)
        self._buckets = [*buckets, *make_shard_buckets(sharded, self._shards, self._bucket_bytes, len(buckets))]
        self._buckets_of = {}
        for bucket in self._buckets:
            for parameter in bucket.parameters():
                self._buckets_of.setdefault(parameter, []).append(bucket)

    def _hook_name(self, bucket: GradBucket) -> str:
        return f"hook of bucket {bucket.index()} of {self._name}"

    def _run_hook(self, bucket: GradBucket, buffer: torch.Tensor) -> Any:
        assert self._hook is not None, "offered only with a hook"
        bucket.set_buffer(buffer)
        return self._hook[1](self._hook[0], bucket)

    def _listen(self) -> None:
        for parameter in self._parameters:
            hooks = (parameter._post_accumulate_grad_hooks or {}).values()
            listens = any(isinstance(hook, GradientListener) and hook.reports_to(self) for hook in hooks)
            if parameter.requires_grad and not listens:
                parameter.register_post_accumulate_grad_hook(GradientListener(self))  # type: ignore[no-untyped-call]

    def accumulated(self, parameter: nn.Parameter) -> None:
        """Handle the accumulation of a gradient."""
        self._counts[parameter] += 1
        if not self._listening:
            return
        for bucket in self._buckets_of.get(parameter, ()):
            if bucket.index() < self.sent:
                bucket.late = True
            elif all(0 < self._expected[p] <= self._counts[p] for p in bucket.parameters()):
                self._ready.add(bucket.index())
        while self.sent < len(self._buckets) and self.sent in self._ready:
            self._release_through()
            self._send(self._buckets[self.sent])
            self.sent += 1

    def _release_through(self) -> None:
        """Free the memory of what other ranks own and have got during backward."""
        for bucket in self._buckets[: self.sent]:
            if not self._is_own(bucket) and bucket.work is not None and bucket.work.is_completed():
                self._await(bucket, 1)
                bucket.release()

    def _is_own(self, bucket: GradBucket) -> bool:
        """Whether this rank gets the sums of a bucket."""
        return not isinstance(bucket, ShardBucket) or bucket.owner == self._collectives.own_rank

    def _send(self, bucket: GradBucket) -> None:
        bucket.fill()
        if self._hook is not None:
            bucket.work = self._collectives.run_hook(self._hook_name(bucket), bucket.buffer())
        else:
            bucket.work = bucket.start(self._collectives)

    def gradient_counts(self) -> Counter[nn.Parameter]:
        """The number of gradients of each parameter in the last step, expected of the next one too."""
        return self._expected.copy()

    def expect(self, gradient_counts: Counter[nn.Parameter]) -> None:
        """Expect these numbers of gradients of the next step, instead of those of the last one."""
        self._expected = gradient_counts

    def abandon_step(self) -> None:
        """Discard the reductions of a failed step."""
        self._listening = False
        for bucket in self._buckets:
            bucket.clear()

    def average_for_hooks(self, num_ranks: int) -> None:
        """Average gradients, of which nothing was sent, before hooks see them; `reduce` leaves means as they are."""
        if not self._parameters:
            return
        used, _ = self._compare_notes([])
        for parameter in self._parameters:
            if parameter in used:
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                mean = gradient.to_dense().contiguous() if gradient.is_sparse else gradient.contiguous()
                self._collectives.wait(self._collectives.sum(mean))
                parameter.grad = mean.div_(num_ranks)

    def reduce(self, num_ranks: int, sent_divisor: float, as_views: bool, sent_anywhere: int) -> None:
        """Average ``.grad`` of the parameters over the group, as views of their buckets if ``as_views``.

        Sums are divided by ``num_ranks``, and what was sent during backward also by ``sent_divisor``, for the mean over
        microbatches. The first ``sent_anywhere`` buckets were sent during backward on one of the ranks at least.
        """
        if not self._parameters:
            return
        self._listening = False
        self._expected = self._counts.copy()
        first, rest = self._buckets[:sent_anywhere], self._buckets[sent_anywhere:]
        for bucket in first[self.sent :]:
            self._send(bucket)
        used, again = self._compare_notes(first)
        # Of these the gradients are needed until it is known that they need not be sent again; of the rest not.
        to_read = Counter(one for bucket in self._buckets for one in bucket.parameters())
        for bucket in first:
            self._await(bucket, num_ranks * (sent_divisor if bucket.index() < self.sent else 1))
            if bucket in again:
                self._send(bucket)
                self._await(bucket, num_ranks)
            self._was_read(bucket, to_read)
            self._hand_out(bucket, used, as_views)
        under_way: deque[tuple[GradBucket, int]] = deque()
        for bucket in rest:
            self._send(bucket)
            self._was_read(bucket, to_read)
            under_way.append((bucket, bucket.buffer().nbytes))
            while sum(nbytes for _, nbytes in under_way) > WINDOW_BYTES:
                self._end(under_way.popleft()[0], num_ranks, used, as_views)
        for bucket, _ in under_way:
            self._end(bucket, num_ranks, used, as_views)
        for bucket in self._buckets:
            if isinstance(bucket, ShardBucket) and self._is_own(bucket):
                bucket.hand_out(used, as_views)
                bucket.release()

    def _compare_notes(self, first: list[GradBucket]) -> tuple[set[nn.Parameter], list[GradBucket]]:
        """Find parameters with a gradient on any rank, and those of the first buckets that any rank sent too early."""
        flags = [p.grad is not None for p in self._parameters]
        # Elsewhere at the end, and scaled already: the sums do not belong together.
        spoiled = [bucket.late or bucket.index() >= self.sent for bucket in first]
        notes = torch.tensor([*flags, *spoiled], dtype=torch.uint8, device=self._parameters[0].device)
        self._collectives.maximum(notes)
        anywhere = [bool(flag) for flag in notes.tolist()]
        used = {p for p, flag in zip(self._parameters, anywhere, strict=False) if flag}
        return used, [bucket for bucket, bad in zip(first, anywhere[len(flags) :], strict=True) if bad]

    def _await(self, bucket: GradBucket, divisor: float) -> None:
        if bucket.work is None:  # others own it, and have got it
            return
        if self._hook is not None:
            value = bucket.work.wait()
            bucket.set_buffer(value[0] if isinstance(value, (list, tuple)) else value)
        else:
            self._collectives.wait(bucket.work)
            if self._is_own(bucket):
                bucket.buffer().div_(divisor)

    def _end(self, bucket: GradBucket, num_ranks: int, used: set[nn.Parameter], as_views: bool) -> None:
        self._await(bucket, num_ranks)
        self._hand_out(bucket, used, as_views)

    def _hand_out(self, bucket: GradBucket, used: set[nn.Parameter], as_views: bool) -> None:
        """Make the sums of a bucket its gradients and free it. Those of which ranks own parts are left to the end."""
        if not isinstance(bucket, ShardBucket):
            bucket.hand_out(used, as_views)
        if not isinstance(bucket, ShardBucket) or not self._is_own(bucket):
            bucket.release()

    @staticmethod
    def _was_read(bucket: GradBucket, to_read: Counter[nn.Parameter]) -> None:
        """Drop the gradients of parameters with owners that no further bucket is filled from."""
        for parameter in bucket.parameters():
            to_read[parameter] -= 1
            if not to_read[parameter] and isinstance(bucket, ShardBucket):
                parameter.grad = None


class GradientListener:
    """The hook that notifies a reducer of gradients; not a user hook."""

    def __init__(self, reducer: Reducer) -> None:
        """Report to a reducer, for as long as it lives."""
        # It knows the parameter, whose hooks torch keeps where no garbage collection sees them.
        self._reducer = weakref.ref(reducer)

    def reports_to(self, reducer: Reducer) -> bool:
        """Whether it notifies this reducer."""
        return self._reducer() is reducer

    def __call__(self, parameter: nn.Parameter) -> None:
        """The parameter's gradient was accumulated."""
        reducer = self._reducer()
        if reducer is not None:
            reducer.accumulated(parameter)
