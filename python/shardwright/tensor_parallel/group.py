"""A tensor-parallel group: the ranks that divide modules among them, and their collectives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from shardwright.errors import ConfigError
from shardwright.job.runtime import current_runtime
from shardwright.tensor_parallel.agreement import Agreement, Rule, Signature, check
from shardwright.tensor_parallel.back_ends import BackEnd
from shardwright.tensor_parallel.back_ends.process_group import ByProcessGroup
from shardwright.tensor_parallel.packing import Pending, Shape, num_bytes, pack, resized, sum_in_order, unpack
from shardwright.tensor_parallel.shape_exchange import ShapeExchange


@dataclass
class Count:
    """The number of collectives of a kind, and the bytes that this rank sent, if algorithms send the minimum."""

    number: int = 0
    num_bytes: int = 0


class TensorGroup:
    """The ranks that divide modules among them (TP_GROUP), with the collectives that implement the primitives.

    These collectives are not differentiable; those of ``communicators`` are. They accept tensors with any strides and
    several tensors at once, and return new tensors. Sizes along a dim may differ between ranks: the caller passes the
    sizes of all ranks, known from :meth:`agree` or from the calling module.

    Attributes:
        size: The number of ranks, the tensor parallelism degree.
        rank: The calling rank's index in the group, its tp rank.
        optimize: How transformer layers are divided (paper, appendix F): ``"speed"`` or ``"memory"``.
        prescaled_batch: Whether all ranks have the same samples, so that nothing is gathered (paper, appendix I.1).
        counts: What was sent, by kind: ``"all_gather"``, ``"reduce_scatter"``, ``"all_to_all"``, ``"all_reduce"``,
            ``"agree"`` for shapes, and ``"as_before"`` for unchanged shapes.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        *,
        optimize: str = "memory",
        prescaled_batch: bool = False,
        back_end: BackEnd | None = None,
        host: BackEnd | None = None,
        enter: Callable[[str], None] | None = None,
    ) -> None:
        """Create a tensor-parallel group from a process group.

        Args:
            process_group: The group; None for one rank.
            back_end: The backend that runs the collectives; by default the process group.
            host: The backend for the exchange of metadata in CPU tensors, which waits for no device. By default
                ``back_end``, with tensors on the device that it needs.
            enter: Called with a description of what the ranks are about to agree on, before this rank waits.
        """
        if process_group is not None and dist.get_rank(process_group) < 0:
            raise ConfigError("the process group of a TensorGroup has to contain the calling rank")
        self.size = 1 if process_group is None else dist.get_world_size(process_group)
        self.rank = 0 if process_group is None else dist.get_rank(process_group)
        self.optimize = optimize
        self.prescaled_batch = prescaled_batch
        self.counts: dict[str, Count] = {}
        self._process_group = process_group
        self._enter = enter
        self._back_end = back_end
        if back_end is None and process_group is not None:
            self._back_end = ByProcessGroup(process_group)
        self._host = host
        self._shapes = ShapeExchange(self._exchange_blocks, self.size, self.rank, remembers=host is not None)

    def __deepcopy__(self, memo: object) -> TensorGroup:
        """Return the group itself: copies of a module share its group, as copies of tensors share their device."""
        return self

    def as_first(self, flag: bool) -> bool:
        """Return the flag of the group's first rank, for decisions that must be the same on all ranks."""
        return flag if self.size == 1 else self._exchange_blocks("agree", bytes([flag]))()[0] == b"\1"

    def begin_step(self) -> None:
        """Begin a step."""
        for each in self._back_ends:
            each.begin_step()

    def abandon_step(self) -> None:
        """Abandon a step that has failed on all ranks of the group."""
        self._shapes.forget()
        for each in self._back_ends:
            each.abandon_step()

    @property
    def unfinished(self) -> list[Any]:
        """Return the objects that must not be destroyed yet, because other ranks may still wait for them."""
        return [one for each in self._back_ends for one in each.unfinished]

    @property
    def _back_ends(self) -> list[BackEnd]:
        return list(dict.fromkeys(each for each in (self._back_end, self._host) if each is not None))

    def meet(self, place: str) -> None:
        """Check that all ranks have reached the same place in the step function; else all of them raise an error."""
        if self.size > 1:
            if self._enter is not None:
                self._enter(place)
            rule = Rule(place)
            self._shapes.exchange(rule, Signature.of(rule, [torch.empty(0)]))

    def end_step(self) -> None:
        """Read the messages of the step that this rank has not waited for.

        If one rank assumed unchanged shapes in a call and another one did not, both raise :class:`ConfigError`.
        """
        self._shapes.catch_up()

    def agree(
        self,
        rule: Rule,
        tensors: Sequence[torch.Tensor],
        parameters_need_grad: bool = False,
        seed: int = 0,
        known: bool = False,
    ) -> Agreement:
        """Exchange shapes and dtypes of tensors with all ranks, by one small all-gather; returns the signatures of all.

        If nothing may differ between ranks, a call with the same shapes as the last one does not wait
        (``shape_exchange.py``). If the signatures do not match, all ranks raise :class:`ConfigError`.

        Args:
            rule: The requirements of the collective that follows.
            tensors: This rank's tensors for the collective.
            parameters_need_grad: Whether a parameter of this rank's part of the module needs a gradient.
            seed: A random number drawn by this rank, if the ranks need a common one.
            known: Whether the caller knows that all ranks have the same signature; nothing is sent then.
        """
        own = Signature.of(rule, tensors, parameters_need_grad, seed)
        if known or self.size == 1:
            agreement = Agreement((own,) * self.size)
            check(rule, agreement, self.size)
            return agreement
        if self._enter is not None:
            self._enter(rule.operation)
        return self._shapes.agree(rule, own)

    def all_gather(
        self, tensors: Sequence[torch.Tensor], dims: Sequence[int], sizes: Sequence[Sequence[int]]
    ) -> Pending[list[torch.Tensor]]:
        """Concatenate the tensors of all ranks along a dim each, in the order of tp ranks.

        Dims are not negative, and ``sizes`` are every tp rank's along them. The tensors must not change before the end.
        """
        dtypes = [tensor.dtype for tensor in tensors]
        shapes = [
            [resized(tensor.shape, dim, of[rank]) for tensor, dim, of in zip(tensors, dims, sizes, strict=True)]
            for rank in range(self.size)
        ]
        lengths = [num_bytes(theirs, dtypes) for theirs in shapes]
        own = pack(tensors)
        if len(tensors) == 1 and dims[0] == 0:  # the parts are adjacent, as in the result
            whole = torch.empty(resized(tensors[0].shape, 0, sum(sizes[0])), dtype=dtypes[0], device=own.device)
            gathering = self._gather(own, lengths, whole.view(-1).view(torch.uint8))

            def finish_in_place() -> list[torch.Tensor]:
                gathering()
                return [whole]

            return finish_in_place
        gathered = self._gather(own, lengths)

        def finish() -> list[torch.Tensor]:
            parts = [unpack(piece, of, dtypes) for piece, of in zip(gathered(), shapes, strict=True)]
            return [torch.cat([part[i] for part in parts], dim) for i, dim in enumerate(dims)]

        return finish

    def reduce_scatter(
        self, tensors: Sequence[torch.Tensor], dims: Sequence[int], sizes: Sequence[Sequence[int]]
    ) -> Pending[list[torch.Tensor]]:
        """Sum tensors, of the same shapes on all ranks, and keep this rank's slice of the sum, along a dim of each.

        Slices, of ``sizes`` for the tp ranks, are sent by an all-to-all; then each rank adds the slices that it
        receives, in the order of tp ranks, half precision in single. Dims are not negative. The tensors must not change
        before the end.
        """
        shapes = [
            resized(tensor.shape, dim, of[self.rank]) for tensor, dim, of in zip(tensors, dims, sizes, strict=True)
        ]
        exchanged = self._exchange("reduce_scatter", _slices(tensors, dims, sizes), [shapes] * self.size)

        def finish() -> list[torch.Tensor]:
            parts = exchanged()
            return [sum_in_order([part[i] for part in parts]) for i in range(len(tensors))]

        return finish

    def all_to_all(
        self,
        tensors: Sequence[torch.Tensor],
        split_dims: Sequence[int],
        merge_dims: Sequence[int],
        split_sizes: Sequence[Sequence[int]],
        merge_sizes: Sequence[Sequence[int]],
    ) -> list[torch.Tensor]:
        """Send the j-th slice of each tensor to tp rank j, and concatenate the slices received.

        Args:
            tensors: This rank's tensors, of shape [..., sum of split sizes, ..., merge size of this rank, ...].
            split_dims: For each tensor, the dim that is sliced, not negative.
            merge_dims: For each tensor, the dim along which slices are concatenated, not negative.
            split_sizes: For each tensor, the sizes of the slices, the same on all ranks.
            merge_sizes: For each tensor, every tp rank's size along its merge dim.
        """
        kept = [
            resized(tensor.shape, dim, of[self.rank])
            for tensor, dim, of in zip(tensors, split_dims, split_sizes, strict=True)
        ]
        shapes = [
            [resized(shape, dim, of[rank]) for shape, dim, of in zip(kept, merge_dims, merge_sizes, strict=True)]
            for rank in range(self.size)
        ]
        parts = self._exchange("all_to_all", _slices(tensors, split_dims, split_sizes), shapes)()
        return [torch.cat([part[i] for part in parts], dim) for i, dim in enumerate(merge_dims)]

    def all_reduce(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Sum the tensors of all ranks, with one collective per dtype; sums are bitwise identical on all ranks.

        The backend rounds half precision at every addition.
        """
        sums: dict[int, torch.Tensor] = {}
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            of_dtype = [i for i, tensor in enumerate(tensors) if tensor.dtype == dtype]
            if len(of_dtype) == 1:
                sums[of_dtype[0]] = self._sum(tensors[of_dtype[0]].detach())
                continue
            summed = self._sum(pack([tensors[i] for i in of_dtype]).view(dtype))
            for i, part in zip(of_dtype, torch.split(summed, [tensors[i].numel() for i in of_dtype]), strict=True):
                sums[i] = part.view(tensors[i].shape).clone()  # not a view: writes to one must not change others
        return [sums[i] for i in range(len(tensors))]

    def start_all_reduce(self, tensor: torch.Tensor) -> Pending[torch.Tensor]:
        """Start to sum a floating tensor over ranks, in place if contiguous; the caller must not use it any more."""
        total = tensor.detach().contiguous()
        if self._back_end is None:
            return lambda: total
        self._count("all_reduce", 2 * (self.size - 1) * total.numel() * total.dtype.itemsize // self.size)
        return self._back_end.all_reduce(total)

    def _exchange_blocks(self, kind: str, block: bytes) -> Pending[list[bytes]]:
        """Start to exchange a block of bytes, of the same size on all ranks, with all ranks."""
        carrier = self._host or self._back_end
        assert carrier is not None
        own = torch.frombuffer(bytearray(block), dtype=torch.uint8)
        group = self._process_group
        if self._host is None and group is not None and torch.device("cpu") not in group._device_types:
            own = own.cuda()
        self._count(kind, len(block) * (self.size - 1))
        received = carrier.all_gather(own, [len(block)] * self.size)
        return lambda: [bytes(piece.tolist()) for piece in received()]

    def _sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum over ranks, contiguous and in new memory."""
        return self.start_all_reduce(
            torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
        )()

    def _gather(
        self, own: torch.Tensor, lengths: list[int], into: torch.Tensor | None = None
    ) -> Pending[list[torch.Tensor]]:
        """Start to gather the bytes of all ranks, into ``into`` if it is given."""
        if self._back_end is None:
            return lambda: [own if into is None else into.copy_(own)]
        self._count("all_gather", own.numel() * (self.size - 1))
        return self._back_end.all_gather(own, lengths, into)

    def _exchange(
        self, kind: str, outgoing: list[list[torch.Tensor]], shapes: list[list[Shape]]
    ) -> Pending[list[list[torch.Tensor]]]:
        """Start to send pieces to each tp rank, and to receive pieces of given shapes from each."""
        dtypes = [piece.dtype for piece in outgoing[0]]
        sent = [num_bytes([tuple(piece.shape) for piece in pieces], dtypes) for pieces in outgoing]
        own = pack([piece for pieces in outgoing for piece in pieces])
        if self._back_end is None:
            return lambda: [unpack(own, shapes[0], dtypes)]
        self._count(kind, sum(sent) - sent[self.rank])
        exchanged = self._back_end.all_to_all(own, sent, [num_bytes(theirs, dtypes) for theirs in shapes])

        def finish() -> list[list[torch.Tensor]]:
            return [unpack(piece, of, dtypes) for piece, of in zip(exchanged(), shapes, strict=True)]

        return finish

    def _count(self, kind: str, sent: int) -> None:
        count = self.counts.setdefault(kind, Count())
        count.number += 1
        count.num_bytes += sent


def _slices(
    tensors: Sequence[torch.Tensor], dims: Sequence[int], sizes: Sequence[Sequence[int]]
) -> list[list[torch.Tensor]]:
    """Return, for each tp rank, its slices of the tensors."""
    slices = [torch.split(tensor, list(of), dim) for tensor, dim, of in zip(tensors, dims, sizes, strict=True)]
    return [list(pieces) for pieces in zip(*slices, strict=True)]


def current_tensor_group() -> TensorGroup:
    """Return the calling rank's TP_GROUP, a group of one rank without tensor parallelism."""
    runtime = current_runtime()
    group = runtime.find(TensorGroup)
    if group is None:
        cfg = runtime.place.cfg
        group = runtime.add(TensorGroup(None, optimize=cfg.optimize, prescaled_batch=cfg.prescaled_batch))
    return group
