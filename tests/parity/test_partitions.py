"""Random partitions are drawn by their seed, leave no rank empty, and keep together what must be."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import shardwright as smp

from .partitions import MAX_SHARE, random_places
from .problems import PROBLEMS


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    smp.init({"pipeline_parallel_degree": 1})
    yield
    smp.shutdown()


def places(name: str, pp: int, seed: int) -> dict[str, int]:
    return random_places(name, PROBLEMS[name], pp, seed)


def test_a_seed_gives_one_partition_and_another_seed_another() -> None:
    assert places("GPT-2", 3, 1) == places("GPT-2", 3, 1)
    assert places("GPT-2", 3, 1) != places("GPT-2", 3, 2)


@pytest.mark.parametrize("seed", range(4))
def test_every_rank_gets_something_and_none_too_much(seed: int) -> None:
    module = PROBLEMS["T5"].build()["model"]
    found = places("T5", 3, seed)
    sizes = [0, 0, 0]
    for path, parameter in module.named_parameters():
        owner = next(prefix for prefix in _prefixes(f"model.{path}") if prefix in found)
        sizes[found[owner]] += parameter.numel()
    assert min(sizes) > 0
    assert max(sizes) <= MAX_SHARE * sum(sizes)


def test_modules_that_share_or_read_a_parameter_are_placed_once() -> None:
    tied = places("GPT-2", 2, 1)
    assert len({"model.transformer.wte", "model.lm_head"} & set(tied)) == 1
    read = places("DeBERTa", 2, 1)
    assert "model.deberta.encoder" in read


def test_several_models_are_drawn_each() -> None:
    found = places("GAN", 2, 1)
    for model in ("generator", "critic"):
        assert {rank for path, rank in found.items() if path.startswith(model)} == {0, 1}


def _prefixes(path: str) -> Iterator[str]:
    while "." in path:
        path = path.rpartition(".")[0]
        yield path
        if path == "model":
            yield "model."
