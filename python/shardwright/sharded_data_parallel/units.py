"""Which modules gather their parameters together, and which parameters are sharded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from shardwright.data_parallel.sparse import sparse_parameters
from shardwright.errors import ConfigError
from shardwright.job.runtime import Runtime

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)
#: Modules that compute with the parameters of their children, without a call of these.
_WITHOUT_CALLS = (nn.MultiheadAttention,)


def choose(module: nn.Module, parameters: Sequence[nn.Parameter], threshold: int) -> list[nn.Parameter]:
    """Return the parameters that are sharded: those of at least ``threshold`` elements.

    All have the dtype with the most elements among them, since those of one collective have to be of one. Parameters
    with sparse gradients, with gaps in memory, or of scripted modules, in which nothing can take their place, stay
    whole, and so do single numbers.
    """
    scripted = [part for part in module.modules() if isinstance(part, torch.jit.ScriptModule)]
    whole = {*sparse_parameters(module), *(id(one) for part in scripted for one in part.parameters())}
    found = [
        one
        for one in parameters
        if one.numel() >= max(1, threshold) and one.dim() and one.is_contiguous() and id(one) not in whole
    ]
    elements: Counter[torch.dtype] = Counter()
    for parameter in found:
        elements[parameter.dtype] += parameter.numel()
    dtype = max(elements, key=lambda one: (elements[one], str(one)), default=None)
    return [one for one in found if one.dtype is dtype]


def units(module: nn.Module, sharded: set[nn.Parameter], max_elements: int) -> list[nn.Module]:
    """Return the modules whose parameters are gathered when they are called, inner ones first; ``module`` is the last.

    They are what stands in lists, dicts and sequences of modules, and, of a module with more elements than
    ``max_elements``, the modules inside it. A module that shares a parameter with others outside it is none.
    """
    holders: dict[nn.Parameter, set[nn.Module]] = {}
    for part in module.modules():
        for parameter in part._parameters.values():
            if parameter is not None and parameter in sharded:
                holders.setdefault(parameter, set()).add(part)

    def own(part: nn.Module) -> list[nn.Parameter]:
        return [one for one in part.parameters() if one in sharded]

    def may_be(part: nn.Module) -> bool:
        inside = set(part.modules())
        found = own(part)
        return bool(found) and all(holders[one] <= inside for one in found)

    def divided(part: nn.Module) -> Iterator[nn.Module]:
        if sum(one.numel() for one in own(part)) <= max_elements or isinstance(part, _WITHOUT_CALLS):
            return
        for child in part.children():
            if isinstance(child, _CONTAINERS):
                yield from within(child)
            elif may_be(child):
                yield from divided(child)
                yield child

    def within(part: nn.Module) -> Iterator[nn.Module]:
        for child in part.children():
            if isinstance(part, (*_CONTAINERS, nn.Sequential)) and not isinstance(child, _CONTAINERS) and may_be(child):
                yield from divided(child)
                yield child
            else:
                yield from within(child)

    found = dict.fromkeys(within(module))
    found.pop(module, None)
    return [*found, module]


def buckets(parameters: Sequence[nn.Parameter], max_elements: int) -> list[list[nn.Parameter]]:
    """Divide parameters into consecutive lists of at most so many elements; a larger parameter is alone in one."""
    found: list[list[nn.Parameter]] = []
    elements = 0
    for parameter in parameters:
        if not found or elements + parameter.numel() > max_elements:
            found.append([])
            elements = 0
        found[-1].append(parameter)
        elements += parameter.numel()
    return found


def may_gather_ahead(sizes: Sequence[int], limit: int) -> list[bool]:
    """Return by unit whether the next one in a backward may be gathered while this one is whole.

    Args:
        sizes: By unit, in the order of forwards, how many elements it gathers. The last is the model itself, whose own
            stay gathered in all of the others.
        limit: How many elements may be whole together.
    """
    *inner, root = sizes
    found = []
    for number, own in enumerate(inner):
        beside = [*inner[max(0, number - 1) : number], *inner[number + 1 : number + 2]]
        found.append(root + own + max(beside, default=0) <= limit)
    return [*found, True]


def check_live(runtime: Runtime, module: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
    """Check that a stage of a pipeline may gather all of its parameters.

    Raises:
        ConfigError: They have more elements than ``sdp_max_live_parameters``.
    """
    cfg = runtime.place.cfg
    limit = int(cfg.sdp_max_live_parameters)
    elements = sum(one.numel() for one in choose(module, parameters, int(cfg.sdp_param_persistence_threshold)))
    if elements > limit:
        raise ConfigError(
            f'the configuration key "sdp_max_live_parameters" is {limit}, but stage {runtime.place.pp_rank} of the '
            f"pipeline has {elements} elements of sharded parameters, which it gathers for a whole step, since "
            "replicas run modules in different orders: give a larger number, or use a larger pipeline_parallel_degree"
        )
