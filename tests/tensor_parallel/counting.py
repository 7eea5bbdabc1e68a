"""How many collectives run, and what they send."""

from __future__ import annotations

import torch
from shardwright.nn.linear import DistributedLinear
from shardwright.tensor_parallel.communicators import (
    bwd_allreduce_for_tp,
    fused_allgather_for_tp,
    fwd_allreduce_for_tp,
    reduce_scatter_for_tp,
    scatter_and_merge_for_tp,
)
from shardwright.tensor_parallel.group import Count, TensorGroup

FLOAT = 4
MESSAGE = 512


def check(group: TensorGroup) -> None:
    n, rank, others = group.size, group.rank, group.size - 1
    batches = [3, 1] if n == 2 else [2, 0, 3, 1]
    own, total = batches[rank], sum(batches)

    def expect(what: str, **counts: tuple[int, int]) -> None:
        wanted = {kind: Count(*count) for kind, count in counts.items()}
        assert group.counts == wanted, (what, group.counts, wanted)
        group.counts.clear()

    group.counts.clear()
    x = torch.ones(own, 5, requires_grad=True)
    output = fused_allgather_for_tp(x, 0, group=group)
    expect("all-gather", agree=(1, MESSAGE * others), all_gather=(1, own * 5 * FLOAT * others))
    output.sum().backward()
    expect("its backward", reduce_scatter=(1, (total - own) * 5 * FLOAT))

    x = torch.ones(own, 5, requires_grad=True)
    fused_allgather_for_tp([x, torch.ones(own, dtype=torch.int64)], 0, group=group, sizes=batches)[0].sum().backward()
    expect(
        "known sizes",
        all_gather=(1, own * (5 * FLOAT + 8) * others),
        reduce_scatter=(1, (total - own) * 5 * FLOAT),
    )

    x = torch.ones(total, 2, requires_grad=True)
    reduce_scatter_for_tp(x, 0, group=group, sizes=batches).sum().backward()
    expect(
        "reduce-scatter",
        reduce_scatter=(1, (total - own) * 2 * FLOAT),
        all_gather=(1, own * 2 * FLOAT * others),
    )

    x = torch.ones(own, 4 * n, requires_grad=True)
    scatter_and_merge_for_tp(x, 1, 0, group=group, merge_sizes=batches).sum().backward()
    expect("all-to-all", all_to_all=(2, own * 4 * others * FLOAT + (total - own) * 4 * FLOAT))

    x = torch.ones(n, 3, requires_grad=True)
    fwd_allreduce_for_tp(x, group=group, needs_grad=True).sum().backward()
    expect("forward sum", all_reduce=(1, 2 * others * 3 * FLOAT))
    bwd_allreduce_for_tp(x, group=group, needs_grad=True).sum().backward()
    expect("backward sum", all_reduce=(1, 2 * others * 3 * FLOAT))

    linear = DistributedLinear(4 * n, 6, group=group)
    x = torch.ones(own, 4 * n, requires_grad=True)
    output = linear(x)
    expect(
        "linear",
        agree=(1, MESSAGE * others),
        all_to_all=(1, own * 4 * others * FLOAT),
        reduce_scatter=(1, (total - own) * 6 * FLOAT),
    )
    output.sum().backward()
    expect(
        "backward of linear",
        all_gather=(1, own * 6 * FLOAT * others),
        all_to_all=(1, (total - own) * 4 * FLOAT),
    )
    linear(x.detach()).sum().backward()
    assert group.counts["all_to_all"].number == 1, "inputs that need no gradient have none sent"
    group.counts.clear()
    # A text too long for one message takes a second one.
    many = [torch.ones(own, 1) for _ in range(40)]
    assert [result.shape for result in fused_allgather_for_tp(many, 0, group=group)] == [(total, 1)] * 40
    assert group.counts["agree"].number == 2
