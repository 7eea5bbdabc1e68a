"""``generate`` of divided models beside one plain process."""

from __future__ import annotations

import copy
from typing import Any

import shardwright as smp
import torch
from shardwright.caches import CacheTable
from shardwright.job.runtime import current_runtime

from .models import beginnings, built

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 1.5, "top_k": 12},
    "beams": {"num_beams": 3, "do_sample": False},
    "sampled beams": {"num_beams": 2, "do_sample": True},
    "several": {"do_sample": True, "num_return_sequences": 2},
}


def generates(model: str, way: str, microbatches: int, replicas: int = 1, static: bool = False) -> None:
    """The tokens are those of one process, twice in a row, and so is the next random number; nothing is left."""
    plain = built(model)
    config: dict[str, Any] = {"pipeline_parallel_degree": 2, "microbatches": microbatches}
    smp.init({**config, "ddp": replicas > 1})
    divided = smp.DistributedModel(copy.deepcopy(plain))
    options: dict[str, Any] = {**WAYS[way], "max_new_tokens": 7}
    if static:
        options["cache_implementation"] = "static"
    inputs = beginnings(4)
    for batch in (inputs, {key: torch.cat([one, one[:1].flip(0)]) for key, one in inputs.items()}):
        own = {key: one.roll(smp.dp_rank(), 0) for key, one in batch.items()}
        torch.manual_seed(7)
        expected = plain.generate(**own, **options)
        number = torch.rand(1)
        torch.manual_seed(7)
        found = divided.generate(**own, **options)
        assert torch.equal(found, expected), (found, expected)
        assert torch.equal(torch.rand(1), number)
        table = current_runtime()[CacheTable]
        assert not table.ids
        assert not table.contents()
    smp.shutdown()


def with_candidates(way: str) -> None:
    """Tokens that a smaller model, or the beginning itself, proposes, which the model then confirms or takes back."""
    plain = built("llama")
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
    divided = smp.DistributedModel(copy.deepcopy(plain))
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    if way == "assisted":
        options["assistant_model"] = built("llama")
    else:
        options["prompt_lookup_num_tokens"] = 3
    inputs = {key: one[:1].repeat(1, 2) for key, one in beginnings().items()}
    expected = plain.generate(**inputs, **options)
    assert torch.equal(divided.generate(**inputs, **options), expected)
    assert not current_runtime()[CacheTable].ids
    smp.shutdown()


def outputs(model: str, way: str) -> None:
    """Scores and logits, which a single microbatch returns."""
    plain = built(model)
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
    divided = smp.DistributedModel(copy.deepcopy(plain))
    options = {**WAYS[way], "max_new_tokens": 5, "return_dict_in_generate": True, "output_logits": True}
    torch.manual_seed(7)
    expected = plain.generate(**beginnings(), **options)
    torch.manual_seed(7)

    @smp.step(microbatches=1)
    def generate(model: Any, inputs: dict[str, torch.Tensor]) -> Any:
        made = model.generate(**inputs, **options)
        return made.sequences, list(made.logits)

    with torch.no_grad():
        sequences, logits = generate(divided, beginnings())
    assert torch.equal(sequences.concat(), expected.sequences)
    assert len(logits) == len(expected.logits)
    for one, other in zip(logits, expected.logits, strict=True):
        assert (one.concat() - other).abs().max() < 1e-12
    smp.shutdown()
