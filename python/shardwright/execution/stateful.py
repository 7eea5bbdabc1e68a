"""Modules with state: microbatches run through them in order, and never two at once (EX-15)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardwright import _core
from shardwright.activation_checkpointing.isolation import has_entered, is_isolated
from shardwright.contents import reached
from shardwright.errors import FrameError
from shardwright.execution.children import value_of
from shardwright.execution.computed_once import ComputedOnce, run_inside_checkpoint
from shardwright.execution.context import Suspended
from shardwright.execution.intercept import entered
from shardwright.execution.kept import (
    Seen,
    Watch,
    attribute_of,
    no_copy_of,
    seen_of,
    variable_of,
)
from shardwright.execution.locations import in_backward
from shardwright.execution.placed import Decided, KeptState
from shardwright.execution.returned import changed_since_returned, note_returned
from shardwright.execution.shared_objects import RemoteHolders
from shardwright.execution.snapshot import Snapshot
from shardwright.execution.task import RunningTask, may_overlap, running_task, state_write
from shardwright.execution.turn import Turn
from shardwright.frames.cut import engine_watchers
from shardwright.frames.remote import has_graph, is_remote

if TYPE_CHECKING:
    from shardwright.job.runtime import Runtime


#: Batch normalization, which writes to its statistics without incrementing their version counters.
BATCH_NORMALISATION = nn.modules.batchnorm._NormBase


class StatefulModules:
    """The local modules of a model that keep state."""

    def __init__(self, runtime: Runtime, model_id: int, modules: Mapping[str, nn.Module], decision: Decided) -> None:
        """Intercept calls of the local modules with state, to run microbatches through them in order.

        Args:
            runtime: This rank's runtime.
            model_id: The model's id.
            modules: The model's modules, by path.
            decision: The model's partition.
        """
        self._runtime = runtime
        self._model_id = model_id
        self._states: dict[int, KeptState] = {}
        #: The modules that run at most one microbatch at a time.
        self.gated: set[nn.Module] = set()
        here = {path for path in modules if runtime.place.pp_rank in _ranks_of(decision, path)}
        listed = self._gate(modules, decision, here)
        self._find_attributes(modules, decision, here)
        self._kept_in = {m: [place for n in numbers for place in self._places_of[n]] for m, numbers in listed.items()}
        self._remote_holders = RemoteHolders(
            {path: module for path, module in modules.items() if path not in here},
            {path: runtime.place.pp_ranks[min(_ranks_of(decision, path))] for path in modules},
            {name: runtime.place.pp_ranks[min(ranks)] for name, ranks in decision.reads.items()},
        )
        self._snapshot: Snapshot | None = None
        #: By batch normalization, whether its statistics were changed, and needed by a backward, in this step.
        self._statistics: dict[nn.Module, set[str]] = {}
        #: By state, the microbatch that entered last.
        self._newest: dict[int, int] = {}
        if self._states:
            engine_watchers.add(self)

    def _gate(self, modules: Mapping[str, nn.Module], decision: Decided, here: set[str]) -> dict[nn.Module, list[int]]:
        """Intercept calls of the local modules with state; return the numbers of the states of each."""
        runtime, model_id = self._runtime, self._model_id
        numbers: dict[nn.Module, list[int]] = {}
        uncounted: set[int] = set()
        for number, state in enumerate(decision.kept):
            users = [path for path in state.users if path in here]
            if runtime.place.is_root and len(users) < len(state.users):
                runtime.server.tell_forwards()
            if not users:
                continue
            self._states[number] = state
            for path in users:
                module = entered(path, modules, here)
                if module is not modules[path]:
                    uncounted.add(number)
                listed = numbers.setdefault(module, [])
                if number not in listed:
                    listed.append(number)
        self.expect_counts(
            {(model_id, n): sum(state.users.values()) for n, state in self._states.items() if n not in uncounted}
        )
        for module, listed in numbers.items():
            self.gated.add(module)
            _intercept(self, module, listed)
        return numbers

    def _find_attributes(self, modules: Mapping[str, nn.Module], decision: Decided, here: set[str]) -> None:
        """Find the attributes of local modules that hold state, and watch the others."""
        known = [name for state in decision.kept for name in state.names]
        self._attributes = [found for name in known if (found := attribute_of(name, modules)) and found[0] in here]
        nameless = {path for state in decision.kept if not state.names for path in state.users if path in here}
        settled = {*known, *decision.attributes}
        holders = {path for path, _ in self._attributes} | nameless
        using = {path for state in self._states.values() for path in state.users if path in here}
        self._kept_by = [modules[path] for path in sorted(holders | using)]
        self._places = [(modules[path], name) for path, name in self._attributes]
        values = [value_of(*place) for place in self._places]
        self._parameters = [value for value in values if isinstance(value, nn.Parameter)]
        full_names = (f"{path}.{name}" if path else name for path, name in self._attributes)
        held = dict(zip(full_names, self._places, strict=True))
        self._places_of = {
            number: [held[name] for name in state.names if name in held] for number, state in self._states.items()
        }
        #: Attributes that may hold an earlier microbatch's graph, because each forward sets them before reading them.
        self._set_first = {held[name] for name in decision.temporaries if name in held}
        self._variables = [variable for name in known if (variable := variable_of(name, modules)) is not None]
        self._watch = Watch({path: modules[path] for path in here}, settled, nameless, self._kept_by)

    def expect_counts(self, counts: Mapping[tuple[int, int], int | None] | None) -> None:
        """Set the expected number of calls per microbatch; with None, wait until the forwards of each are over."""
        for number, state in self._states.items():
            count = None if counts is None else counts.get((self._model_id, number))
            self._runtime.server.keep_in_order(self._model_id, number, name=_described(state), stays=count)

    def begin_step(self) -> None:
        """Record the state that the step may change, to undo it, and the state that is not expected to change."""
        self._watch.begin_step()
        self._remote_holders.begin_step()
        self._snapshot = None
        if self._kept_by or self._variables:
            self._snapshot = Snapshot(self._kept_by, self._variables, self._parameters)

    def end_step(self) -> None:
        """Handle a successful step."""
        self._snapshot = None
        self._newest.clear()
        self._statistics.clear()
        self._watch.end_step()

    def rollback(self) -> list[str]:
        """Undo the changes of the step; return the names of tensors that cannot be restored."""
        if self._snapshot is not None:
            self._snapshot.restore()
        lost = self._watch.restore()
        self.end_step()
        return lost

    def is_set(self, module: nn.Module, name: str) -> None:
        """Handle an attribute of a local module that is about to be set."""
        task = running_task() or self._runtime[Turn].current
        if task is None or not self._runtime.step.running:
            self._watch.is_stale = True
            return
        if is_isolated():
            return  # and put back at once
        self._runtime[Turn].attributes.is_set(module, name, task.microbatch)
        if (module, name) in self._places and in_backward():
            self._refuse(task, f"{self._watch.name_of(module, name)} was set in a backward")
        else:
            self._watch.is_set(task, module, name)

    def is_switched(self, module: nn.Module, name: str) -> None:
        """Handle a change of the training mode or the hooks of a module."""
        task = running_task() or self._runtime[Turn].current
        if is_isolated():
            return
        if task is not None and self._runtime.step.running and self._watch.is_switched(module, name):
            self._refuse(task, f"{self._watch.name_of(module, name)} was changed, which the trace did not see")

    def check_call(self, task: RunningTask, name: str) -> None:
        """Raise :class:`StateWriteError` if the caller of a remote module made a change that the trace did not see."""
        written = self._watch.written_meanwhile(name)
        if written is not None:
            self._remote_holders.refuse(self._watch.changed())
            self._refuse(task, f"{written} was changed before module {name!r} was called, which the trace did not see")

    def check(self, task: RunningTask, module: nn.Module | None = None) -> None:
        """Raise :class:`StateWriteError` if a task has made a change that the trace did not see.

        Args:
            task: The task, which is about to end.
            module: The module that it ran; None for the step function.

        Raises:
            FrameError: A parameter was written to, another rank has a copy of a changed value, or a change cannot be
                undone.
        """
        written = self._watch.written(task, module)
        if written is not None:
            self._remote_holders.refuse(self._watch.changed())
            # With predicted calls, the order within the microbatch may have been different too.
            when = "in a backward" if task.phase == "backward" else "which the trace did not see"
            self._refuse(task, f"{written} was changed {when}", always=self._runtime[_core.Sites].predicts)
        self._check_returned(task)
        weight = self._watch.written_weight(module)
        if weight is not None and may_overlap(self._runtime):
            raise FrameError(
                f"parameter {weight} was written to in a forward or backward, though the trace of the first step saw "
                "no such write: microbatches may have used it in another order than in one process, and it cannot be "
                "put back. Let the first step take that branch, or register the tensor as a buffer"
            )

    def changed_late(self, task: RunningTask) -> str | None:
        """Describe changes in this step that the trace did not see; None if there are none or they cannot be undone."""
        if self._watch.lost() or self._watch.written_weight(None) is not None:
            return None
        return self._watch.changed_late(task)

    def seen(self) -> list[Seen] | None:
        """Record the state of modules before a call of the autograd engine; None if the call is not this rank's."""
        task = running_task() or self._runtime[Turn].current
        if task is None or task.runtime is not self._runtime:
            return None
        return [seen_of(place) for place in self._places]

    def check_backward(self, before: list[Seen]) -> None:
        """Raise :class:`StateWriteError` if a backward has changed state that forwards use."""
        for place, seen in zip(self._places, before, strict=True):
            if not seen.is_like(seen_of(place)):
                task = running_task() or self._runtime[Turn].current
                assert task is not None, "it was there before the call"
                self._refuse(task, f"{self._watch.name_of(*place)} was changed in a backward")

    def values_changed(self, before: list[Seen]) -> bool:
        """Return whether values have changed, except by in-place writes to tensors."""
        return not all(seen.has_values_of(seen_of(place)) for place, seen in zip(self._places, before, strict=True))

    def keeper(self) -> nn.Module | None:
        """Return the innermost module with state whose code is running; None if there is none."""
        task = running_task()
        return task.inside[-1] if task is not None and task.inside else None

    def computed_once(self) -> ComputedOnce:
        """Return the context manager for its code inside a checkpoint that is applied to the modules called in it."""
        return ComputedOnce(self._kept_in, self._watch)

    def _refuse(self, task: RunningTask, what: str, *, always: bool = False) -> None:
        if self._runtime.server.runs_one_at_a_time() and not always:
            return
        if lost := self._watch.lost():
            if self._runtime.step.num_microbatches == 1 and not always:
                return
            raise FrameError(f"{no_copy_of(lost)} Register it as a buffer, or let the first step take that branch")
        raise state_write(task, f"{what}: only microbatches that run one after another find it as in one process")

    def run_in_order(
        self, states: list[int], module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """Run a module once earlier microbatches have finished with its state."""
        runtime, model = self._runtime, self._model_id
        task = running_task()
        if in_backward():
            current = task or runtime[Turn].current
            if current is not None and runtime.step.running and not is_isolated():
                self._refuse(current, f"module {self._watch.path_of(module)!r} was computed again in a backward")
            return call(*args, **kwargs)
        if task is None or task.runtime is not runtime:
            return call(*args, **kwargs)
        server, worker = runtime.server, task.worker
        for state in states:
            if not server.try_enter_state(worker, model, state):
                with Suspended():
                    server.enter_state(worker, model, state)
            has_entered(
                (model, state), self._places_of[state] or [(module, name) for name in (*vars(module), *module._buffers)]
            )
            if self._newest.get(state) != task.microbatch:
                self._newest[state] = task.microbatch
                self._check_graphs(task, state)
        self._check_returned(task)
        if isinstance(module, BATCH_NORMALISATION):
            self._check_statistics(task, module)
        task.ordered = True
        task.inside.append(module)
        try:
            result = run_inside_checkpoint(module, self._watch.path_of(module), call, args, kwargs)
            self._note_returned(task, module, states, result)
            return result
        finally:
            task.inside.pop()
            for state in states:
                server.leave_state(worker, model, state)

    def _check_graphs(self, task: RunningTask, state: int) -> None:
        """Raise :class:`StateWriteError` if a microbatch finds a tensor with the graph of an earlier one."""
        for module, name in self._places_of[state]:
            for part in reached(value_of(module, name)) if (module, name) not in self._set_first else ():
                if not isinstance(part, torch.Tensor) or not part.requires_grad:
                    continue
                if is_remote(part) or has_graph(part):
                    self._refuse(
                        task, f"{self._watch.name_of(module, name)} holds a tensor with an earlier microbatch's graph"
                    )

    def _check_statistics(self, task: RunningTask, module: nn.Module) -> None:
        """Raise :class:`StateWriteError` if a backward needs statistics that training changes undetected by torch."""
        modes = self._statistics.setdefault(module, set())
        modes.add("changed" if module.training else "needed" if torch.is_grad_enabled() else "")
        if modes >= {"changed", "needed"}:
            what = f"the statistics of {self._watch.path_of(module)!r}"
            self._refuse(task, f"{what}, which were used in evaluation mode, were changed in training mode")

    def _note_returned(self, task: RunningTask, module: nn.Module, states: list[int], result: Any) -> None:
        if may_overlap(self._runtime):
            places = [place for state in states for place in self._places_of[state]]
            note_returned(task, self._watch.path_of(module), places, result)

    def _check_returned(self, task: RunningTask) -> None:
        """Raise :class:`StateWriteError` if another task has changed a tensor that a module returned to this one."""
        name = changed_since_returned(task)
        if name is not None:
            self._refuse(task, f"what module {name!r} keeps and returned was changed by another microbatch")


def _ranks_of(decision: Decided, path: str) -> Iterable[int]:
    return decision.follows.get(path) or (decision.modules[path],)


def _described(state: KeptState) -> str:
    if state.names:
        rest = f" and {len(state.names) - 1} more" if len(state.names) > 1 else ""
        return f"{state.names[0]!r}{rest}"
    return f"a tensor that module {min(state.users)!r} keeps"


def _intercept(kept: StatefulModules, module: nn.Module, states: list[int]) -> None:
    """Intercept all calls of a module, including its hooks."""
    compiled = module._compiled_call_impl

    def called(own: nn.Module, *args: Any, **kwargs: Any) -> Any:
        call = own._call_impl if compiled is None else compiled
        return kept.run_in_order(states, own, call, args, kwargs)

    called.is_compiled = compiled is not None  # type: ignore[attr-defined]
    module._compiled_call_impl = MethodType(called, module)
    if isinstance(module, torch.jit.ScriptModule) or compiled is not None:
        return
    # Pass the module as an argument if possible, so that a deep copy of the module runs the copy.
    own_forward = module.__dict__.get("forward")
    bound = own_forward is None or getattr(own_forward, "__self__", None) is module
    forward: Any = own_forward if not bound else getattr(own_forward, "__func__", type(module).forward)

    @functools.wraps(forward)
    def forwarded(own: nn.Module, *args: Any, **kwargs: Any) -> Any:
        task = running_task()
        given = (own, *args) if bound else args
        if task is None or own in task.inside or in_backward():
            return forward(*given, **kwargs)
        return kept.run_in_order(states, own, forward, given, kwargs)

    module.forward = MethodType(forwarded, module)
