"""The divided language model beside a whole one on the batches of all ranks, in every mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import close, like, random
from divided import BOTH, POST, SIZES, TOLERANCE, batches_of, initialized
from plain import PlainLanguageModel
from shardwright.errors import ConfigError
from shardwright.nn import DistributedTransformerLMHead
from shardwright.tensor_parallel.group import TensorGroup
from shardwright.tensor_parallel.module import named_shardings
from torch.nn.functional import cross_entropy

#: None of them divides by the degrees.
VOCABULARY, POSITIONS, TYPES = 11, 7, 3
LENGTH, KEYS = 5, 3
CAUSAL = {"causal_mask_size": POSITIONS}
CROSS = {"add_cross_attention": True, **POST}
#: Arguments of the model, and what is given with each call.
MODELS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    (CAUSAL, ("labels",)),
    ({**POST, "num_token_types": TYPES}, ("attention_mask", "token_type_ids", "position_ids", "labels")),
    ({**BOTH, "num_token_types": TYPES}, ("shared position_ids",)),
    ({**CROSS, **CAUSAL}, ("attention_mask", "cross_states", "cross_mask", "labels")),
    ({**CROSS, "add_lm_head": False}, ("cross_states", "shared attention_mask")),
]


def plain(options: dict[str, Any]) -> PlainLanguageModel:
    whole = PlainLanguageModel(VOCABULARY, POSITIONS, **options)
    initialized(whole)
    return whole


def loss_of(whole: PlainLanguageModel, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    if whole.causal:
        logits, labels = logits[:, :-1], labels[:, 1:]
    return cross_entropy(logits.reshape(-1, VOCABULARY), labels.reshape(-1))


def check(group: TensorGroup) -> None:
    for optimize in ("speed", "memory"):
        for prescaled in (False, True):
            mode = like(group, optimize=optimize, prescaled_batch=prescaled)
            first, *others = batches_of(mode)
            for options, names in MODELS:
                model(mode, first, options, names)
            for sizes in others:
                model(mode, sizes, *MODELS[1])
    counted(group)
    dropout(group)
    refused(group)


def inputs_of(batch: int, seed: int, names: tuple[str, ...]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def ids(below: int, *shape: int, of: torch.Generator = generator) -> torch.Tensor:
        return torch.randint(0, below, shape, generator=of)

    given = {"input_ids": ids(VOCABULARY, batch, LENGTH)}
    for name in names:
        shared = name.startswith("shared")
        of = torch.Generator().manual_seed(3) if shared else generator
        name, rows = name.removeprefix("shared "), 1 if shared else batch
        if name == "labels":
            chosen = ids(VOCABULARY, batch, LENGTH)
            given[name] = torch.where(ids(3, batch, LENGTH) == 0, -100, chosen)
        elif name == "cross_states":
            given[name] = random(seed, (batch, KEYS, SIZES["hidden_size"]))
        else:
            below = {"token_type_ids": TYPES, "position_ids": POSITIONS}.get(name, 2)
            given[name] = ids(below, rows, KEYS if name == "cross_mask" else LENGTH, of=of)
    return given


def make(options: dict[str, Any], group: TensorGroup) -> DistributedTransformerLMHead:
    return DistributedTransformerLMHead(
        2, **options, vocab_size=VOCABULARY, num_positions=POSITIONS, group=group, dtype=torch.float64
    )


def tuple_of(divided: DistributedTransformerLMHead, given: dict[str, torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
    cross = ("cross_states", "cross_mask") if divided.transformer.add_cross_attention else ()
    order = ("input_ids", "attention_mask", "token_type_ids", "position_ids", *cross, "labels")
    return tuple(given.get(name) for name in order)


def model(group: TensorGroup, batches: list[int], options: dict[str, Any], names: tuple[str, ...]) -> None:
    """Output or loss, and every gradient."""
    n, rank, same = group.size, group.rank, group.prescaled_batch
    what = f"model {options} {batches} ({group.optimize}, prescaled {same}, degree {n})"
    options = {**SIZES, **options}
    whole = plain(options)
    divided = make(options, group)
    divided.load_whole_state_dict(whole.state_dict())
    given = [inputs_of(batch, 0 if same else r, names) for r, batch in enumerate(batches)]
    for one in given:
        if "cross_states" in one:
            one["cross_states"].requires_grad_()
    counting, mine = (given[:1], 0) if same else (given, rank)
    expected = [whole(**{name: x for name, x in one.items() if name != "labels"}) for one in counting]
    output = divided(tuple_of(divided, given[rank]))
    if "labels" in names:
        losses = [loss_of(whole, logits, one["labels"]) for logits, one in zip(expected, counting, strict=True)]
        torch.testing.assert_close(output, losses[mine], rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)
        weighted = [(2 + r) * torch.nan_to_num(loss) for r, loss in enumerate(losses)]
        own = (2 + mine) * torch.nan_to_num(output)
    else:
        assert output.shape == expected[mine].shape
        close(output, expected[mine], f"output of {what}", TOLERANCE)
        weighted = [((2 + r) * one.sin()).sum() for r, one in enumerate(expected)]
        own = ((2 + mine) * output.sin()).sum()
    gradients = torch.autograd.grad(sum(weighted), [*whole.parameters()], retain_graph=True, allow_unused=True)
    wanted = {
        name: torch.zeros_like(parameter) if gradient is None else gradient
        for (name, parameter), gradient in zip(whole.named_parameters(), gradients, strict=True)
    }
    crossing = [one["cross_states"] for one in counting] if "cross_states" in names else []
    of_cross = torch.autograd.grad(sum(weighted), crossing) if crossing else ()
    for one in given:
        if "cross_states" in one:
            one["cross_states"].grad = None
    own.backward()
    if crossing:
        close(given[rank]["cross_states"].grad, of_cross[mine], f"gradient of cross states of {what}", TOLERANCE)
    parameters = dict(divided.named_parameters())
    assert {*parameters} == {*wanted}, what
    for name, gradient in wanted.items():
        sharding = named_shardings(divided)[name]
        close(parameters[name].grad, sharding.shard(gradient, rank, n), f"gradient of {name} of {what}", TOLERANCE)


def counted(group: TensorGroup) -> None:
    """Ids and embeddings cross once; of logits only three numbers for each token."""
    if group.size == 1:
        return
    speed = like(group, optimize="speed")
    divided = make({**SIZES, **CAUSAL}, speed)
    given = inputs_of(2, group.rank, ("labels",))
    divided(tuple_of(divided, given))
    found = {kind: count.number for kind, count in speed.counts.items()}
    assert found == {"agree": 1, "all_gather": 2, "all_reduce": 1 + 2 * 2}, found
    tokens, others = 2 * group.size * LENGTH, group.size - 1
    assert speed.counts["all_gather"].num_bytes == 2 * 2 * LENGTH * 8 * others + 3 * tokens * 8 * others


def dropout(group: TensorGroup) -> None:
    """Ranks are seeded differently; for speed the embeddings are dropped alike all the same."""
    torch.manual_seed(group.rank)
    options = {**SIZES, "hidden_dropout_prob": 0.5}
    for optimize in ("speed", "memory"):
        mode = like(group, optimize=optimize, prescaled_batch=True)
        divided = make(options, mode)
        divided.load_whole_state_dict(plain(options).state_dict())
        given = inputs_of(2, 0, ())
        outputs = [divided(tuple_of(divided, given)).detach() for _ in range(2)]
        assert not torch.equal(*outputs)
        (gathered,) = group.all_gather([outputs[0][None]], [0], [[1] * group.size])()
        for one in gathered:
            assert torch.equal(one, gathered[0]), optimize
        divided.eval()
        assert torch.equal(divided(tuple_of(divided, given)), divided(tuple_of(divided, given)))


def refused(group: TensorGroup) -> None:
    last = group.rank == group.size - 1

    def expect(pattern: str, run: Callable[[], object]) -> None:
        with pytest.raises(ConfigError, match=pattern) as caught:
            run()
        print(f"refused: {caught.value}")
        assert group.all_reduce([torch.ones(1)])[0].item() == group.size

    expect("vocab_size is 0; allowed: 1 or more", lambda: DistributedTransformerLMHead(1, vocab_size=0, group=group))
    divided = make(SIZES, group)
    ids = torch.zeros(2, LENGTH, dtype=torch.int64)
    expect("the input is Tensor; expected a tuple", lambda: divided(ids))
    expect("to 11; allowed: 0 to 10", lambda: divided((ids + (11 if last else 0),)))
    expect("input_ids are torch.float32; allowed", lambda: divided((ids.float(),)))
    expect("length 8 on tp rank 0; num_positions allows up to 7", lambda: divided((torch.zeros(2, 8).long(),)))
    expect("attention_mask has numbers from -1", lambda: divided((ids, ids - (1 if last else 0))))
    expect(
        r"attention_mask has shape \(2, 4\) on tp rank 0; expected \[2 or 1, 5\]", lambda: divided((ids, ids[:, 1:]))
    )
    expect("num_token_types is 0, so token_type_ids have to be None", lambda: divided((ids, None, ids)))
    expect("to 12; allowed: 0 to 10", lambda: divided((ids, None, None, None, ids + 12 * last)))
    headless = make({**SIZES, "add_lm_head": False}, group)
    expect("add_lm_head is False, so labels have to be None", lambda: headless((ids, None, None, None, ids)))
    crossed = make({**SIZES, "add_cross_attention": True}, group)
    expect("add_cross_attention is True, but cross_states are None", lambda: crossed((ids,)))
