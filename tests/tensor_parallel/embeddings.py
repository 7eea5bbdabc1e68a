"""Divided embeddings beside whole ones on the batches of all ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from cases import close, like, random
from shardwright.errors import ConfigError
from shardwright.nn.embedding import DistributedEmbedding
from shardwright.nn.vocabulary import VocabularyParallelEmbedding
from shardwright.tensor_parallel.group import Count, TensorGroup
from torch import nn

ROWS, CHANNELS = 12, 8
MESSAGE, ID, NUMBER = 512, 8, 8
BATCHES = {1: ([2], [0]), 2: ([3, 1], [2, 2], [0, 3], [0, 0]), 4: ([2, 0, 3, 1], [1, 1, 1, 1])}

Embedding = DistributedEmbedding | VocabularyParallelEmbedding
Make = Callable[..., Embedding]


def check(group: TensorGroup) -> None:
    same_samples = like(group, prescaled_batch=True)
    for sizes in BATCHES[group.size]:
        for shape in ((), (3,), (2, 2)):
            one_embedding(group, sizes, shape)
        one_embedding(group, sizes, (3,), padding_idx=-2)
        one_embedding(group, sizes, (3,), sparse=True, padding_idx=1)
        one_embedding(group, sizes, (5,), scale_grad_by_freq=True)
        one_embedding(group, sizes, (3,), dtype=torch.int32)
        for max_norm, norm_type in ((2.0, 2.0), (0.5, 1.0), (1.5, 3.0), (1.0, float("inf"))):
            one_embedding(group, sizes, (3,), max_norm=max_norm, norm_type=norm_type)
        for shape in ((), (2, 2)):
            one_embedding(group, sizes, shape, make=VocabularyParallelEmbedding)
        one_embedding(group, sizes, (3,), make=VocabularyParallelEmbedding, padding_idx=5)
        one_embedding(group, sizes, (3,), make=VocabularyParallelEmbedding, dtype=torch.int32)
    for options in ({}, {"sparse": True, "padding_idx": 3}, {"max_norm": 1.0}, {"make": VocabularyParallelEmbedding}):
        one_embedding(same_samples, [2] * group.size, (3,), **options)
    skipped(group)
    steps_of_sparse_adam(group)
    starts_alike(group)
    frozen(group)
    counted(group)
    refused(group)


def ids_of(rank: int, shape: tuple[int, ...], dtype: torch.dtype = torch.int64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(40 + rank)
    return torch.randint(0, ROWS, shape, generator=generator).to(dtype)


def pair(group: TensorGroup, make: Make = DistributedEmbedding, **options: object) -> tuple[nn.Embedding, Embedding]:
    whole = nn.Embedding(ROWS, CHANNELS, **options, dtype=torch.float64)
    with torch.no_grad():
        whole.weight.copy_(random(1, whole.weight.shape))
    divided = make(ROWS, CHANNELS, **options, group=group, dtype=torch.float64)
    divided.load_whole_state_dict(copy.deepcopy(whole.state_dict()))
    return whole, divided


def compare_weights(whole: nn.Embedding, divided: Embedding, what: str) -> None:
    group, sharding = divided.tp_group, divided.shardings["weight"]
    close(divided.weight, sharding.shard(whole.weight, group.rank, group.size), what)
    expected, found = whole.weight.grad, divided.weight.grad
    assert expected is not None
    assert found is not None
    assert expected.is_sparse == found.is_sparse
    close(found.to_dense(), sharding.shard(expected.to_dense(), group.rank, group.size), f"gradient: {what}")


def one_embedding(
    group: TensorGroup,
    sizes: list[int],
    shape: tuple[int, ...],
    *,
    dtype: torch.dtype = torch.int64,
    make: Make = DistributedEmbedding,
    **options: object,
) -> None:
    """Outputs, gradients, and what ``max_norm`` makes of the weight."""
    rank, n = group.rank, group.size
    whole, divided = pair(group, make, **options)
    ranks = range(1 if group.prescaled_batch else n)
    batches = [ids_of(r, (sizes[r], *shape), dtype) for r in ranks]
    weights = [random(60 + r, (*ids.shape, CHANNELS)) for r, ids in enumerate(batches)]
    expected = whole(torch.cat(batches)).split([len(ids) for ids in batches])
    sum((w * output.sin()).sum() for w, output in zip(weights, expected, strict=True)).backward()
    mine = 0 if group.prescaled_batch else rank
    output = divided(batches[mine])
    what = f"{make.__name__} {sizes} {shape} {options}"
    close(output, expected[mine], what)
    (weights[mine] * output.sin()).sum().backward()
    compare_weights(whole, divided, what)


def skipped(group: TensorGroup) -> None:
    """Ids that are gathered already; channels that stay divided."""
    rank, n = group.rank, group.size
    ids = ids_of(0, (2 * n, 3))
    for gathered in (True, False):
        for stays in (True, False):
            whole, _ = pair(group)
            divided = DistributedEmbedding(
                ROWS,
                CHANNELS,
                _weight=whole.weight.detach(),
                _skip_allgather=gathered,
                _skip_scatter_and_merge=stays,
                group=group,
            )
            output = divided(ids if gathered else ids.chunk(n)[rank])
            expected = whole(ids)
            close(output, expected.chunk(n, -1)[rank] if stays else expected.chunk(n)[rank], "skipped")
            # Without the exchange each rank's loss is that of its channels; with it, that of its samples.
            expected.sin().sum().backward()
            output.sin().sum().backward()
            compare_weights(whole, divided, f"skipped {gathered} {stays}")


def steps_of_sparse_adam(group: TensorGroup) -> None:
    whole, divided = pair(group, sparse=True)
    for model, ids in (
        (whole, torch.cat([ids_of(r, (2 + r, 2)) for r in range(group.size)])),
        (divided, ids_of(group.rank, (2 + group.rank, 2))),
    ):
        optimizer = torch.optim.SparseAdam(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(ids).square().sum().backward()
            optimizer.step()
    compare_weights(whole, divided, "after three steps")


def starts_alike(group: TensorGroup) -> None:
    """One seed, the same numbers at every degree; each rank's part in memory of its own."""
    for make, dim in ((DistributedEmbedding, 1), (VocabularyParallelEmbedding, 0)):
        torch.manual_seed(3)
        whole = torch.empty(ROWS, CHANNELS).normal_(std=0.5)
        whole[ROWS - 1] = 0
        torch.manual_seed(3)
        divided = make(ROWS, CHANNELS, -1, initializer_range=0.5, group=group)
        assert torch.equal(divided.weight, whole.chunk(group.size, dim)[group.rank])
        assert divided.weight.untyped_storage().nbytes() == divided.weight.numel() * 4


