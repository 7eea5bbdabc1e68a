"""Guards around functions of torch that would see only a part of the graph inside a frame (rules 10 and 15).

They are installed while a runtime with several pipeline ranks exists, and do nothing outside frames' own code.
"""

from __future__ import annotations

import inspect
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import nn
from torch.autograd.graph import GradientEdge, Node
from torch.utils.hooks import RemovableHandle

from shardwright.errors import FrameError
from shardwright.frames.checkpointing import OF_THE_SCRIPT
from shardwright.frames.cut import SlotEnd, engine_watchers, gradient_edge, owning_edge, slot_of
from shardwright.frames.frame import Frame, KeptGradient, current_frame
from shardwright.frames.paths import Paths
from shardwright.frames.reentrant import Compared, run_reentrant
from shardwright.frames.remote import bring, made_by
from shardwright.patches import original_of

#: Modules of this process that are partly or entirely on another rank.
divided_modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()

#: The code of the function of ``torch.utils.checkpoint`` that iterates over a generator, and the generator's name. Both
#: are different since torch 2.15.
_CHECKPOINT_CODE = inspect.unwrap(getattr(torch_checkpoint, "_checkpoint_impl", torch_checkpoint.checkpoint)).__code__
GENERATOR = "_checkpoint_without_reentrant_generator"
if hasattr(torch_checkpoint, f"{GENERATOR}_impl"):
    GENERATOR = f"{GENERATOR}_impl"


def _refuse_on_parameter(frame: Frame, tensor: torch.Tensor) -> None:
    if isinstance(tensor, nn.Parameter):
        raise FrameError(
            f"a hook on a parameter was registered in the code of {frame.name}, which runs on one rank and once per "
            "microbatch: register it outside the step function, on every rank; it then runs once per step, where the "
            "parameter lives, on the whole gradient"
        )


def requires_grad_(tensor: torch.Tensor, requires_grad: bool = True) -> torch.Tensor:
    """``Tensor.requires_grad_``, which would freeze a parameter on one rank only."""
    tensor = bring(tensor)
    frame = current_frame()
    if frame is not None and id(tensor) in frame.leaves.known and tensor.requires_grad != requires_grad:
        raise FrameError(
            f"requires_grad of a parameter of shape {tuple(tensor.shape)} was set to {requires_grad} in the code of "
            f"{frame.name}, on one rank only: freeze parameters outside the step function, on every rank"
        )
    result: torch.Tensor = original_of(requires_grad_)(tensor, requires_grad)
    return result


