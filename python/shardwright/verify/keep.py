"""Keeps a verification free of side effects: saves what its step changes on a rank, and restores it."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator

import torch
from torch import nn

from shardwright.data_parallel.replicas import Replicas
from shardwright.data_parallel.shards import ParameterShards
from shardwright.execution.snapshot import Snapshot
from shardwright.job.runtime import Runtime
from shardwright.model.hooks import PostPartitionHooks
from shardwright.model.models import Models
from shardwright.model.placement import Placement
from shardwright.model.sentinel import is_sentinel
from shardwright.partition.preserve import ModuleState, preserved_random_numbers


class Start:
    """The values of one model on this rank at the start of the step, in host memory, by all their names.

    The step in one process starts from the same values, so a copy of them is needed in any case.
    """

    def __init__(self, placement: Placement) -> None:
        """Copy the values that this rank holds."""
        module = placement.module
        self._tensors: list[tuple[torch.Tensor, torch.Tensor]] = []
        copies: dict[int, torch.Tensor] = {}

        def kept(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in copies:
                copies[id(tensor)] = tensor.detach().to("cpu", copy=True)
                self._tensors.append((tensor, copies[id(tensor)]))
            return copies[id(tensor)]

        self.parameters = {
            name: kept(parameter)
            for name, parameter in module.named_parameters(remove_duplicate=False)
            if not is_sentinel(parameter)
        }
        self.buffers = {
            name: kept(buffer)
            for name, buffer in module.named_buffers(remove_duplicate=False)
            if not is_sentinel(buffer)
        }
        parts = [part for _, part in placement.local_named_modules()]
        self._modules = [ModuleState(part) for part in parts]
        self._held = Snapshot(parts, (), ())

    def put_back(self) -> None:
        """Restore the values of tensors and the attributes of modules."""
        for state in self._modules:
            state.restore()
        self._held.restore()
        with torch.no_grad():
            for tensor, copy in self._tensors:
                if tensor.shape != copy.shape or not torch.equal(tensor.detach().cpu(), copy):
                    with torch.autograd._unsafe_preserve_version_counter(tensor):  # type: ignore[attr-defined]
                        tensor.copy_(copy)


class _Gradients:
    """The gradients of a rank, removed for a step, with their values if a step may write to their memory."""

    def __init__(self, placement: Placement) -> None:
        as_views = bool(placement.options["gradient_as_bucket_view"])
        self._held: list[tuple[nn.Parameter, torch.Tensor | None, torch.Tensor | None]] = []
        for parameter in placement.owned_parameters():
            gradient = parameter.grad
            copy = gradient.clone() if as_views and gradient is not None else None
            self._held.append((parameter, gradient, copy))
            parameter.grad = None

    def put_back(self) -> None:
        for parameter, gradient, copy in self._held:
            if is_sentinel(parameter):  # released by a partition made in the step
                continue
            if gradient is not None and copy is not None:
                gradient.copy_(copy)
            parameter.grad = gradient


@contextlib.contextmanager
def _reducing(replicas: Replicas) -> Iterator[None]:
    """Make a step reduce gradients regardless of accumulation, without any lasting effect."""
    passes, replicas._passes = replicas._passes, int(replicas._options["backward_passes_per_step"]) - 1
    gradient_counts = None if replicas._reducer is None else replicas._reducer.gradient_counts()
    try:
        with replicas.undone():
            yield
    finally:
        replicas._passes = passes
        if replicas._reducer is not None:
            replicas._reducer.expect(gradient_counts or Counter())


@contextlib.contextmanager
def kept(runtime: Runtime) -> Iterator[dict[int, Start]]:
    """Run one step without lasting effects, and yield, by model id, the values that the step starts from.

    A model that the step divides is added once it is divided.
    """
    starts: dict[int, Start] = {}
    placements = runtime[Models].placements
    tensors = [tensor for placement in placements for tensor in placement.owned_parameters()]
    for placement in placements:
        placement.run_late_hooks()  # what they do is there to stay
    with contextlib.ExitStack() as stack:
        stack.enter_context(runtime[ParameterShards].suspended())
        stack.enter_context(preserved_random_numbers(tensors))
        for placement in placements:
            stack.enter_context(_reducing(placement.replicas))
            stack.callback(_Gradients(placement).put_back)
            stack.callback(setattr, placement, "post_step_hooks", placement.post_step_hooks)
            placement.post_step_hooks = PostPartitionHooks()  # the script's hooks wait for its first step
            if placement.partitioned:
                starts[placement.model_id] = Start(placement)
            else:
                stack.callback(placement.post_partition_hooks.register(_starting(placement, starts)).remove)
        try:
            yield starts
        finally:
            for start in starts.values():
                start.put_back()


def _starting(placement: Placement, starts: dict[int, Start]) -> Callable[[object, object], None]:
    def keep(_model: object, _optimizer: object) -> None:
        starts[placement.model_id] = Start(placement)

    return keep