def frozen(group: TensorGroup) -> None:
    for make in (DistributedEmbedding, VocabularyParallelEmbedding):
        _, divided = pair(group, make)
        divided.weight.requires_grad_(False)
        assert not divided(ids_of(0, (2,))).requires_grad
        # Trained on one rank only: the others take part in its backward.
        divided.weight.requires_grad_(group.rank == 0)
        divided(ids_of(0, (2,))).sum().backward()
        assert (divided.weight.grad is not None) == (group.rank == 0)


def counted(group: TensorGroup) -> None:
    n, rank, others = group.size, group.rank, group.size - 1
    if n == 1:
        return
    sizes = [3, 1] if n == 2 else [2, 0, 3, 1]
    own, total = sizes[rank], sum(sizes)
    ids, channels = ids_of(rank, (own, 3)), CHANNELS // n

    def expect(what: str, **counts: tuple[int, int]) -> None:
        wanted = {kind: Count(*count) for kind, count in counts.items()}
        assert group.counts == wanted, (what, group.counts, wanted)
        group.counts.clear()

    _, divided = pair(group, sparse=True)
    group.counts.clear()
    output = divided(ids)
    told, gathered = (1, MESSAGE * others), (1, own * 3 * ID * others)
    expect("channels", agree=told, all_gather=gathered, all_to_all=(1, (total - own) * 3 * channels * NUMBER))
    output.sum().backward()
    expect("its backward", all_to_all=(1, own * 3 * channels * NUMBER * others))

    _, divided = pair(group, VocabularyParallelEmbedding)
    output = divided(ids)
    summed = (1, (total - own) * 3 * CHANNELS * NUMBER)
    expect("rows", agree=told, all_gather=gathered, reduce_scatter=summed)
    output.sum().backward()
    expect("its backward", all_gather=(1, own * 3 * CHANNELS * NUMBER * others))

    _, divided = pair(group, max_norm=1.0)
    rows = len(torch.unique(torch.cat([ids_of(r, (size, 3)) for r, size in enumerate(sizes)])))
    divided(ids)
    norms = rows * NUMBER * others
    expect(
        "norms",
        agree=told,
        all_gather=(2, gathered[1] + norms),
        all_to_all=(1, (total - own) * 3 * channels * NUMBER),
    )

    same = like(group, prescaled_batch=True)
    _, divided = pair(same)
    divided(ids_of(0, (2, 3))).sum().backward()
    assert same.counts == {"agree": Count(*told), "all_gather": Count(1, 2 * 3 * channels * NUMBER * others)}