def register_post_accumulate_grad_hook(tensor: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> Any:
    """``Tensor.register_post_accumulate_grad_hook``, which is refused on parameters in a frame's code."""
    frame = current_frame()
    if frame is not None:
        _refuse_on_parameter(frame, tensor)
    return original_of(register_post_accumulate_grad_hook)(tensor, hook)


def register_hook(tensor: torch.Tensor, hook: Callable[[torch.Tensor], torch.Tensor | None]) -> Any:
    """``Tensor.register_hook``; in a frame's code, the hook sees the whole gradient."""
    tensor = bring(tensor)
    frame = current_frame()
    if frame is not None:
        _refuse_on_parameter(frame, tensor)
    if frame is None or not tensor.requires_grad:
        return original_of(register_hook)(tensor, hook)
    frame.hooked = True
    if tensor.grad_fn is None:
        return original_of(register_hook)(tensor, hook)
    return _frame_hook(frame, tensor, hook) or original_of(register_hook)(tensor, hook)


def register_multi_grad_hook(tensors: Sequence[torch.Tensor], fn: Callable[..., Any], **kwargs: Any) -> Any:
    """``torch.autograd.graph.register_multi_grad_hook``, refused if gradients arrive in separate engine calls."""
    frame = current_frame()
    if frame is not None and frame.spanning:
        raise FrameError(
            f"register_multi_grad_hook in the code of {frame.name}, of which parts run elsewhere: gradients come one "
            "after another there, in several calls of autograd; use register_hook on each tensor, or do it inside one "
            "module"
        )
    return original_of(register_multi_grad_hook)(tensors, fn, **kwargs)


def _frame_hook(frame: Frame, tensor: torch.Tensor, hook: Callable[[torch.Tensor], Any]) -> RemovableHandle | None:
    edge = _checked_edge(frame, tensor)
    if not frame.spanning:
        return None
    frame.guard(edge.node)
    _pass_by(frame, tensor, edge.node)
    hooks = frame.hooks.setdefault((edge.node, edge.output_nr), OrderedDict())
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


def _checked_edge(frame: Frame, tensor: torch.Tensor) -> GradientEdge:
    edge = gradient_edge(tensor)
    if any(argument() is tensor for argument in frame.arguments):
        raise FrameError(
            f"a hook (or retain_grad) on an argument of {frame.name} would see only the gradient from inside it, "
            "because it runs on another rank than its caller: register it where the tensor is made, or on a clone()"
        )
    if edge.node in frame.unhookable:
        raise FrameError(f"a hook (or retain_grad) on {frame.unhookable[edge.node]}")
    return edge


def _pass_by(frame: Frame, tensor: torch.Tensor, node: Node) -> None:
    """Let gradients of calls that were handed a tensor before its values arrived come through its node.

    They would go to the rank that made it without passing what is hooked here.
    """
    made = slot_of(made_by(node))
    if made is None:
        return
    for call in frame.calls:
        ends = [isinstance(edge.node, SlotEnd) and edge.node.slot is made for edge, _ in call.inputs]
        if any(ends):
            edge = owning_edge(tensor)
            pairs = zip(call.inputs, ends, strict=True)
            call.inputs = [(edge if is_end else before, index) for (before, index), is_end in pairs]


def retain_grad(tensor: torch.Tensor) -> None:
    """``Tensor.retain_grad``; in a frame's code, it retains the whole gradient."""
    tensor = bring(tensor)
    frame = current_frame()
    if frame is None or tensor.grad_fn is None:
        original_of(retain_grad)(tensor)
        return
    frame.hooked = True
    edge = _checked_edge(frame, tensor)
    if not frame.spanning:
        original_of(retain_grad)(tensor)
    elif not any(kept.tensor() is tensor for kept in frame.kept_gradients):
        frame.guard(edge.node)
        _pass_by(frame, tensor, edge.node)
        frame.kept_gradients.append(KeptGradient(weakref.ref(tensor), edge, tensor._version))


def _listed(values: Any) -> list[Any]:
    return list(values) if isinstance(values, Sequence) and not isinstance(values, GradientEdge) else [values]


def _check_gradient(outputs: Any, inputs: Any) -> None:
    """Refuse ``torch.autograd.grad`` unless all paths from outputs to inputs are on this rank."""
    frame = current_frame()
    if frame is None or not (frame.spanning or len(frame.inputs) > 1):
        return
    if any(
        isinstance(value, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(value)
        for value in _listed(inputs)
    ):
        return  # the graph of a transform begins inside it, where no remote module can be called
    paths = Paths(frame, _listed(outputs), _listed(inputs))
    if paths.pass_the_caller():
        raise FrameError(
            f"torch.autograd.grad in the code of {frame.name} is given one argument as input and reaches another, "
            "which the caller may have made of it on another rank: make that one inside the module, detach it, or "
            "place the module with its caller (smp.set_partition)"
        )
    if not frame.spanning:
        return
    if not frame.guarded.isdisjoint(paths.needed):
        raise _reaches_a_hook("torch.autograd.grad", frame)
    if paths.leave_the_rank():
        raise _reaches_another_rank("torch.autograd.grad", frame)


def _check_backward(outputs: Any) -> None:
    """Refuse ``backward`` of outputs whose graph has a part on another rank."""
    frame = current_frame()
    if frame is None or not frame.spanning:
        return
    stack = [output.grad_fn if isinstance(output, torch.Tensor) else output.node for output in _listed(outputs)]
    seen = set(stack)
    while stack:
        node = stack.pop()
        if node is None:
            continue
        if node in frame.guarded:
            raise _reaches_a_hook("backward", frame)
        if slot_of(node) is not None:
            raise _reaches_another_rank("backward", frame)
        for behind, _ in node.next_functions:
            if behind is not None and behind not in seen:
                seen.add(behind)
                stack.append(behind)


def _reaches_a_hook(what: str, frame: Frame) -> FrameError:
    return FrameError(
        f"{what} in the code of {frame.name} reaches a tensor with a hook (or retain_grad), which would see "
        "only a part of its gradient: register it on a clone()"
    )


def _reaches_another_rank(what: str, frame: Frame) -> FrameError:
    return FrameError(
        f"{what} in the code of {frame.name} reaches a module on another rank, where it cannot follow; call "
        "model.backward(loss) in the step function instead, or place the whole computation on one rank"
    )


def run_engine(outputs: Any, *args: Any, accumulate_grad: bool, **kwargs: Any) -> Any:
    """The function that ``torch.autograd.grad`` and ``backward`` call, regardless of how a script imported them.

    As in :class:`~shardwright.frames.cut.EngineCall`, all nodes run on the calling thread.
    """
    if accumulate_grad:
        _check_backward(outputs)
    else:
        _check_gradient(outputs, args[3] if len(args) > 3 else kwargs["inputs"])
    with torch.autograd.set_multithreading_enabled(False):
        return original_of(run_engine)(outputs, *args, accumulate_grad=accumulate_grad, **kwargs)


def _runs_here(function: Any) -> bool:
    """Return whether a checkpoint runs here: of a module entirely on this rank, or of code of a module with state."""
    while isinstance(function, (partial, Compared)):
        function = function.func
    module = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
    if isinstance(module, nn.Module):
        return module not in divided_modules
    keepers = (watcher.keeper() for watcher in engine_watchers)
    return any(keeper is not None and keeper not in divided_modules for keeper in keepers)


@contextmanager
def _left_to_modules(frame: Frame) -> Iterator[None]:
    """Context manager for a checkpoint of a frame's own code, which is not recomputed as a whole."""
    if frame.checkpointing is not None and frame.checkpointing.isolated:
        yield  # the modules called inside are checkpointed already, and change what they keep once
        return
    with ExitStack() as stack:
        for watcher in engine_watchers:
            stack.enter_context(watcher.computed_once())
        before = frame.checkpointing
        frame.checkpointing = OF_THE_SCRIPT  # the modules called inside are checkpointed by the ranks that run them
        try:
            yield
        finally:
            frame.checkpointing = before


def _frame_for_checkpoint(function: Any) -> Frame | None:
    frame = current_frame()
    return None if frame is None or not frame.spanning or _runs_here(function) else frame


def checkpoint_generator(function: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
    """The generator of ``torch.utils.checkpoint``; checkpoints of a frame's own code are applied to modules instead."""
    frame = _frame_for_checkpoint(function)
    around = current_frame()
    if around is not None:
        around.checkpointed = True
    if frame is not None:
        with _left_to_modules(frame):
            yield
        return
    with nullcontext() if around is None else _whole(around):
        yield from original_of(checkpoint_generator)(function, *args, **kwargs)


@contextmanager
def _whole(frame: Frame) -> Iterator[None]:
    """Context manager for a checkpoint of the script that is computed again as a whole, also inside a marked module.

    What it calls is then a part of it, and no checkpoint of its own: the second computation, which has no frame, would
    not make one.
    """
    before, frame.checkpointing = frame.checkpointing, None
    try:
        yield
    finally:
        frame.checkpointing = before


def close_checkpoints(error: BaseException) -> None:
    """Exit the checkpoint regions that an exception has passed through, on the thread that entered them.

    ``torch.utils.checkpoint`` exits them when a generator is destroyed, which may happen on another thread if the
    exception is raised again there; the hooks on saved tensors would then remain on this thread.
    """
    generators = []
    seen: set[int] = set()
    causes: list[BaseException | None] = [error]
    while causes:
        cause = causes.pop()
        if cause is None or id(cause) in seen:
            continue
        seen.add(id(cause))
        causes += [cause.__cause__, cause.__context__]
        trace = cause.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code is _CHECKPOINT_CODE:
                generators.append(trace.tb_frame.f_locals.get("gen"))
            trace = trace.tb_next
    for generator in reversed(generators):
        if generator is not None:
            generator.close()


class ReentrantCheckpoint:
    """Replacement of ``torch.utils.checkpoint.CheckpointFunction``."""

    @staticmethod
    def apply(function: Any, preserve_rng_state: bool, *args: Any) -> Any:
        """Run the function, checkpointed on the ranks that run its modules."""
        frame = _frame_for_checkpoint(function)
        if frame is None:
            if current_frame() is not None or torch._C._current_graph_task_id() != -1:
                # A forward that is run again in the backward, where there is no frame, must take the same branch.
                return run_reentrant(function, args, preserve_rng_state=preserve_rng_state)
            original: Any = original_of(ReentrantCheckpoint)
            return original.apply(function, preserve_rng_state, *args)
        with _left_to_modules(frame):
            return function(*args)
