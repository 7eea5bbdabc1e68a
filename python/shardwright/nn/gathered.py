"""Gathering of inputs by the outermost distributed module of a transformer, and the way back to each rank's samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from shardwright.errors import ConfigError
from shardwright.nn.dropout import draw_seed
from shardwright.tensor_parallel.agreement import Agreement
from shardwright.tensor_parallel.group import TensorGroup
from shardwright.tensor_parallel.layouts import HEADS, SHARED, WHOLE, hidden_states, relayout, samples
from shardwright.tensor_parallel.module import DistributedModule


class LayerInputs(NamedTuple):
    """The inputs of a transformer layer; between layers they are passed as a plain tuple.

    N is the batch, S the length of the sequence, K that of the cross states. A first dim of 1 means that the input is
    the same for all samples of all ranks.

    Attributes:
        hidden: [N, S, hidden_size]; [N, S, hidden_size / tp degree] once gathered for memory.
        cross_states: [N, K, hidden_size] for attention to another sequence, divided like ``hidden``.
        mask: [N or 1, 1, 1 or S, S], added to the scores of self-attention.
        cross_mask: [N or 1, 1, 1 or S, K], added to those of cross-attention.
        position_bias: [N or 1, num_attention_heads, 1 or S, S], added to the scores of self-attention. Masks may have
            heads too. Once gathered, it contains this rank's heads.
        cos: [N or 1, S, rotary_dim], the cosines of rotary embeddings of queries and keys.
        sin: The sines, of the same shape.
        seed: The seed of the random numbers of dropout; None without dropout.
    """

    hidden: torch.Tensor
    cross_states: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    cross_mask: torch.Tensor | None = None
    position_bias: torch.Tensor | None = None
    cos: torch.Tensor | None = None
    sin: torch.Tensor | None = None
    seed: int | None = None


#: Inputs besides hidden and cross states. Ranks use them differently, so their gradients are sums over ranks.
_BESIDE = ("mask", "cross_mask", "position_bias", "cos", "sin")


@dataclass(frozen=True)
class GatheredCall:
    """One call of an outermost module, with the gathered inputs and the batch of every tp rank."""

    group: TensorGroup
    inputs: LayerInputs
    batches: list[int]

    def leave(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return this rank's own samples, with all channels."""
        old, new = hidden_states(self.group), samples(self.group)
        return relayout(hidden, old, new, group=self.group, needs_grad=hidden.requires_grad, sizes=self.batches)


def enter(
    module: DistributedModule, inputs: LayerInputs, hidden_size: int, heads: int | None = None, drops: bool = False
) -> GatheredCall:
    """Gather the inputs of an outermost module: one small all-gather for shapes, and what the group's mode requires.

    For speed, hidden states become replicated; for memory, divided over channels. With ``prescaled_batch`` all ranks
    have the same samples, and nothing is sent. Hidden states of a module without heads may have any dims. If shapes or
    dtypes do not match, all ranks raise :class:`ConfigError`.
    """
    group = module.tp_group
    given = {name: one for name, one in inputs._asdict().items() if isinstance(one, torch.Tensor)}
    trained = [name for name in _BESIDE if name in given and torch.is_grad_enabled() and given[name].requires_grad]
    words = [f"{name} with gradient" if name in trained else name for name in given]
    agreement = module.agree(list(given.values()), words, free_dim=samples(group).dim, seed=draw_seed() if drops else 0)
    for rank in range(group.size):
        shapes = dict(zip(given, agreement.signatures[rank].shapes, strict=True))
        _check_shapes(type(module).__name__, rank, shapes, hidden_size, heads)
    for name in _BESIDE:
        if name in given and not given[name].is_floating_point():
            raise ConfigError(
                f"{type(module).__name__}: {name} is {given[name].dtype}; it is added or multiplied, so it has to be "
                "floating"
            )
    batches = agreement.sizes(0)
    if group.size > 1:
        given = {
            **gather_states({name: one for name, one in given.items() if name not in _BESIDE}, agreement, group),
            **_gather_beside(given, trained, agreement, group, heads),
        }
    return GatheredCall(group, LayerInputs(**given, seed=agreement.seed if drops else None), batches)


def gather_states(states: dict[str, torch.Tensor], agreement: Agreement, group: TensorGroup) -> dict[str, torch.Tensor]:
    """Gather hidden and cross states, or one of them, [N, ..., channels] each, into the layout of the group's mode.

    The first tensor of the agreement has the batch in its first dim.
    """
    lies, inside, needs_grad = samples(group), hidden_states(group), agreement.needs_grad
    call: dict[str, Any] = {"group": group, "needs_grad": needs_grad, "sizes": agreement.sizes(0)}
    if inside != WHOLE:
        return dict(zip(states, relayout([*states.values()], lies, inside, **call), strict=True))
    gathered = dict(states)
    if "hidden" in states:
        hidden = relayout(states["hidden"], lies, inside, **call)
        # The backward of other ranks needs this rank.
        gathered["hidden"] = hidden if hidden.requires_grad or not needs_grad else hidden.detach().requires_grad_()
    if "cross_states" in states:  # layers use them for the rank's own heads, so gradients are summed here once
        gathered["cross_states"] = relayout(states["cross_states"], lies, SHARED, **call)
    return gathered


