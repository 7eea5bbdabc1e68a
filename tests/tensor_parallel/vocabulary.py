"""Cross entropy over a vocabulary that is divided over ranks, beside that of torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cases import close, like, random
from shardwright.errors import ConfigError
from shardwright.nn.vocabulary import VocabularyParallelEmbedding, vocabulary_parallel_cross_entropy
from shardwright.tensor_parallel.communicators import (
    bwd_allreduce_for_tp,
    fused_allgather_for_tp,
    fwd_allreduce_for_tp,
)
from shardwright.tensor_parallel.group import Count, TensorGroup
from torch import nn
from torch.nn.functional import cross_entropy

WORDS, WIDTH, MESSAGE, NUMBER = 12, 4, 512, 8
BATCHES = {1: ([2],), 2: ([3, 1], [2, 2], [0, 3], [0, 0]), 4: ([2, 0, 3, 1], [1, 1, 1, 1])}


def check(group: TensorGroup) -> None:
    for shape in ((), (5,), (3, 2), (0,)):
        for reduction in ("mean", "sum", "none"):
            for smoothing in (0.0, 0.3):
                replicated(group, shape, reduction, smoothing)
                for sizes in BATCHES[group.size]:
                    own_samples(group, sizes, shape, reduction, smoothing)
    for words in (9, 11):
        padded(group, words)
    extreme_logits(group)
    half_precision(group)
    for sizes in BATCHES[group.size]:
        tied_to_the_embedding(group, sizes)
    counted(group)
    refused(group)


def targets(seed: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Some of them ignored."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randint(0, WORDS, shape, generator=generator)
    return torch.where(torch.rand(shape, generator=generator) < 0.3, -100, chosen)


def expected_loss(logits: torch.Tensor, target: torch.Tensor, reduction: str, smoothing: float) -> torch.Tensor:
    rows = logits.reshape(-1, WORDS)
    loss = cross_entropy(rows, target.reshape(-1), reduction=reduction, label_smoothing=smoothing)
    return loss.view(target.shape) if reduction == "none" else loss


def weighted(loss: torch.Tensor, seed: int) -> torch.Tensor:
    return (loss * random(seed, loss.shape)).nansum()  # the mean of no targets is undefined


def replicated(group: TensorGroup, shape: tuple[int, ...], reduction: str, smoothing: float) -> None:
    what = f"cross entropy {shape} {reduction} {smoothing}"
    target = targets(1, shape)
    logits = (4 * random(2, (*shape, WORDS))).requires_grad_()
    own = logits.detach().chunk(group.size, -1)[group.rank].clone().requires_grad_()
    expected = expected_loss(logits, target, reduction, smoothing)
    loss = vocabulary_parallel_cross_entropy(own, target, group=group, reduction=reduction, label_smoothing=smoothing)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12, equal_nan=True, msg=lambda text: what + text)
    weighted(expected, 3).backward()
    weighted(loss, 3).backward()
    whole = logits.grad.nan_to_num()
    close(own.grad.nan_to_num(), whole.chunk(group.size, -1)[group.rank], f"gradient: {what}")


def own_samples(group: TensorGroup, sizes: list[int], shape: tuple[int, ...], reduction: str, smoothing: float) -> None:
    """Each rank's loss is that of its own samples."""
    what = f"cross entropy of {sizes} {shape} {reduction} {smoothing}"
    target = targets(4, (sum(sizes), *shape))
    logits = (4 * random(5, (sum(sizes), *shape, WORDS))).requires_grad_()
    own = logits.detach().chunk(group.size, -1)[group.rank].clone().requires_grad_()
    loss = vocabulary_parallel_cross_entropy(
        own, target, group=group, batches=sizes, reduction=reduction, label_smoothing=smoothing
    )
    parts = zip(logits.split(sizes), target.split(sizes), strict=True)
    losses = [expected_loss(one, of, reduction, smoothing) for one, of in parts]
    torch.testing.assert_close(
        loss, losses[group.rank], rtol=1e-12, atol=1e-12, equal_nan=True, msg=lambda text: what + text
    )
    sum(weighted(one, 10 + r) for r, one in enumerate(losses)).backward()
    weighted(loss, 10 + group.rank).backward()
    whole = logits.grad.nan_to_num()
    close(own.grad.nan_to_num(), whole.chunk(group.size, -1)[group.rank], f"gradient: {what}")


