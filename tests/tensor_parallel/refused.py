"""What does not fit together is refused on every rank in the same words, and the ranks go on together."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from shardwright.errors import ConfigError
from shardwright.nn.linear import DistributedLinear
from shardwright.tensor_parallel.communicators import (
    bwd_allreduce_for_tp,
    fused_allgather_for_tp,
    fwd_allreduce_for_tp,
    reduce_scatter_for_tp,
    scatter_and_merge_for_tp,
)
from shardwright.tensor_parallel.group import TensorGroup


def check(group: TensorGroup) -> None:
    n, first = group.size, group.rank == 0

    def refused(pattern: str, run: Callable[[], object]) -> None:
        with pytest.raises(ConfigError, match=pattern) as caught:
            run()
        print(f"refused: {caught.value}")
        # Nothing is left of it in the group.
        assert group.all_reduce([torch.ones(1)])[0].item() == n

    def ones(*shape: int, **options: object) -> torch.Tensor:
        return torch.ones(shape, **options)

    own = ones(2, 3 if first else 4)
    refused(
        r"allgather.*same on all tp ranks but in dim 0, but there are \(2, 3\) on tp rank 0; \(2, 4\) on tp rank",
        lambda: fused_allgather_for_tp(own, 0, group=group),
    )
    refused(r"number of dims", lambda: fused_allgather_for_tp(ones(2) if first else ones(2, 1), 0, group=group))
    refused(
        r"dtypes.*float32 on tp rank 0; float64 on",
        lambda: fused_allgather_for_tp(ones(2, dtype=torch.float32 if first else torch.float64), 0, group=group),
    )
    refused(r"dim 2 is out of range.*\(2, 2\).*-2 to 1", lambda: fused_allgather_for_tp(ones(2, 2), 2, group=group))
    refused(r"dim 0 is out of range.*has no dim", lambda: fused_allgather_for_tp(ones(), 0, group=group))
    refused(r"at least one", lambda: fused_allgather_for_tp([], 0, group=group))
    refused(
        r"one number of tensors.*are 1 on tp rank 0; 2 on",
        lambda: fused_allgather_for_tp([ones(1)] * (1 if first else 2), 0, group=group),
    )
    refused(
        r"^all tp ranks have to call the same .*fused_allgather_for_tp with dims \[0\] on tp rank 0; reduce_scatter",
        lambda: (fused_allgather_for_tp if first else reduce_scatter_for_tp)(ones(n), 0, group=group),
    )
    refused(
        r"with dims \[0\] on tp rank 0; .* \[1\]",
        lambda: fused_allgather_for_tp(ones(2, 2), int(not first), group=group),
    )
    refused(r"size 5, which does not divide into", lambda: reduce_scatter_for_tp(ones(5, 2), 0, group=group))
    refused(
        r"same on all tp ranks, but there are \(4, 2\) on tp rank 0; \(8, 2\)",
        lambda: reduce_scatter_for_tp(ones(4 if first else 8, 2), 0, group=group),
    )
    refused(r"does not divide", lambda: scatter_and_merge_for_tp(ones(3, n + 1), 1, 0, group=group))
    refused(r"dim 3 is out of range", lambda: scatter_and_merge_for_tp(ones(3, n), 1, 3, group=group))
    refused(
        r"but in dim 0, but there are", lambda: scatter_and_merge_for_tp(ones(3, n * (1 + first)), 1, 0, group=group)
    )
    refused(
        r"same on all tp ranks, but there", lambda: scatter_and_merge_for_tp(ones(n * (1 + first)), 0, 0, group=group)
    )
    refused(r"same on all tp ranks, but", lambda: fwd_allreduce_for_tp(ones(2 + first), group=group))
    refused(r"same on all tp ranks, but", lambda: bwd_allreduce_for_tp(ones(2 + first), group=group))
    refused(r"bool cannot be summed", lambda: fwd_allreduce_for_tp(ones(2).bool(), group=group))
    refused(
        r"float8_e4m3fn cannot be summed",
        lambda: reduce_scatter_for_tp(ones(n).to(torch.float8_e4m3fn), 0, group=group),
    )
    refused(r"only strided", lambda: fwd_allreduce_for_tp(ones(2, 2).to_sparse(), group=group))

    def without_gradients_on_one_rank() -> None:
        with torch.set_grad_enabled(first):
            fused_allgather_for_tp(ones(2, requires_grad=True), 0, group=group)

    refused(r"enabled on tp rank 0; disabled \(torch.no_grad\) on tp rank", without_gradients_on_one_rank)

    # Sizes that a caller passes are held against its own tensor; in these, all ranks are wrong.
    refused(
        r"sizes are \[1\]; expected one for each", lambda: fused_allgather_for_tp(ones(1), 0, group=group, sizes=[1])
    )
    refused(r"say 9 together", lambda: reduce_scatter_for_tp(ones(4), 0, group=group, sizes=[9] + [0] * (n - 1)))
    refused(
        r"expected one for each",
        lambda: reduce_scatter_for_tp(ones(n), 0, group=group, sizes=[n + 1, -1] + [0] * (n - 2)),
    )
    refused(
        r"slices of one size only",
        lambda: scatter_and_merge_for_tp(ones(n), 0, 0, group=group, split_sizes=[n] + [0] * (n - 1)),
    )

    refused(r"a size of 5 in dim 1 of shape \(3, 5\) does not divide", lambda: DistributedLinear(5, 3, group=group))
    linear = DistributedLinear(4, 3, group=group)
    refused(r"expected \[batch, ..., 4\]", lambda: linear(ones(2, 8)))
    refused(r"expected \[batch, ..., 4\]", lambda: linear(ones(4)))
    refused(r"but in dim 0, but there are", lambda: linear(ones(2, 4 + 4 * first)))
