"""What ranks hold of caches, what crosses between them, and what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import shardwright as smp
import torch
import transformers
from shardwright.caches import CacheTable
from shardwright.job.runtime import current_runtime

from .models import VOCABULARY, built

BATCH, LENGTH, TOKENS = 4, 160, 8


def _contents() -> int:
    return sum(tensor.nbytes for tensor in current_runtime()[CacheTable].contents() if tensor.dim() > 1)


def each_rank_holds_its_layers(model: str) -> None:
    """A rank has the layers of its modules and no others, what crosses for a token is small, and nothing is left."""
    plain = built(model)
    for module in plain.modules():
        if hasattr(module, "max_position_embeddings"):
            module.max_position_embeddings = 4 * LENGTH
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 1})
    divided = smp.DistributedModel(copy.deepcopy(plain))
    ids = torch.randint(3, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(8))
    held: list[int] = []

    @smp.step
    def generate(model: Any, ids: torch.Tensor) -> Any:
        cache, sent = transformers.DynamicCache(config=plain.config), []
        for _ in range(TOKENS):
            before = smp.comm_stats()
            ids = model(ids, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
            after = smp.comm_stats()
            sent.append(sum(after[name] - before[name] for name in ("bytes_sent", "bytes_received")))
        held.append(_contents())
        return sent, [tuple(layer.keys.shape) for layer in cache.layers]

    with torch.no_grad():
        generate(divided, ids)
        named = dict(divided.module.named_modules())
        layers = [name for name, part in named.items() if isinstance(getattr(part, "layer_idx", None), int)]
        own = [name for name in layers if divided.placement.ownership.is_local(name)]
        named[own[-1]].register_forward_hook(lambda *_: held.append(_contents()))
        sent, shapes = generate(divided, ids)
        cache = transformers.DynamicCache(config=plain.config)
        for _ in range(TOKENS):
            ids = plain(ids, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
    assert shapes == [tuple(layer.keys.shape) for layer in cache.layers]
    whole = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    share = whole * len({named[name].layer_idx for name in own}) / len(cache.layers)
    assert 0 < share < whole
    assert abs(held[-1] / share - 1) < 0.02, (held, share)
    of_layer = min(layer.keys.nbytes for layer in cache.layers)
    assert max(sent[1:]) < of_layer / 2, (sent, of_layer)
    assert not current_runtime()[CacheTable].ids
    assert not _contents()
    smp.shutdown()


def given_from_outside(kind: str) -> None:
    """A cache that the script keeps between steps, reordered and cut there, goes on; a lost one is refused."""
    plain = built("llama")
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 1})
    divided = smp.DistributedModel(copy.deepcopy(plain))
    ids = torch.randint(3, VOCABULARY, (3, 6), generator=torch.Generator().manual_seed(8))

    def made() -> Any:
        if kind == "static":
            return transformers.StaticCache(config=plain.config, max_cache_len=20)
        return transformers.DynamicCache(config=plain.config)

    @smp.step
    def forward(model: Any, ids: torch.Tensor, cache: Any, fails: bool = False) -> Any:
        logits = model(ids, past_key_values=cache, use_cache=True).logits
        if fails:
            raise ValueError("on purpose")
        return logits

    order = torch.tensor([2, 0, 0])
    with torch.no_grad():
        cache, other = made(), made()
        for number in range(4):
            found, expected = forward(divided, ids, cache).concat(), plain(ids, past_key_values=other).logits
            assert (found - expected).abs().max() < 1e-12, number
            ids = expected[:, -1:].argmax(-1)
            for one in (cache, other)[smp.rank() :]:  # elsewhere it stays empty
                one.reorder_cache(order)
                if number == 2 and kind == "dynamic":
                    one.crop(-1)
        table = current_runtime()[CacheTable]
        assert len(table.ids) == 1
        assert table.contents()
        if smp.rank() == 0:
            with pytest.raises(smp.FrameError, match=r"the contents of its layer \d are on rank 1"):
                copy.deepcopy(cache)
        del cache
        forward(divided, ids, made())
        last = made()
        with pytest.raises((ValueError, smp.RemoteError), match="on purpose"):
            forward(divided, ids, last, fails=True)
        assert not table.ids
        assert not table.contents()
        with pytest.raises((smp.FrameError, smp.RemoteError), match="used in a step that failed"):
            forward(divided, ids, last)
        (found, expected) = forward(divided, ids, made()).concat(), plain(ids, past_key_values=made()).logits
        assert (found - expected).abs().max() < 1e-12
    smp.shutdown()


def refusals() -> None:
    """What cannot be exact is refused by name, on all ranks."""
    plain = built("llama")
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
    divided = smp.DistributedModel(copy.deepcopy(plain))
    ids = torch.randint(3, VOCABULARY, (2, 6), generator=torch.Generator().manual_seed(8))

    @smp.step
    def forward(model: Any, ids: torch.Tensor, cache: Any = None) -> Any:
        return model(ids, past_key_values=cache, use_cache=cache is not None).logits

    @smp.step
    def twice(model: Any, ids: torch.Tensor) -> Any:
        cache = transformers.DynamicCache(config=plain.config)
        model(ids, past_key_values=cache, use_cache=True)
        return model(ids[:, :1], past_key_values=cache, use_cache=True).logits

    @smp.step
    def foreign(model: Any, ids: torch.Tensor) -> Any:
        cache = transformers.DynamicCache(config=plain.config)
        cache.layers[-1].extra = object()
        return model(ids, past_key_values=cache, use_cache=True).logits

    with torch.no_grad():
        forward(divided, ids)
        with pytest.raises(smp.ShardwrightError, match="is a key/value cache, which 2 microbatches cannot share"):
            forward(divided, ids, transformers.DynamicCache(config=plain.config))
        with pytest.raises(smp.ShardwrightError, match="a layer that holds a object"):
            foreign(divided, ids)
    with pytest.raises(smp.ShardwrightError, match="what it has added is there only"):
        twice(divided, ids)
    smp.shutdown()
