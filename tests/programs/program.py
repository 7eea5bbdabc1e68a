"""A program over nested modules as data, and its step functions."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.programs.blocks import WIDTH
from tests.programs.building import Spec, build
from tests.programs.lives import lived
from tests.programs.log import log_of_run


@dataclasses.dataclass
class Program:
    """A program.

    Attributes:
        seed: The seed of its weights and inputs.
        tree: Its modules.
        ranks: The number of ranks.
        auto: Whether modules that are not placed by hand are placed by cost, not with their parents.
        memory_weight: The weight of memory in that.
        microbatches: The number of microbatches.
        pipeline: The schedule.
        active: The number of microbatches under way.
        steps: How often the step function is called.
        read: Which of the root's tensors the loss reads.
        roots: Whether backward starts from ``one`` loss or from ``several``, or is called (``calls``) for each.
        leaves: Whether the model is given leaves.
        places: Where modules are placed by hand, by path.
        static: Whether callers go on before results are there.
        fast: Whether static mode leaves results where they are made.
        static_steps: From which step on, counted from 0; in the first one from its second microbatch on.
        width: That of the inputs.
        rows: How many rows a microbatch has.
        handles: Whether large results stay where they are made until they are used, in dynamic mode.
        evaluations: After which steps the model is evaluated, and how: ``no_grad`` or ``inference_mode``.
        updates: Whether weights change between steps.
        processes: Whether its ranks are processes of their own.
        checkpointed: The modules that are checkpointed, by path, each with the strategy of an ``nn.Sequential``.
        replicas: How many data-parallel replicas it has, each of which trains on a multiple of the losses.
        sharded: Whether their optimizer's state is sharded.
        layout: How replicas divide parameters: not at all, over ``tensor`` parallel ranks, or as ``sharded_data``.
        optimizer: Whose updates, one of :data:`tests.programs.optimizers.OPTIMIZERS`; none: those of a function.
        passes: How many steps' gradients are accumulated for an update.
        life: What was done with the model before it is wrapped, one of :data:`tests.programs.lives.LIVES`.
        hooks: Hooks of parameters: their names, and kinds of :mod:`tests.programs.script`.
        events: What is done before which step, or after all, in order: the step, and words of
            :mod:`tests.programs.script`.
        resumes: Before which steps the job is saved and ends, and a new one resumes it.
    """

    seed: str
    tree: Spec
    ranks: int
    auto: bool
    memory_weight: float
    microbatches: int
    pipeline: str
    active: int
    steps: int
    read: list[int]
    roots: str
    leaves: bool
    places: dict[str, int] = dataclasses.field(default_factory=dict)
    static: bool = False
    fast: bool = True
    static_steps: int = 0
    width: int = WIDTH
    rows: int = 2
    handles: bool = True
    evaluations: list[tuple[int, str]] = dataclasses.field(default_factory=list)
    updates: bool = False
    processes: bool = False
    checkpointed: dict[str, str] = dataclasses.field(default_factory=dict)
    replicas: int = 1
    sharded: bool = False
    layout: str = ""
    optimizer: str = ""
    passes: int = 1
    life: str = ""
    hooks: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    events: list[tuple[Any, ...]] = dataclasses.field(default_factory=list)
    resumes: list[int] = dataclasses.field(default_factory=list)

    def built(self, further: int = 0) -> nn.Module:
        """The model with weights of its seed, or with further ones."""
        torch.manual_seed(int(self.seed.partition(".")[0]) + further)
        return build(self.tree, {}).double()

    def start(self) -> tuple[nn.Module, torch.Tensor]:
        """The model with its weights, and a batch: two inputs for each microbatch, one beside the other."""
        model = self.built()
        shape = (self.rows * self.microbatches, self.width)
        batch = torch.cat([torch.randn(*shape, dtype=torch.float64) for _ in range(2)], 1)
        return lived(self, model, batch) if self.life else model, batch

    def other_state(self, further: int) -> dict[str, Any]:
        """The state of a model with other weights, and with small numbers in its buffers."""
        return self.built(1000 * further).state_dict()

    def legs(self) -> list[tuple[int, int]]:
        """The first step of each job, and the step before which it ends."""
        return list(itertools.pairwise([0, *self.resumes, self.steps]))

    def events_before(self, step: int) -> list[tuple[Any, ...]]:
        """What is done before a step."""
        return [tuple(event[1:]) for event in self.events if event[0] == step]

    def updates_after(self, step: int) -> bool:
        """Whether weights change after a step."""
        return self.updates and (step + 1) % self.passes == 0

    def batch_of(self, batch: torch.Tensor, step: int) -> torch.Tensor:
        """The batch of a step."""
        return batch.roll(step, 0) if self.updates else batch

    def settings(self) -> dict[str, Any]:
        """The configuration keys."""
        return {
            "microbatches": self.microbatches,
            "pipeline": self.pipeline,
            "active_microbatches": self.microbatches if self.pipeline == "simple" else self.active,
            "auto_partition": self.auto,
            "default_partition": 0,
            "memory_weight": self.memory_weight,
            "static_mode": self.static,
            "fast_mode": self.static and self.fast,
            "tensor_handles": self.handles,
        }

    def evaluations_after(self, step: int) -> list[str]:
        """How the model is evaluated after a step."""
        return [kind for after, kind in self.evaluations if after == step]

    def arguments(self, batch: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The leaves of a microbatch in training, and what the model is given."""
        inputs = [tensor.clone() for tensor in batch.chunk(2, 1)]
        inputs[0].requires_grad_()
        return inputs, inputs if self.leaves else [tensor * 1 for tensor in inputs]

    def step(self, model: Any, batch: torch.Tensor, index: str, backward: Any) -> torch.Tensor:
        """The step function, of one microbatch: run, read the loss, backward."""
        log = log_of_run[0]
        inputs, given = self.arguments(batch)
        tensors = model(*given)
        chosen = [tensors[place % len(tensors)] for place in self.read]
        terms = [((number + 1) * tensor).sum() for number, tensor in enumerate(chosen)]
        loss = sum(terms[1:], start=terms[0])
        log.finals[index] = [tensor.detach().clone() for tensor in tensors]
        roots = [loss] if self.roots == "one" else [term for term in terms if term.requires_grad]
        if self.roots == "several" and len(roots) > 1:
            log.saw("several backward roots")
            backward(roots, [torch.full((), 0.5 + number, dtype=torch.float64) for number in range(len(roots))])
        elif self.roots == "calls" and len(roots) > 1:
            log.saw("several backward roots")
            for root in roots:
                backward(root)
        elif roots and roots[0].requires_grad:
            backward(roots[0])
        log.finals[index] += [log.unweighed(tensor.grad) for tensor in inputs]
        return loss.detach()

    def evaluate(self, model: Any, batch: torch.Tensor, index: str) -> torch.Tensor:
        """The step function of an evaluation."""
        log_of_run[0].saw("evaluation steps")
        tensors = model(*(tensor.clone() for tensor in batch.chunk(2, 1)))
        log_of_run[0].finals[index] = [tensor.detach().clone() for tensor in tensors]
        result: torch.Tensor = tensors[-1].detach().mean()
        return result


def weighed(backward: Callable[..., None], weight: float) -> Callable[..., None]:
    """A backward of a multiple of its roots."""

    def run(roots: Any, gradients: list[torch.Tensor] | None = None) -> None:
        if gradients is None:
            backward(roots * weight)
        else:
            backward(roots, [gradient * weight for gradient in gradients])

    return run
