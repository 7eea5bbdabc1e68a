"""Which parameters of a model take part in the reduction of gradients: decided once for an accumulation."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from torch import nn

from shardwright.errors import ShardwrightError
from shardwright.tensor_parallel.sharding import Sharding

if TYPE_CHECKING:
    from shardwright.data_parallel.participants import ModelPart

#: How many parameters an error names.
_MOST_NAMES = 3


class TakingPart:
    """The parameters whose gradients are reduced over replicas, those over DP_GROUP and those over RDP_GROUP.

    A parameter takes part from the first pass in which it is trained to the end of the accumulation, whatever
    ``requires_grad`` says later, and also where another one has taken its place in the model: it may hold a gradient
    that is not reduced yet.

    Attributes:
        digests: Who takes part over DP_GROUP, who over RDP_GROUP, and of which of the latter every tensor-parallel rank
            has a part; in a form that ranks compare.
        changes: What is different from before, in words; empty if nothing is.
    """

    def __init__(self, placement: ModelPart) -> None:
        """Start with nobody."""
        self._placement = placement
        #: Those of the accumulation that runs, with whether they are reduced over RDP_GROUP.
        self._kept: dict[nn.Parameter, bool] = {}
        self._now: tuple[list[nn.Parameter], list[nn.Parameter]] = ([], [])
        self._names: dict[int, str] = {}
        self._left_out: list[nn.Parameter] = []
        self.digests = ("", "", "")
        self.changes = ""

    def begin_pass(
        self, parameters: Sequence[nn.Parameter], shardings: Mapping[int, Sharding]
    ) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Return those that take part in a pass.

        Args:
            parameters: Those of the model on this rank, in the same order on all ranks that hold them.
            shardings: By ``id``, how those are divided over tensor-parallel ranks that are.
        """
        kept = self._kept
        over_rdp = {number for number, sharding in shardings.items() if sharding.over_rdp}
        trained = [one for one in parameters if one.requires_grad or one in kept]
        self._left_out = []
        if len(trained) < len(parameters):
            self._left_out = [one for one in parameters if not one.requires_grad and one not in kept]
        if kept:
            here = set(parameters)
            trained += [one for one in kept if one not in here]
        is_over_rdp = [kept.get(one, id(one) in over_rdp) if kept else id(one) in over_rdp for one in trained]
        pairs = list(zip(trained, is_over_rdp, strict=True))
        now = [one for one, rdp in pairs if not rdp], [one for one, rdp in pairs if rdp]
        if not all(_are_same(one, before) for one, before in zip(now, self._now, strict=True)):
            self._change(now, {number for number, sharding in shardings.items() if sharding.owner is not None})
        return now

    def _change(self, now: tuple[list[nn.Parameter], list[nn.Parameter]], alone: set[int]) -> None:
        before = {id(one) for part in self._now for one in part}
        after = {id(one) for part in now for one in part}
        names = dict(self._names)
        names.update((id(one), name) for name, one in self._placement.module.named_parameters())
        if before:
            lists = (("no longer", before - after), ("now", after - before))
            said = [f"{_listed(names.get(key, '?') for key in keys)} {how}" for how, keys in lists if keys]
            self.changes = " and ".join(said)
        self._names = {key: names.get(key, "?") for key in after}
        self._now = now
        parts = [one for one in now[1] if id(one) not in alone]
        first, second, third = (
            hashlib.blake2b("\n".join(self._names[id(one)] for one in some).encode(), digest_size=8).hexdigest()
            for some in (*now, parts)
        )
        self.digests = (first, second, third)

    def check(self) -> None:
        """Check that all parameters with gradients take part.

        Raises:
            ShardwrightError: One that was frozen when the step began has got a gradient.
        """
        for parameter in self._left_out:
            if parameter.grad is not None:
                names = {id(one): name for name, one in self._placement.module.named_parameters()}
                raise ShardwrightError(
                    f"parameter {names.get(id(parameter), '?')!r} was frozen (requires_grad=False) when the step began "
                    "and has got a gradient in it, which is not reduced over data-parallel ranks: change requires_grad "
                    "between steps"
                )

    def end_pass(self, *, is_reduced: bool) -> None:
        """Keep those of a pass that succeeded for the rest of its accumulation; none where their gradients are reduced.

        That is said at its end, since a model may be placed in the middle of its first pass.
        """
        now = [] if is_reduced else [(one, bool(rdp)) for rdp, part in enumerate(self._now) for one in part]
        self._kept = dict(now)

    def forget_others(self, parameters: Iterable[nn.Parameter]) -> None:
        """Forget those that are not among parameters, because something else holds their gradients."""
        here = set(parameters)
        self._kept = {one: over_rdp for one, over_rdp in self._kept.items() if one in here}


def _are_same(one: Sequence[nn.Parameter], other: Sequence[nn.Parameter]) -> bool:
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))


def _listed(names: Iterable[str]) -> str:
    every = sorted(names)
    more = f" and {len(every) - _MOST_NAMES} more" if len(every) > _MOST_NAMES else ""
    return ", ".join(map(repr, every[:_MOST_NAMES])) + more
