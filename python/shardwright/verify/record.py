"""Records every module call: fingerprints of its outputs, and of the gradients that reach them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from shardwright.frames.cut import slot_of
from shardwright.frames.remote import made_by
from shardwright.partition import is_tracing
from shardwright.values import register_type
from shardwright.verify.fingerprint import Fingerprint, fingerprint
from shardwright.verify.measure import tensors_in

#: A module's path, the microbatch, and the index of the call in the microbatch.
CallKey = tuple[str, int, int]
#: A call and one of its tensors: the index of an output, or -1 for its first positional argument, -2 for the second.
TensorKey = tuple[CallKey, int]


@register_type
@dataclass
class ModuleRecord:
    """All calls of one run.

    Attributes:
        calls: By call, in the order of their returns: its outputs, and whether each requires a gradient.
        gradients: By tensor, in the order of arrival: the whole gradient that reached it.
        watched: The tensors whose gradient would have been observed.
        dtypes: The floating-point dtypes of outputs and of autocast.
    """

    calls: dict[CallKey, list[tuple[Fingerprint, bool]]] = field(default_factory=dict)
    gradients: dict[TensorKey, Fingerprint] = field(default_factory=dict)
    watched: set[TensorKey] = field(default_factory=set)
    dtypes: set[str] = field(default_factory=set)


class Recorder:
    """Records the calls of some modules, by hooks on all modules that leave nothing in them.

    Gradients are observed where autograd runs the node that made a tensor. Such a hook sees the whole gradient, once,
    also in a frame whose backward runs level by level. The library's guards of hooks on tensors do not apply to it.
    """

    def __init__(self, paths: Mapping[nn.Module, str], microbatch: Callable[[], int]) -> None:
        """Record the modules in ``paths``. ``microbatch`` returns the running microbatch."""
        self.record = ModuleRecord()
        self._paths = paths
        self._microbatch = microbatch
        self._entered: Counter[tuple[str, int]] = Counter()
        self._returned: Counter[tuple[str, int]] = Counter()
        self._last: tuple[torch.Tensor, Fingerprint] | None = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record within the block."""
        handles = [
            register_module_forward_pre_hook(self._before),
            register_module_forward_hook(self._after, with_kwargs=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._last = None

    def _path(self, module: nn.Module) -> str | None:
        # Calls during a backward come from a checkpoint that recomputes a part of the forward.
        return None if is_tracing() or torch._C._current_graph_task_id() != -1 else self._paths.get(module)

    def _before(self, module: nn.Module, args: Any) -> None:
        path = self._path(module)
        if path is not None:
            self.entered(path, args)

    def entered(self, path: str, args: Any) -> CallKey:
        """Record the call of a module, on this or another rank, with these positional arguments."""
        key = _next(self._entered, path, self._microbatch())
        for number, tensor in enumerate(tensors_in(args)):
            self._watch((key, -1 - number), tensor)
        return key

    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        path = self._path(module)
        if path is not None:
            self.returned(path, output)

    def returned(self, path: str, output: Any) -> None:
        """Record the return of a module that runs on this rank."""
        key = _next(self._returned, path, self._microbatch())
        tensors = tensors_in(output)
        self.record.calls[key] = [(fingerprint(tensor), tensor.requires_grad) for tensor in tensors]
        for number, tensor in enumerate(tensors):
            self._watch((key, number), tensor)
            self.record.dtypes.add(str(tensor.dtype).removeprefix("torch."))
            kind = tensor.device.type
            if torch.is_autocast_enabled(kind):
                self.record.dtypes.add(str(torch.get_autocast_dtype(kind)).removeprefix("torch."))

    def _watch(self, key: TensorKey, tensor: torch.Tensor) -> None:
        node = tensor.grad_fn
        # A tensor of another rank is observed there: an output on the rank of its module, an argument on its caller's.
        if node is not None and slot_of(made_by(node)) is None:
            self.record.watched.add(key)
            node.register_prehook(partial(self._arrived, key, tensor.output_nr))

    def _arrived(self, key: TensorKey, number: int, gradients: tuple[torch.Tensor | None, ...]) -> None:
        gradient = gradients[number] if number < len(gradients) else None
        if gradient is None:
            return
        if self._last is None or self._last[0] is not gradient:  # a tensor may have several keys
            self._last = gradient, fingerprint(gradient)
        self.record.gradients.pop(key, None)  # in a second backward, the last gradient counts
        self.record.gradients[key] = self._last[1]


def _next(counts: Counter[tuple[str, int]], path: str, microbatch: int) -> CallKey:
    call = counts[path, microbatch]
    counts[path, microbatch] += 1
    return path, microbatch, call
