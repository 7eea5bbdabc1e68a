"""Names and layouts of weights: those of ``transformers``, and those of the distributed modules in their place."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from shardwright.errors import ConfigError
from shardwright.tensor_parallel.sharding import Origin

State = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Weight:
    """One weight of a distributed module, and of which of ``transformers`` it is made.

    Attributes:
        ours: Its name in the distributed module.
        theirs: Names in the module it takes the place of, whose tensors are joined along their first dim.
        transposed: Whether theirs have input channels first.
        by_head: Whether theirs, one, has query, key and value of each head together, and ours all queries first.
    """

    ours: str
    theirs: tuple[str, ...]
    transposed: bool = False
    by_head: bool = False

    def joined(self, tensors: Sequence[torch.Tensor], heads: int | None) -> torch.Tensor:
        """Ours from theirs; a single one as it is."""
        parts = [tensor.mT if self.transposed else tensor for tensor in tensors]
        if self.by_head:
            return self._regrouped(parts[0], 1, 0, heads)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def split(self, tensor: torch.Tensor, of_query: int | None, heads: int | None) -> list[torch.Tensor]:
        """Theirs from ours.

        Where queries, keys and values are one, ``of_query`` rows are of queries; keys have as many as values. The
        number of heads is needed where theirs has them one after another.
        """
        if self.by_head:
            return [self._regrouped(tensor, 0, 1, heads)]
        rows, number = tensor.shape[0], len(self.theirs)
        sizes = [rows // number] * number
        if number == 3 and of_query is not None:
            sizes = [of_query, (rows - of_query) // 2, (rows - of_query) // 2]
        return [part.mT.contiguous() if self.transposed else part.clone() for part in torch.split(tensor, sizes)]

    def origins(self, shapes: Sequence[tuple[int, ...]], heads: int) -> tuple[Origin, ...]:
        """Which rows of ours are which of theirs, given the shapes of theirs."""
        found, first = [], 0
        for name, shape in zip(self.theirs, shapes, strict=True):
            transposed = self.transposed and len(shape) > 1
            count = shape[-1] if transposed else shape[0]
            rows = [(first, 0, count)]
            if self.by_head:
                size = count // (3 * heads)
                places = itertools.product(range(3), range(heads))
                rows = [((part * heads + head) * size, (head * 3 + part) * size, size) for part, head in places]
            found.append(Origin(name, shape, tuple(rows), transposed))
            first += count
        return tuple(found)

    def _regrouped(self, tensor: torch.Tensor, first: int, second: int, heads: int | None) -> torch.Tensor:
        if heads is None:
            raise ConfigError(
                f"{self.ours}: query, key and value of each head lie together, so the number of heads is needed: "
                "num_attention_heads"
            )
        groups = (heads, 3) if first else (3, heads)
        return tensor.reshape(*groups, -1, *tensor.shape[1:]).transpose(first, second).flatten(0, 2)


@dataclass(frozen=True)
class Table:
    """All weights of a distributed module.

    Attributes:
        weights: Them.
        ignored: Names of theirs that are no weights, such as causal masks in older state dicts.
        causal_mask: The name of such a mask, which translation writes if it is told the length.
        path: How names end that stand before those of the module, in state dicts of a whole model.
    """

    weights: tuple[Weight, ...]
    ignored: tuple[str, ...] = ()
    causal_mask: str | None = None
    path: str = r"(^|\.)\d+\."

    def weights_of(self, module: nn.Module, heads: int) -> dict[str, torch.Tensor]:
        """A module's weights by the names of the distributed one, as a weights hook returns them."""
        left = dict(module.state_dict(keep_vars=True))
        found = {}
        for weight in self.weights:
            if weight.theirs[0] in left:
                found[weight.ours] = weight.joined([left.pop(name) for name in weight.theirs], heads)
        unknown = [name for name in left if name not in self.ignored]
        if unknown:
            raise ConfigError(f"it has a {unknown[0]!r}, which has no place in a distributed module")
        return found

    def origins_of(self, module: nn.Module, heads: int) -> dict[str, tuple[Origin, ...]]:
        """Of which of a module's weights each of the distributed one's is made."""
        shapes = {name: tuple(weight.shape) for name, weight in module.state_dict().items()}
        return {
            weight.ours: weight.origins([shapes[name] for name in weight.theirs], heads)
            for weight in self.weights
            if weight.theirs[0] in shapes
        }

    def to_distributed(self, state_dict: State, num_attention_heads: int | None = None) -> dict[str, torch.Tensor]:
        """A state dict of a whole model, with the weights of all layers as the distributed ones have them.

        What is of no layer stays as it is. The number of heads is given where the layout needs it.

        Raises:
            ConfigError: A layer has some of the weights that one of ours is made of, and lacks others.
        """
        rows = {name: weight for weight in self.weights for name in weight.theirs}
        translated: dict[str, torch.Tensor] = {}
        for name, tensor in state_dict.items():
            prefix, own = self._placed(name, (*rows, *self.ignored))
            if own in rows:
                weight = rows[own]
                if prefix + weight.ours not in translated:
                    missing = [one for one in weight.theirs if prefix + one not in state_dict]
                    if missing:
                        raise ConfigError(f"the state dict has {name!r}, but no {prefix + missing[0]!r}")
                    parts = [state_dict[prefix + one] for one in weight.theirs]
                    translated[prefix + weight.ours] = weight.joined(parts, num_attention_heads)
            elif own is None:
                translated[name] = tensor
        return translated

    def to_transformers(
        self, state_dict: State, max_seq_len: int | None = None, num_attention_heads: int | None = None
    ) -> dict[str, torch.Tensor]:
        """The way back, from whole weights; what is of no layer stays as it is.

        With ``max_seq_len``, causal masks of so many positions are added, as older versions of ``transformers`` have
        them.
        """
        rows = {weight.ours: weight for weight in self.weights}
        translated: dict[str, torch.Tensor] = {}
        masked = set()
        for name, tensor in state_dict.items():
            prefix, own = self._placed(name, tuple(rows))
            if own is None:
                translated[name] = tensor
                continue
            weight = rows[own]
            dense = state_dict.get(f"{prefix}{own.partition('query_key_value')[0]}dense.weight")
            parts = weight.split(tensor, None if dense is None else dense.shape[1], num_attention_heads)
            translated.update((prefix + one, part) for one, part in zip(weight.theirs, parts, strict=True))
            if max_seq_len is not None and self.causal_mask is not None and prefix not in masked:
                masked.add(prefix)
                mask = torch.ones(max_seq_len, max_seq_len, dtype=torch.bool).tril()
                translated[prefix + self.causal_mask] = mask.view(1, 1, max_seq_len, max_seq_len)
        return translated

    def _placed(self, name: str, known: Sequence[str]) -> tuple[str, str | None]:
        """A name as what stands before a layer's own, and the layer's own; None if it is of no layer."""
        for prefix in self._prefixes(name):
            if name[len(prefix) :] in known:
                return prefix, name[len(prefix) :]
        return "", None

    def _prefixes(self, name: str) -> Iterator[str]:
        for match in re.finditer(self.path, name):
            yield name[: match.end()]


def linear(ours: str, *theirs: str, transposed: bool = False) -> tuple[Weight, ...]:
    """The weight and the bias of a linear layer or a normalization, made of those of one or several.

    If ``transposed``, their weights have input channels first.
    """
    return (
        Weight(f"{ours}.weight", tuple(f"{name}.weight" for name in theirs), transposed),
        Weight(f"{ours}.bias", tuple(f"{name}.bias" for name in theirs)),
    )
