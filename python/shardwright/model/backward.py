"""``model.backward``: starts the backward pass of a microbatch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.autograd.graph import GradientEdge

from shardwright import _core
from shardwright.data_parallel.weights import StepWeights
from shardwright.errors import ConfigError, ShardwrightError
from shardwright.execution.backward import ServerBackward
from shardwright.execution.context import Suspended
from shardwright.execution.results import release_unused
from shardwright.execution.serve import deferring
from shardwright.execution.task import running_task
from shardwright.execution.turn import Turn
from shardwright.frames import Leaves, current_frame, in_frame, owning_edge, run_backward
from shardwright.frames.cut import gradient_edge, slot_of
from shardwright.frames.remote import is_remote
from shardwright.half_precision import LossScaling
from shardwright.job.runtime import Runtime
from shardwright.tensor_parallel.group import TensorGroup

RootGradients = torch.Tensor | Sequence[torch.Tensor | None] | None


def backward(
    runtime: Runtime,
    tensors: torch.Tensor | Sequence[torch.Tensor],
    grad_tensors: RootGradients,
    weight: float | torch.Tensor | None,
) -> None:
    """Run the backward pass from ``tensors``. See :meth:`shardwright.DistributedModel.backward`."""
    if runtime.place.cfg.pipeline == "_only_forward":
        raise ConfigError(
            'model.backward in a job whose "pipeline" is "_only_forward", which is for evaluation alone: take another '
            'schedule, such as "interleaved", to train'
        )
    if runtime.place.pp_size == 1:
        if runtime.step.running:
            weight = runtime[StepWeights].give(runtime.step.microbatch, weight, tensors)
        elif weight is not None:
            raise ShardwrightError("model.backward: a weight counts among the microbatches of a function with smp.step")
        grad_tensors = weighted(tensors, grad_tensors, runtime[LossScaling].scaled(weight))
        runtime[_core.AloneRecorder].passed_forward()
        runtime[Turn].begins("backward", runtime.step.microbatch)
        if runtime[Leaves].walks:
            listed = [tensors] if isinstance(tensors, torch.Tensor) else tensors
            nodes = (gradient_edge(tensor).node for tensor in listed if tensor.requires_grad)
            runtime[Leaves].check_behind(nodes, "the step function", runtime.step.microbatch)
        if (group := runtime.find(TensorGroup)) is not None:
            # Collectives of a forward pass must not be paired with those of a backward pass.
            group.meet("model.backward")
        # What runs in it, such as collectives and second computations, finds the state that this thread keeps.
        with torch.autograd.set_multithreading_enabled(False):
            torch.autograd.backward(tensors, grad_tensors)
        runtime[_core.AloneRecorder].passed_backward()
        return
    task, frame = running_task(), current_frame()
    if task is None or frame is None or frame.request is not None:
        raise ShardwrightError(
            "model.backward can be called only in the step function itself when pipeline_parallel_degree > 1"
        )
    number = runtime[StepWeights].give(task.microbatch, weight, tensors)
    release_unused(task)
    frame.settle()
    grad_tensors = weighted(tensors, grad_tensors, runtime[LossScaling].scaled(number))
    roots = _roots(tensors, grad_tensors)
    task.phase = "backward"
    elsewhere = all(slot_of(edge.node) is not None for edge, _ in roots)
    if not (elsewhere and runtime.server.begin_backward_elsewhere(task.worker)):
        with Suspended():
            runtime.server.await_backward(task.worker)
    runtime[Turn].begins("backward", task.microbatch)
    with in_frame(None):
        run_backward(frame, roots, ServerBackward(task, frame), defer=deferring(task))
    frame.forget_watched()
    task.phase = "forward"


def weighted(
    tensors: torch.Tensor | Sequence[torch.Tensor], grad_tensors: RootGradients, weight: float | None
) -> RootGradients:
    """Return the gradients that the backward pass starts from, multiplied by a weight; None for 1."""
    if weight is None:
        return grad_tensors
    single = isinstance(tensors, torch.Tensor)
    listed = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    if grad_tensors is None:
        # A tensor of several elements gets no gradient; `_roots` raises an error for it.
        # A loss scale that its dtype cannot hold is infinity, and makes an overflow.
        gradients = [torch.ones_like(each).mul_(weight) if each.numel() == 1 else None for each in listed]
    else:
        given = [grad_tensors] if isinstance(grad_tensors, torch.Tensor) else list(grad_tensors)
        gradients = [None if each is None else each * weight for each in given]
    return gradients[0] if single and len(gradients) == 1 else gradients


def _roots(
    tensors: torch.Tensor | Sequence[torch.Tensor], grad_tensors: RootGradients
) -> list[tuple[GradientEdge, torch.Tensor]]:
    listed = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    if grad_tensors is None:
        gradients: list[torch.Tensor | None] = [None] * len(listed)
    else:
        gradients = [grad_tensors] if isinstance(grad_tensors, torch.Tensor) else list(grad_tensors)
    if len(listed) != len(gradients):
        raise ValueError(f"model.backward got {len(listed)} tensors but {len(gradients)} grad_tensors")
    roots = []
    for index, (tensor, gradient) in enumerate(zip(listed, gradients, strict=True)):
        if not tensor.requires_grad:
            raise RuntimeError(f"element {index} of the tensors given to model.backward does not require a gradient")
        if gradient is None:
            if tensor.numel() != 1:
                raise RuntimeError(
                    f"element {index} of the tensors given to model.backward has shape {tuple(tensor.shape)}; give its "
                    "gradient in grad_tensors, or reduce it to one element"
                )
            gradient = torch.ones(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        elif gradient.shape != tensor.shape:
            raise RuntimeError(
                f"element {index} of grad_tensors has shape {tuple(gradient.shape)}, its tensor {tuple(tensor.shape)}"
            )
        roots.append((owning_edge(tensor), gradient))
    # No node saves a single root, so it can be detached: only `roots` then holds the graph, which is freed while the
    # backward pass runs.
    if len(listed) == 1 and not is_remote(listed[0]) and listed[0].grad_fn is not None and not listed[0]._is_view():
        listed[0].detach_()
    return roots