def _gather_beside(
    given: Mapping[str, torch.Tensor], trained: list[str], agreement: Agreement, group: TensorGroup, heads: int | None
) -> dict[str, torch.Tensor]:
    """Return masks, biases and rotary embeddings of all samples, for this rank's heads."""
    batches = agreement.sizes(0)
    gathered: dict[str, torch.Tensor] = {}
    kinds: dict[tuple[bool, bool, bool], list[str]] = {}
    for place, name in enumerate(given):
        if name in _BESIDE:
            has_heads = given[name].dim() == 4 and given[name].shape[1] == heads and heads != 1
            # If all batches are 1, a first dim of 1 is treated as the batch, which is correct for both meanings.
            shared = group.prescaled_batch or agreement.sizes(0, place) != batches
            kinds.setdefault((has_heads, shared, name in trained), []).append(name)
    for (has_heads, shared, needs_grad), names in kinds.items():
        ones = [given[name] for name in names]
        if shared and not group.prescaled_batch:  # this rank's gradient covers its own heads only
            found = [one.chunk(group.size, 1)[group.rank] for one in ones] if has_heads else ones
        else:
            new = HEADS if has_heads else SHARED
            found = relayout(ones, samples(group), new, group=group, needs_grad=needs_grad, sizes=batches)
        gathered.update(zip(names, found, strict=True))
    return gathered


def _check_shapes(
    module: str, rank: int, shapes: Mapping[str, tuple[int, ...]], hidden_size: int, heads: int | None
) -> None:
    """Check the shapes of one rank against each other."""
    hidden = shapes["hidden"]
    if heads is None:
        if len(hidden) < 2 or hidden[-1] != hidden_size:
            raise ConfigError(f"{module}: the input has shape {hidden}; expected [batch, ..., {hidden_size}]")
        return
    batch, length = (*hidden, 0, 0)[:2]
    batches, queries = (batch, 1), (length, 1)
    keys = shapes["cross_states"][1] if len(shapes.get("cross_states", ())) > 1 else length
    needed: dict[str, tuple[tuple[int, ...] | None, ...]] = {
        "hidden": (None, None, (hidden_size,)),
        "cross_states": ((batch,), None, (hidden_size,)),
        "mask": (batches, (1, heads), queries, (length,)),
        "cross_mask": (batches, (1, heads), queries, (keys,)),
        "position_bias": (batches, (heads, 1), queries, (length,)),
        "cos": (batches, (length,), None),
        "sin": (batches, (length,), None),
    }
    check_shapes(module, rank, shapes, needed)
    if shapes.get("cos") != shapes.get("sin"):
        raise ConfigError(
            f"{module}: cos has shape {shapes.get('cos')} and sin {shapes.get('sin')} on tp rank {rank}; both are "
            "needed, of one shape"
        )


def check_shapes(
    module: str,
    rank: int,
    shapes: Mapping[str, tuple[int, ...]],
    needed: Mapping[str, tuple[tuple[int, ...] | None, ...]],
) -> None:
    """Raise unless the shapes of a tp rank have the sizes ``needed`` in each dim, by name; None allows any."""
    for name, shape in shapes.items():
        allowed = needed[name]
        fits = len(shape) == len(allowed) and all(
            of is None or size in of for size, of in zip(shape, allowed, strict=True)
        )
        if not fits:
            words = ", ".join("any" if of is None else " or ".join(map(str, dict.fromkeys(of))) for of in allowed)
            raise ConfigError(f"{module}: {name} has shape {shape} on tp rank {rank}; expected [{words}]")


def tensors_by_name(module: str, inputs: object, names: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """Return the tensors of a caller's tuple by name; all but the first may be None, or omitted at the end.

    Raises:
        ConfigError: It is not a tuple of tensors, or it is too long.
    """
    given = dict(zip(names, inputs, strict=False)) if isinstance(inputs, tuple) else {}
    tensors = {name: one for name, one in given.items() if isinstance(one, torch.Tensor)}
    known = len(tensors) == sum(one is not None for one in given.values())
    if not isinstance(inputs, tuple) or names[0] not in tensors or not known or len(inputs) > len(names):
        words = [type(one).__name__ for one in inputs] if isinstance(inputs, tuple) else type(inputs).__name__
        raise ConfigError(f"{module}: the input is {words}; expected a tuple of tensors: ({', '.join(names)})")
    return tensors