def refused(group: TensorGroup) -> None:
    first = group.rank == 0

    def expect(pattern: str, run: Callable[[], object]) -> None:
        with pytest.raises(ConfigError, match=pattern) as caught:
            run()
        print(f"refused: {caught.value}")
        assert group.all_reduce([torch.ones(1)])[0].item() == group.size

    def make(*args: object, **options: object) -> DistributedEmbedding:
        return DistributedEmbedding(*args, **options, group=group)

    expect(r"padding_idx is 4; allowed: -4 to 3", lambda: make(4, 4, 4))
    expect(r"_weight has shape \(4, 1\); expected the whole, \(4, 4\)", lambda: make(4, 4, _weight=torch.ones(4, 1)))
    expect(r"norm_type is 0.0; it has to be positive", lambda: make(4, 4, norm_type=0.0))
    expect(r"sparse gradients are not scaled", lambda: make(4, 4, sparse=True, scale_grad_by_freq=True))
    for one in (make(4, 4), VocabularyParallelEmbedding(4, 4, group=group)):
        out_of_range = torch.tensor([0, 4 if group.rank == group.size - 1 else 1])
        expect(r"ids are from 0 to 4; allowed: 0 to 3", lambda o=one, ids=out_of_range: o(ids))
        expect(r"ids are from -1 to 0;", lambda o=one: o(torch.tensor([0, -1])))
        expect(r"ids are torch.float32; allowed", lambda o=one: o(torch.ones(2)))
        if group.size > 1:
            expect(r"dtypes have to be", lambda o=one: o(torch.ones(2, dtype=torch.int64 if first else torch.int32)))
            expect(r"same on all tp ranks but in dim 0", lambda o=one: o(ids_of(0, (2, 2 + first)) * 0))
    if group.size > 1:
        expect(r"a size of 5 in dim 1 of shape \(4, 5\)", lambda: make(4, 5))
        gathered = make(4, 4, _skip_allgather=True)
        expect(r"does not divide", lambda: gathered(torch.zeros(group.size + 1, dtype=torch.int64)))
        same = like(group, prescaled_batch=True)
        for one in (DistributedEmbedding(4, 4, group=same), VocabularyParallelEmbedding(4, 4, group=same)):
            expect(r"shapes have to be the same", lambda o=one: o(torch.zeros(2 + first, dtype=torch.int64)))