def padded(group: TensorGroup, words: int) -> None:
    """A vocabulary that does not divide: the last columns are no words, whatever is in them."""
    n, columns = group.size, -(-words // group.size)
    target = targets(4, (6,)).remainder(words)
    for smoothing in (0.0, 0.3):
        logits = (4 * random(5, (6, words))).requires_grad_()
        filled = torch.cat([logits.detach(), torch.full((6, columns * n - words), 50.0, dtype=torch.float64)], 1)
        own = filled.split(columns, 1)[group.rank].clone().requires_grad_()
        expected = cross_entropy(logits, target, label_smoothing=smoothing)
        loss = vocabulary_parallel_cross_entropy(own, target, group=group, label_smoothing=smoothing, vocab_size=words)
        close(loss, expected, f"{words} words")
        expected.backward()
        loss.backward()
        gradient = torch.cat([logits.grad, torch.zeros(6, columns * n - words, dtype=torch.float64)], 1)
        close(own.grad, gradient.split(columns, 1)[group.rank], f"gradient of {words} words")


def extreme_logits(group: TensorGroup) -> None:
    """Large numbers, words that cannot come, and a rank of which no word can."""
    logits = random(6, (4, WORDS))
    logits[0] *= 1e4
    logits[1] += 1e6
    logits[2, : WORDS // 2] = -torch.inf
    logits[3, 1:] = -torch.inf
    logits.requires_grad_()
    target = torch.tensor([3, 1, WORDS - 1, 0])
    own = logits.detach().chunk(group.size, -1)[group.rank].clone().requires_grad_()
    expected = cross_entropy(logits, target)
    loss = vocabulary_parallel_cross_entropy(own, target, group=group)
    close(loss, expected, "extreme logits")
    expected.backward()
    loss.backward()
    close(own.grad, logits.grad.chunk(group.size, -1)[group.rank], "gradient of extreme logits")


def half_precision(group: TensorGroup) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        logits = random(7, (6, WORDS), dtype)
        target = targets(8, (6,))
        own = logits.chunk(group.size, -1)[group.rank].clone().requires_grad_()
        loss = vocabulary_parallel_cross_entropy(own, target, group=group)
        assert loss.dtype == torch.float32
        torch.testing.assert_close(loss, cross_entropy(logits.float(), target), rtol=1e-5, atol=1e-5)
        loss.backward()
        assert own.grad.dtype == dtype


def tied_to_the_embedding(group: TensorGroup, sizes: list[int]) -> None:
    """One weight embeds words and scores them; ranks bring different samples, or the same."""
    rank = group.rank
    for same in (False, True):
        batches = sizes[:1] if same else sizes
        whole = nn.Embedding(WORDS, WIDTH, dtype=torch.float64)
        with torch.no_grad():
            whole.weight.copy_(random(1, whole.weight.shape))
        of = like(group, prescaled_batch=same)
        embedding = VocabularyParallelEmbedding(WORDS, WIDTH, group=of, dtype=torch.float64)
        embedding.load_whole_state_dict(whole.state_dict())
        total = sum(batches)
        words = targets(9, (total, 3)).clamp(min=0)
        expected = torch.zeros((), dtype=torch.float64)
        for ids in words.split(batches):
            expected = expected + cross_entropy(
                (whole(ids).sin() @ whole.weight.t()).view(-1, WORDS), ids.roll(1, -1).view(-1), reduction="sum"
            )
        expected.backward()

        own = words if same else words.split(batches)[rank]
        gathered = own if same else fused_allgather_for_tp(own, 0, group=of, sizes=batches)
        hidden = fwd_allreduce_for_tp(embedding.partial(gathered), group=of).sin()
        logits = bwd_allreduce_for_tp(hidden, group=of) @ embedding.weight.t()
        loss = vocabulary_parallel_cross_entropy(
            logits, gathered.roll(1, -1), group=of, batches=None if same else batches, reduction="sum"
        )
        loss.backward()
        (summed,) = group.all_reduce([loss.detach()])
        close(summed / (group.size if same else 1), expected, "tied loss", 1e-11)
        close(embedding.weight.grad, whole.weight.grad.chunk(group.size)[rank], "gradient of the tied weight", 1e-11)


def counted(group: TensorGroup) -> None:
    others = group.size - 1
    if not others:
        return
    sizes = BATCHES[group.size][0]
    total, own = sum(sizes), sizes[group.rank]
    logits = random(group.rank, (total, 5, WORDS // group.size)).requires_grad_()
    target = targets(0, (total, 5))

    def expect(**counts: tuple[int, int]) -> None:
        wanted = {kind: Count(*count) for kind, count in counts.items()}
        assert group.counts == wanted, (group.counts, wanted)
        group.counts.clear()

    group.counts.clear()
    loss = vocabulary_parallel_cross_entropy(logits, target, group=group)
    expect(agree=(1, MESSAGE * others), all_gather=(1, 3 * total * 5 * NUMBER * others))
    loss.backward()
    expect()
    loss = vocabulary_parallel_cross_entropy(logits, target, group=group, batches=sizes, needs_grad=True)
    expect(all_gather=(1, 3 * total * 5 * NUMBER * others))
    loss.backward()
    expect(all_gather=(1, own * 5 * NUMBER * others))
    vocabulary_parallel_cross_entropy(logits, target, group=group, needs_grad=True, label_smoothing=0.1)
    expect(all_gather=(1, 4 * total * 5 * NUMBER * others))


def refused(group: TensorGroup) -> None:
    def expect(pattern: str, run: Callable[[], object]) -> None:
        with pytest.raises(ConfigError, match=pattern) as caught:
            run()
        print(f"refused: {caught.value}")
        assert group.all_reduce([torch.ones(1)])[0].item() == group.size

    def of(logits: torch.Tensor, target: torch.Tensor, **options: object) -> torch.Tensor:
        return vocabulary_parallel_cross_entropy(logits, target, group=group, **options)

    logits, target = torch.ones(2, 3), torch.tensor([0, 1])
    expect(r"reduction is 'max'; allowed: 'mean', 'sum', 'none'", lambda: of(logits, target, reduction="max"))
    expect(r"label_smoothing is 2; allowed: 0 to 1", lambda: of(logits, target, label_smoothing=2))
    expect(r"ids are from 0 to \d+; allowed: 0 to", lambda: of(logits, torch.tensor([0, 3 * group.size])))
    expect(r"ids are from -1 to", lambda: of(logits, torch.tensor([0, -1])))
    expect(r"expected floating and int64", lambda: of(logits, target.float()))
    expect(r"logits have shape \(2, 3\) and target \(3,\)", lambda: of(logits, torch.tensor([0, 1, 2])))
    expect(r"vocab_size is 99; \d slices of 3 columns allow", lambda: of(logits, target, vocab_size=99))
    expect(r"sizes .* say", lambda: of(logits, target, batches=[3] + [0] * (group.size - 1)))
    if group.size > 1:
        expect(r"shapes have to be the same", lambda: of(torch.ones(2, 3 + (group.rank == 0)), target))
