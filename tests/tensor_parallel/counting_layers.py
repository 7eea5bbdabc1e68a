"""How many collectives a transformer runs, and what they send (paper, appendix F)."""

from __future__ import annotations

import torch
from cases import like
from shardwright.nn import DistributedTransformer
from shardwright.tensor_parallel.group import Count, TensorGroup

FLOAT, DOUBLE = 4, 8
LAYERS, LENGTH, HIDDEN, HEADS, SIZE, BETWEEN = 2, 3, 8, 4, 4, 16


def check(group: TensorGroup) -> None:
    for prescaled in (False, True):
        for gated in (False, True):
            speed(like(group, optimize="speed", prescaled_batch=prescaled), gated)
            memory(like(group, optimize="memory", prescaled_batch=prescaled), gated)


def run(group: TensorGroup, gated: bool) -> tuple[int, int, int, dict[str, Count], dict[str, Count]]:
    """This rank's samples, those of all, the bytes of ``agree``, and the counts of forward and backward."""
    batches = [2] * group.size if group.prescaled_batch else [2, 0, 3, 1][: group.size]
    total = batches[0] if group.prescaled_batch else sum(batches)
    module = DistributedTransformer(
        LAYERS,
        HEADS,
        SIZE,
        HIDDEN,
        BETWEEN,
        causal_mask_size=LENGTH,
        pre_layernorm=True,
        post_layernorm=False,
        gated=gated,
        group=group,
    )
    input = torch.ones(batches[group.rank], LENGTH, HIDDEN, requires_grad=True)
    group.counts.clear()
    (output,) = module((input,))
    forward = dict(group.counts)
    group.counts.clear()
    output.sum().backward()
    told = forward.pop("agree")
    assert told == Count(1, 512 * (group.size - 1)), told
    return batches[group.rank], total, group.size, forward, dict(group.counts)


def expect(what: str, found: dict[str, Count], **wanted: tuple[int, int]) -> None:
    counts = {kind: Count(*count) for kind, count in wanted.items()}
    assert found == counts, (what, found, counts)


def speed(group: TensorGroup, gated: bool) -> None:
    """Two all-reduces of the hidden states for each layer, each way."""
    own, total, n, forward, backward = run(group, gated)
    states = LENGTH * HIDDEN * FLOAT
    reduced = (2 * LAYERS, 2 * LAYERS * (2 * (n - 1) * total * states // n))
    entered = {} if group.prescaled_batch else {"all_gather": (1, own * states * (n - 1))}
    expect(f"speed {gated}", forward, all_reduce=reduced, **entered)
    expect(f"backward for speed {gated}", backward, all_reduce=reduced, **entered)


def memory(group: TensorGroup, gated: bool) -> None:
    """Four reduce-scatters and two sums of moments for each layer; four all-gathers and two sums on the way back."""
    own, total, n, forward, backward = run(group, gated)
    channels = 3 * HEADS * SIZE + HIDDEN + (2 if gated else 1) * BETWEEN + HIDDEN
    scattered = LAYERS * total * LENGTH * channels * FLOAT * (n - 1) // n
    moments = 2 * total * LENGTH
    states = LENGTH * HIDDEN * FLOAT
    there = {"reduce_scatter": (4 * LAYERS, scattered)}
    there["all_reduce"] = (2 * LAYERS, 2 * LAYERS * (2 * (n - 1) * moments * DOUBLE // n))
    back = {"all_gather": (4 * LAYERS, scattered)}
    back["all_reduce"] = (2 * LAYERS, 2 * LAYERS * (2 * (n - 1) * moments * FLOAT // n))
    if group.prescaled_batch:  # channels of the output are gathered, and of the input's gradient
        once = total * states // n * (n - 1)
        there["all_gather"] = (1, once)
        back["all_gather"] = (4 * LAYERS + 1, scattered + once)
    else:  # samples come and go
        moved = own * states // n * (n - 1) + (total - own) * states // n
        there["all_to_all"] = back["all_to_all"] = (2, moved)
    expect(f"memory {gated}", forward, **there)
    expect(f"backward for memory {gated}", backward, **back)
