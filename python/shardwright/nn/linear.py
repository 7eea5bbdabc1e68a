"""The public linear layers: :class:`ParallelLinear` with the layouts of the paper and of Megatron's pair."""

from __future__ import annotations

from typing import Unpack

from shardwright.errors import ConfigError
from shardwright.nn.parallel_linear import ParallelLinear
from shardwright.tensor_parallel.group import current_tensor_group
from shardwright.tensor_parallel.layouts import FEATURES, WHOLE, samples, slices
from shardwright.tensor_parallel.module import Placed


class DistributedLinear(ParallelLinear):
    """A linear layer divided over its input channels (paper, section 5.2 and figure 6).

    Tp rank i holds the i-th slice of the weight's columns; the bias is on tp rank 0. Each rank has its own samples: an
    all-to-all gives every rank its slice of the features of all samples, each rank multiplies them by its slice of the
    weight, and a reduce-scatter sums the products and returns each sample to its rank. The gradient of the weight is
    therefore complete: the sum over all samples of the group. If all ranks have the same samples
    (``prescaled_batch``), each rank takes its slice of the features, and an all-reduce sums the products; samples count
    once.

    The input is [batch, ..., in_features], the output [batch, ..., out_features]; the batch may differ between ranks,
    and may be 0. With ``prescaled_batch`` it is the same on all ranks.

    Attributes:
        weight: [out_features, in_features / tp degree].
        bias: [out_features] on tp rank 0, otherwise None; None everywhere without one.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True, **place: Unpack[Placed]) -> None:
        """Create a layer with newly initialized weights, those of ``nn.Linear`` if ranks have the same seed.

        Args:
            in_features: The number of input features of the whole layer.
            out_features: The number of output features of the whole layer.
            bias: Whether the layer has a bias.
            **place: Arguments of ``Placed``: ``group``, ``device``, ``dtype``.
        """
        group = place["group"] = place.get("group") or current_tensor_group()
        super().__init__(in_features, [out_features], bias, input=samples(group), output=samples(group), **place)


class _OfPair(ParallelLinear):
    """One of Megatron's pair of linear layers (paper, appendix F.1): between the outside of a block and features."""

    #: Whether it is the first layer of the block; otherwise it is the last.
    _begins: bool

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        sequence_dim: int | None = None,
        asynchronous: bool = False,
        **place: Unpack[Placed],
    ) -> None:
        """Create a layer with newly initialized weights, those of ``nn.Linear`` if ranks have the same seed.

        Args:
            in_features: The number of input features of the whole layer.
            out_features: The number of output features of the whole layer.
            bias: Whether the layer has a bias.
            sequence_dim: The dim along which activations outside the block are sliced over tp ranks; None if they are
                replicated.
            asynchronous: Whether collectives overlap with matrix products.
            **place: Arguments of ``Placed``: ``group``, ``device``, ``dtype``.
        """
        if asynchronous and sequence_dim is None:
            raise ConfigError(
                f"{type(self).__name__}: asynchronous is True and sequence_dim None; only the collectives of a "
                "sequence that is sliced over ranks run beside products, so a sequence_dim is needed"
            )
        outside = WHOLE if sequence_dim is None else slices(sequence_dim)
        super().__init__(
            in_features,
            [out_features],
            bias,
            input=outside if self._begins else FEATURES,
            output=FEATURES if self._begins else outside,
            overlap=asynchronous,
            **place,
        )


class ColumnParallelLinear(_OfPair):
    """A linear layer divided over its output channels: tp rank i has the i-th slice of them.

    With elementwise operations and a :class:`RowParallelLinear`, it forms a block with one collective before it and one
    after it.

    Without a ``sequence_dim``, the input is the same on all ranks, and an all-reduce sums its gradient over ranks. With
    one, each rank has its slice of a sequence: an all-gather precedes the product, a reduce-scatter sums the gradient.

    With ``asynchronous=True``, these collectives overlap with matrix products: the rank's own slice is multiplied while
    the others are gathered. The backward gathers the sequence again, because only the rank's own slice is kept, while
    it computes the gradient of the sequence, and scatters that while it computes the gradient of the weight.

    The input is [..., in_features]; with a ``sequence_dim``, this rank's slice [..., n_r, ..., in_features] of any
    size n_r. The output is [..., out_features / tp degree], of the whole sequence.

    Attributes:
        weight: [out_features / tp degree, in_features].
        bias: [out_features / tp degree]; None without one.
    """

    _begins = True


class RowParallelLinear(_OfPair):
    """A linear layer divided over its input channels: tp rank i has the i-th slice of them, tp rank 0 the bias.

    Without a ``sequence_dim``, an all-reduce sums the products, and the result is the same on all ranks. With one, a
    reduce-scatter gives each rank its slice of a sequence, and the backward all-gathers the gradient.

    With ``asynchronous=True``, the backward multiplies its own slice of the gradient while it gathers the others.

    The input is this rank's channels, [..., in_features / tp degree], of the same samples on all ranks. The output is
    [..., out_features], the same on all ranks; with a ``sequence_dim``, this rank's slice of it.

    Attributes:
        weight: [out_features, in_features / tp degree].
        bias: [out_features] on tp rank 0, otherwise None; None everywhere without one.
    """

    _begins = False
