"""What one run of a random program leaves behind beside gradients, and what it made use of."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from shardwright.job.runtime import find_runtime
from torch import nn

#: What a script does around its steps, in wide programs.
AROUND_STEPS = (
    "optimizers of whole parameters",
    "accumulation over steps",
    "an earlier life",
    "hooks of parameters",
    "freezing",
    "averages",
    "loads",
    "saves and loads",
    "resumes in new jobs",
)
#: What every program may make use of, in the order of the table.
FEATURES = (
    "re-used modules",
    "re-use with other shapes",
    "tied parameters",
    "branches",
    "in-place operations",
    "argument structures",
    "depth 3 or more",
    "no_grad parts",
    "unused results",
    "several backward roots",
    "checkpoints",
    "buffers that change",
    "state in attributes",
    "another module's weight",
    "tensor hooks",
    "hooks on views",
    "hooks of modules",
    "several widths",
    "first uses",
    "torch.func",
    "loops by data",
    "inference mode",
    "weights written in forward",
    "modules that keep something",
    "Python state",
    "structures",
    "evaluation steps",
    "updates between steps",
    "real processes",
    "replicas",
    "sharded optimizer state",
    "tensor parallelism",
    "sharded data parallelism",
    *AROUND_STEPS,
)
#: Those that must each occur in a good share of all programs.
NEEDED = (
    "re-used modules",
    "tied parameters",
    "branches",
    "in-place operations",
    "argument structures",
    "depth 3 or more",
)


class Log:
    """What hooks saw, tensors whose gradients were to be kept, results; and, of a plain run, features that occurred."""

    #: Slots, because the trace takes an object with a dictionary that a forward changes for state that modules share.
    __slots__ = (
        "_changes",
        "_depth",
        "_plain",
        "_shapes",
        "_users",
        "_versions",
        "checkpointing",
        "depends_on_order",
        "ended",
        "features",
        "finals",
        "hooks",
        "modules",
        "ran",
        "retained",
        "weight",
    )

    def __init__(self, *, plain: bool) -> None:
        """``plain`` is a run in one thread, whose features are counted."""
        self.checkpointing = not plain
        self._plain = plain
        #: By name, gradients with the number of the library's step in which they came, and tensors likewise.
        self.hooks: dict[str, list[tuple[int, torch.Tensor]]] = collections.defaultdict(list)
        self.retained: dict[str, list[tuple[int, torch.Tensor]]] = collections.defaultdict(list)
        #: What losses are multiplied by.
        self.weight = 1.0
        #: The steps that were not taken back; in plain torch there is one, 0.
        self.ended: set[int] = {0}
        self.finals: dict[str, list[torch.Tensor | None]] = {}
        self.features: set[str] = set()
        #: Whether results depend on the order in which microbatches pass through a module.
        self.depends_on_order = False
        #: The modules that ran, and their paths.
        self.modules: set[nn.Module] = set()
        self.ran: list[str] = []
        self._depth = 0
        self._shapes: dict[nn.Module, list[tuple[torch.Size, ...]]] = collections.defaultdict(list)
        self._users: dict[nn.Parameter, set[nn.Module]] = collections.defaultdict(set)
        self._changes: collections.Counter[nn.Module] = collections.Counter()
        self._versions: dict[nn.Module, list[int]] = {}

    def saw(self, feature: str) -> None:
        """A feature occurred."""
        self.features.add(feature)

    def hook(self, name: str, tensor: torch.Tensor, scale: bool) -> None:
        """Put a hook on a tensor that notes its gradients here, and halves them on request."""
        if _is_second_computation():
            return

        def hook(gradient: torch.Tensor | None) -> torch.Tensor | None:
            if gradient is None:  # torch tells hooks of some tensors that no gradient came
                return None
            self.hooks[name].append((self._step(), gradient.detach().clone()))
            return gradient * 0.5 if scale else None

        tensor.register_hook(hook)

    def retain(self, name: str, tensor: torch.Tensor) -> None:
        """Have a tensor keep its gradient, for comparison."""
        if _is_second_computation():
            return
        tensor.retain_grad()
        self.retained[name].append((self._step(), tensor))

    def _step(self) -> int:
        runtime = None if self._plain else find_runtime()
        return 0 if runtime is None else runtime.step.number

    def seen(self) -> dict[str, list[torch.Tensor | None]]:
        """Gradients of hooks and kept ones by name, in an order that depends on neither engine nor schedule."""
        found: dict[str, list[torch.Tensor | None]] = {}
        for name, fired in self.hooks.items():
            found[f"{name}, firing"] = [self.unweighed(gradient) for step, gradient in fired if step in self.ended]
        for name, kept in self.retained.items():
            found[f"{name}, number"] = [self.unweighed(tensor.grad) for step, tensor in kept if step in self.ended]
        return found

    def unweighed(self, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """A gradient of the loss itself."""
        return gradient if gradient is None or self.weight == 1 else gradient / self.weight

    def changes(self, module: nn.Module) -> None:
        """A module changes its buffers."""
        self._changes[module] += 1

    @contextmanager
    def running(self, module: nn.Module, given: list[torch.Tensor]) -> Iterator[None]:
        """A module runs."""
        if not self._plain:
            yield
            return
        self._depth += 1
        if self._depth > 3:  # three below the model itself
            self.saw("depth 3 or more")
        self.modules.add(module)
        self._versions.setdefault(module, _versions(module))
        self._shapes[module].append(tuple(tensor.shape for tensor in given))
        for parameter in module._parameters.values():
            if parameter is not None:
                self._users[parameter].add(module)
                if len(self._users[parameter]) > 1:
                    self.saw("tied parameters")
        try:
            yield
        finally:
            self._depth -= 1

    def end_microbatch(self) -> None:
        """A microbatch is through."""
        for module, shapes in self._shapes.items():
            if len(shapes) > 1:
                self.saw("re-used modules")
            if len(set(shapes)) > 1:
                self.saw("re-use with other shapes")
            if _versions(module) != self._versions[module]:
                self.saw("buffers that change")
                # In order only if the module itself does it, in one place that every microbatch passes once.
                once = len(shapes) == 1 and self._changes[module] == 1
                self.depends_on_order |= not once or "branches" in self.features or "shared buffers" in self.features
        self.depends_on_order |= "state in attributes" in self.features
        self._shapes.clear()
        self._changes.clear()
        self._versions.clear()


def _is_second_computation() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


def _versions(module: nn.Module) -> list[int]:
    """The versions of a module's own tensors."""
    own = (*module._parameters.values(), *module._buffers.values())
    return [tensor._version for tensor in own if tensor is not None]


class _Current:
    """Holds the log behind a name that no code has: anywhere else it would be state that modules share."""

    def __getitem__(self, _: int) -> Log:
        log: Log = globals()["the log"]
        return log

    def __setitem__(self, _: int, log: Log) -> None:
        globals()["the log"] = log


log_of_run = _Current()
log_of_run[0] = Log(plain=True)
