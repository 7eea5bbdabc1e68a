"""Replace marked modules by distributed ones, in place (paper, section 5.2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parametrize

from shardwright import logs
from shardwright.delayed.agreement import draw_as_first
from shardwright.delayed.materialise import has_delayed
from shardwright.delayed.tensor import DelayedTensor, real
from shardwright.errors import ConfigError
from shardwright.frames.checkpointing import mark_of as is_checkpointed
from shardwright.job.exchange import wait_collective
from shardwright.job.objects import gathered
from shardwright.job.ranks import TP_GROUP
from shardwright.job.runtime import Runtime
from shardwright.job.wrapped import WrappedModels
from shardwright.tensor_parallel.gradients import has_gradients
from shardwright.tensor_parallel.marking import mark_of
from shardwright.tensor_parallel.module import DistributedModule
from shardwright.tensor_parallel.references import References
from shardwright.tensor_parallel.registry import Entry, registered
from shardwright.tensor_parallel.replaced import ReplacedParameters
from shardwright.tensor_parallel.substitution import Substitution, substitution_of, unfit
from shardwright.transformers_models import collector

_OPERATION = "smp.DistributedModel"


BuiltIn = Callable[[type[nn.Module]], Entry | None]


@dataclass(frozen=True)
class Replacement:
    """The outcome for one module that was marked for tensor parallelism.

    Attributes:
        name: The module's name in the model; empty for the model itself. For a module used at several places, the
            first name.
        module: The module's class.
        substitute: The class of the distributed module that replaced it; None if it was not replaced.
        reason: Why it was not replaced; empty if it was replaced.
        fresh: The parameters of the distributed module that were initialized anew, not taken from the original.
        supported: Whether there is a distributed implementation of its class.
        part_of: The name of the replaced module that contained it; None if there is none.
    """

    name: str
    module: str
    substitute: str | None = None
    reason: str = ""
    fresh: tuple[str, ...] = ()
    supported: bool = True
    part_of: str | None = None


@dataclass(frozen=True)
class Result:
    """The result of :func:`replace`.

    Attributes:
        module: The model, which is a different module if it was replaced itself.
        replacements: The outcome for each marked module, in the model's order.
        unused_options: Names of arguments of marks that no distributed module accepts.
    """

    module: nn.Module
    replacements: tuple[Replacement, ...] = ()
    unused_options: tuple[str, ...] = ()


class ReplacesAlone:
    """Kept for a rank whose marked modules are replaced at a degree of 1 too, for what distributed modules have.

    The original library does so: its scripts look for the layers of a distributed transformer at every degree.
    """


class _Plan:
    """The replacements that this rank plans, from its model only, without communication."""

    def __init__(self, root: nn.Module, seed: str, built_in: BuiltIn) -> None:
        self._built_in = built_in
        self.references = References(root)
        self.replacements: list[Replacement] = []
        self.substitutions: list[Substitution] = []
        self.unused_options: set[str] = set()
        self._seed = seed
        self._seen: set[int] = set()
        self._visit(root)
        for each in self.substitutions:
            self.unused_options -= each.options

    def _visit(self, module: nn.Module) -> None:
        if id(module) in self._seen:
            return
        self._seen.add(id(module))
        mark = mark_of(module)
        if isinstance(module, DistributedModule):
            return
        if mark is not None and mark.enabled:
            self.unused_options.update(mark.options)
            if self._replace(module):
                return
        for child in module.children():
            self._visit(child)

    def _replace(self, module: nn.Module) -> bool:
        name, cls = self.references.names[id(module)], type(module)
        mark = mark_of(module)
        assert mark is not None, "only marked modules are replaced"
        entry = registered(cls) or self._built_in(cls)
        if entry is None:
            parametrized = parametrize.is_parametrized(module)  # parametrization gives it its own class
            reason = (
                "it has a parametrization" if parametrized else "there is no distributed implementation of its class"
            )
            self.replacements.append(Replacement(name, cls.__qualname__, reason=reason, supported=False))
            return False
        obstacle = self._obstacle(module, entry)
        if obstacle is None:
            try:
                made = substitution_of(module, entry, mark.options, f"{self._seed} {name}")
            except ConfigError as error:
                obstacle = str(error)
            except Exception as error:
                error.add_note(
                    f"while {cls.__qualname__} {name!r} was to be replaced by {entry.dist_module.__qualname__}"
                )
                raise
        if obstacle is not None:
            self.replacements.append(Replacement(name, cls.__qualname__, reason=obstacle))
            return False
        self.substitutions.append(made)
        substitute = entry.dist_module.__qualname__
        self.replacements.append(Replacement(name, cls.__qualname__, substitute, fresh=made.fresh))
        for part in module.modules():
            if part is not module and id(part) not in self._seen:
                self._seen.add(id(part))
                if is_checkpointed(part) is not None:
                    part_name = self.references.names[id(part)]
                    logs.warn_once(
                        f"smp.set_activation_checkpointing of {part_name!r} has no effect: it was a part of {name!r}, "
                        "which is replaced for tensor parallelism. Mark that, or the parts of what stands there now"
                    )
                inside = mark_of(part)
                if inside is not None and inside.enabled:
                    self.unused_options.update(inside.options)
                    reason = f"{self.references.safe_repr(module)} was replaced, which it is a part of"
                    part_name = self.references.names[id(part)]
                    self.replacements.append(
                        Replacement(part_name, type(part).__qualname__, reason=reason, part_of=name)
                    )
        return True

    def _obstacle(self, module: nn.Module, entry: Entry) -> str | None:
        for name, part in module.named_modules():
            mark = mark_of(part)
            if mark is not None and not mark.enabled:
                return f"tensor parallelism is disabled for its part {name!r}"
            if isinstance(part, DistributedModule):
                return f"its part {name!r} is a distributed module already"
        for parent, _ in self.references.uses.get(id(module), ()):
            if isinstance(parent, nn.TransformerEncoderLayer):
                return "nn.TransformerEncoderLayer computes with its weights past it, where nothing is trained"
        reason = unfit(module) or self.references.from_outside(module)
        if reason is None and entry.weights_hook is None:
            reason = self.references.shared_inside(module)
        return reason


def replace(module: nn.Module, runtime: Runtime, built_in: BuiltIn) -> Result:
    """Replace the marked modules of a model in place by distributed ones with the same weights.

    All ranks of TP_GROUP must call it together, with the same model. A module is replaced if it is marked, if there is
    a distributed implementation of exactly its class that supports its sizes, if no ancestor was replaced, and if it
    shares no parameters (paper, section 5.2). All ranks get parts of the weights of tp rank 0. At a degree of 1 there
    are no outcomes, unless the rank keeps :class:`ReplacesAlone`. ``built_in`` returns the library's own entry for a
    class, if there is one.

    Raises:
        ConfigError: The ranks did not mark the same modules of the same model; all ranks raise it.
    """
    if len(runtime.place.tp_ranks) == 1 and runtime.find(ReplacesAlone) is None:
        return Result(module)
    collector.install(module)  # before modules of transformers from which outputs are collected are replaced
    seed = gathered(_OPERATION, torch.initial_seed(), TP_GROUP)[0]
    plan = _Plan(module, f"{seed} {runtime[WrappedModels].count}", built_in)
    _check_the_same(gathered(_OPERATION, plan.replacements, TP_GROUP))
    replacements, unused, substitutions = plan.replacements, plan.unused_options, plan.substitutions
    uses = [plan.references.uses.get(id(each.module), []) for each in substitutions]
    names = [plan.references.names[id(each.module)] for each in substitutions]
    same = _draw_as_first(substitutions, runtime)
    graded = gathered(_OPERATION, [has_gradients(each.module) for each in substitutions], TP_GROUP)
    have_gradients = [any(of_ranks) for of_ranks in zip(*graded, strict=True)]
    del plan  # it holds the originals, whose memory can then be freed one after another
    while substitutions:
        each = substitutions.pop(0)
        for name, weight in each.weights():
            stays = same and isinstance(weight, DelayedTensor) and not weight.is_written
            each.take(name, weight if stays else _from_first_rank(weight, runtime))
        each.finish()
        if have_gradients.pop(0):
            _take_gradients(each, runtime)
        runtime[ReplacedParameters].add(names.pop(0), each.module)
        for parent, child_name in uses.pop(0):
            parent._modules[child_name] = each.substitute
        if each.module is module:
            module = each.substitute
    return Result(module, tuple(replacements), tuple(sorted(unused)))


def _take_gradients(each: Substitution, runtime: Runtime) -> None:
    """Give a substitute the gradients of its original: their mean over tp ranks, as that of replicas is taken."""
    own = each.gradients()
    shapes = {name: shape for told in gathered(_OPERATION, _shapes(own), TP_GROUP) for name, shape in told.items()}
    for name, shape in sorted(shapes.items()):
        mean = own[name] if name in own else torch.zeros(shape)
        ranks = runtime.place.tp_ranks
        if len(ranks) > 1:
            mean = mean.to(runtime.place.device, torch.float64, copy=True, memory_format=torch.contiguous_format)
            work = dist.all_reduce(mean, group=runtime.process_groups["TP_GROUP"], async_op=True)
            wait_collective(runtime, work, ranks)
            mean /= len(ranks)
        each.take_gradient(name, mean)


def _shapes(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(one.shape) for name, one in tensors.items()}


def _draw_as_first(substitutions: list[Substitution], runtime: Runtime) -> bool:
    """Make delayed weights the same as those of tp rank 0 on all ranks, so that they need not be created and sent."""
    delayed = (each for each in substitutions if has_delayed(each.module))
    weights = (weight for each in delayed for _, weight in each.weights())
    values = [weight.value for weight in weights if isinstance(weight, DelayedTensor) and not weight.is_written]
    return draw_as_first(
        values,
        lambda value: gathered(_OPERATION, value, TP_GROUP),
        is_first=runtime.place.tp_ranks[0] == runtime.place.rank,
    )


def _check_the_same(plans: list[list[Replacement]]) -> None:
    """Compare every rank's plan with that of tp rank 0; every rank has all plans and raises the same error."""
    for tp_rank, plan in enumerate(plans):
        for first, other in zip_longest(plans[0], plan):
            if first != other:
                raise ConfigError(
                    "smp.DistributedModel: all tp ranks have to mark the same modules of the same model, but there is "
                    f"{_told(first)} on tp rank 0 and {_told(other)} on tp rank {tp_rank}"
                )


def _told(one: Replacement | None) -> str:
    if one is None:
        return "no further marked module"
    outcome = f"to be replaced by {one.substitute}" if one.substitute else f"not to be replaced ({one.reason})"
    return f"{one.module} {one.name!r} {outcome}"


def _from_first_rank(tensor: torch.Tensor, runtime: Runtime) -> torch.Tensor:
    """Return tp rank 0's values of a tensor that all tp ranks have, on the device of this rank's tensor."""
    values = real(tensor) if isinstance(tensor, DelayedTensor) else tensor.detach()
    if len(runtime.place.tp_ranks) == 1:
        return values
    group = runtime.process_groups["TP_GROUP"]
    sent = values.to(runtime.place.device, memory_format=torch.contiguous_format, copy=True)
    as_bytes = sent.view(-1).view(torch.uint8)  # backends do not know all dtypes
    work = dist.broadcast(as_bytes, dist.get_global_rank(group, 0), group, async_op=True)
    wait_collective(runtime, work, runtime.place.tp_ranks)
    return sent.to(tensor.device)
