"""A linear layer in tiles: for weights that are too large to be one parameter."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn

from shardwright.errors import ConfigError


class TiledLinear(nn.Module):
    """A linear layer whose weight is a grid of tiles, each a linear layer of its own.

    Tiles can be placed on ranks, sharded, offloaded and checkpointed one by one. They are called one after another, and
    each product is added to the sum before the next is computed.

    The input is [..., in_features], the output [..., out_features]. With several ``in_splits``, sums over input
    features are those of ``nn.Linear`` in another order; in half precision they are rounded after each tile.

    Attributes:
        in_features: The number of input features of the whole layer.
        out_features: The number of output features of the whole layer.
        tiles: ``tiles[o][i]`` computes the o-th part of the output features from the i-th part of the input features.
            The tiles of the first part have the bias. Keys of state dicts are ``tiles.{o}.{i}.weight`` and
            ``tiles.{o}.0.bias``.
    """

    tiles: Any

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Create a layer with newly initialized weights; on the CPU, those of ``nn.Linear`` from the same seed.

        Args:
            in_features: The number of input features.
            out_features: The number of output features.
            bias: Whether the layer has a bias.
            in_splits: The number of parts that the input features are divided into. Their sizes differ by at most one.
            out_splits: The number of parts that the output features are divided into, likewise.
            device: The device of the parameters; None for the default one.
            dtype: Their dtype; None for the default one.

        Raises:
            ConfigError: A number of parts is not between 1 and the number of features.
        """
        super().__init__()
        for name, splits, features in (("in", in_splits, in_features), ("out", out_splits, out_features)):
            if not 1 <= splits <= max(features, 1):
                raise ConfigError(
                    f"TiledLinear: {name}_splits is {splits} and {name}_features {features}; expected 1 to "
                    f"{max(features, 1)} parts"
                )
        self.in_features, self.out_features = in_features, out_features
        self._columns, self._rows = _bounds(in_features, in_splits), _bounds(out_features, out_splits)
        self.tiles = nn.ModuleList(
            nn.ModuleList(
                _Tile(end - start, bottom - top, bias and not start, device, dtype)
                for start, end in pairwise(self._columns)
            )
            for top, bottom in pairwise(self._rows)
        )
        self.reset_parameters()

    @classmethod
    def from_linear(cls, linear: nn.Linear, in_splits: int = 1, out_splits: int = 1) -> TiledLinear:
        """Return a tiled layer with copies of the values of a linear layer.

        Args:
            linear: The layer.
            in_splits: The number of parts that the input features are divided into.
            out_splits: The number of parts that the output features are divided into.

        Raises:
            ConfigError: A number of parts is not between 1 and the number of features.
        """
        weight, bias = linear.weight, linear.bias
        tiled = cls(
            linear.in_features, linear.out_features, bias is not None, in_splits, out_splits, "meta", weight.dtype
        )
        for tile, rows, columns in tiled._grid():
            tile.weight = nn.Parameter(weight.detach()[rows, columns].clone(), weight.requires_grad)
            if tile.bias is not None:
                tile.bias = nn.Parameter(bias.detach()[rows].clone(), bias.requires_grad)
        return tiled.train(linear.training)

    def to_linear(self) -> nn.Linear:
        """Return an ``nn.Linear`` with copies of the values; a parameter is trained if any of its tiles is.

        Raises:
            NotOwnedError: Tiles are on other ranks.
        """
        (first, *_), *_ = self.tiles
        linear = nn.Linear(
            self.in_features, self.out_features, first.bias is not None, device="meta", dtype=first.weight.dtype
        ).to_empty(device=first.weight.device)
        with torch.no_grad():
            for tile, rows, columns in self._grid():
                linear.weight[rows, columns] = tile.weight
                if tile.bias is not None:
                    linear.bias[rows] = tile.bias
        linear.weight.requires_grad_(any(tile.weight.requires_grad for tile, _, _ in self._grid()))
        if first.bias is not None:
            linear.bias.requires_grad_(any(row[0].bias.requires_grad for row in self.tiles))
        return linear.train(self.training)

    def reset_parameters(self) -> None:
        """Initialize the parameters anew, as ``nn.Linear`` does."""
        fan_in = max(self.in_features, 1)
        # The same rounding as in kaiming_uniform_, and in what nn.Linear has for its bias.
        weight_bound = math.sqrt(3.0) * (nn.init.calculate_gain("leaky_relu", math.sqrt(5)) / math.sqrt(fan_in))
        bound = 1 / math.sqrt(fan_in)
        with torch.no_grad():
            for row in self.tiles:
                self._draw_row(list(row), weight_bound)
            for first, *_ in self.tiles:
                if first.bias is not None:
                    nn.init.uniform_(first.bias, -bound, bound)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Apply the layer.

        Args:
            input: [..., in_features].

        Returns:
            [..., out_features].

        Raises:
            ConfigError: The last dim of the input is not ``in_features``.
        """
        shape = input.shape
        if not shape or shape[-1] != self.in_features:
            raise ConfigError(
                f"TiledLinear: the input has shape {tuple(shape)}; expected [..., {self.in_features}] features"
            )
        # Slices of a matrix are multiplied without a copy, those of a tensor with more dims are not.
        matrix = input.reshape(shape[:-1].numel(), self.in_features)
        parts = torch.split(matrix, _sizes(self._columns), -1)
        accumulated: Any = _Accumulated.apply
        total: Any = None
        for row, start in zip(self.tiles, self._rows, strict=False):
            for tile, part in zip(row, parts, strict=True):
                product = tile(part)
                if total is None:
                    total = product.new_empty(product.shape[0], self.out_features)
                total = accumulated(total, product, start, tile is row[0])
                # Not alive beside the next one.
                del product
        return torch.as_tensor(total.view(*shape[:-1], self.out_features))

    def extra_repr(self) -> str:
        """Return the arguments shown in the module's ``repr``."""
        splits = f"in_splits={len(self._columns) - 1}, out_splits={len(self._rows) - 1}"
        return f"in_features={self.in_features}, out_features={self.out_features}, {splits}"

    def _grid(self) -> Iterator[tuple[Any, slice, slice]]:
        """Yield each tile with its rows and columns of the whole weight."""
        for row, (top, bottom) in zip(self.tiles, pairwise(self._rows), strict=True):
            for tile, (start, end) in zip(row, pairwise(self._columns), strict=True):
                yield tile, slice(top, bottom), slice(start, end)

    def _draw_row(self, row: list[Any], bound: float) -> None:
        """Draw the weights of one row of tiles in the order of the whole weight, about a tile's size at a time."""
        first, *others = row
        if not others:
            nn.init.uniform_(first.weight, -bound, bound)
            return
        bands = [list(torch.split(tile.weight, -(-len(first.weight) // len(row)))) for tile in row]
        for targets in zip(*bands, strict=True):
            drawn = targets[0].new_empty(len(targets[0]), self.in_features)
            nn.init.uniform_(drawn, -bound, bound)
            for target, values in zip(targets, torch.split(drawn, _sizes(self._columns), -1), strict=True):
                target.copy_(values)


class _Tile(nn.Linear):
    """One tile, whose values come from the layer that it is part of."""

    def reset_parameters(self) -> None:
        """Draw nothing: the numbers are those of the whole weight."""


class _Accumulated(torch.autograd.Function):
    """Add a tile's product to columns of the sum in place; autograd's own slices copy the gradient for each tile."""

    @staticmethod
    def forward(total: torch.Tensor, product: torch.Tensor, start: int, is_first: bool) -> torch.Tensor:
        columns = total.narrow(-1, start, product.shape[-1])
        columns.copy_(product) if is_first else columns.add_(product)
        return total

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, torch.Tensor, int, bool], output: torch.Tensor) -> None:
        total, product, ctx.start, _ = inputs
        ctx.size = product.shape[-1]
        ctx.mark_dirty(total)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        # What was in the columns before a copy has no gradient, and no operation before it reads these columns.
        return grad, grad.narrow(-1, ctx.start, ctx.size), None, None


def _bounds(features: int, splits: int) -> list[int]:
    """Return where parts begin and the last one ends, larger parts first."""
    size, larger = divmod(features, splits)
    return list(accumulate((size + (part < larger) for part in range(splits)), initial=0))


def _sizes(bounds: list[int]) -> list[int]:
    return [end - start for start, end in pairwise(bounds)]
