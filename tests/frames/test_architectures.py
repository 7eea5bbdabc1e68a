"""Rules 16 and 17, and small models of ``transformers`` with every child of the top two levels on another rank."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from shardwright.transformers_models import prepare
from torch import nn

from tests.frames.loopback import LoopbackJob, guarded

transformers = pytest.importorskip("transformers")

VOCABULARY, LENGTH = 40, 8
_TEXT = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
_SMALL = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_POSITIONS = {"max_position_embeddings": 32}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_ENCODER_DECODER = {
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
}

Inputs = dict[str, Any]


def _ids() -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (2, LENGTH))


def _language(model: str, config: str, **keys: Any) -> tuple[Any, Inputs]:
    made = getattr(transformers, model)(getattr(transformers, config)(**{**_SMALL, **keys}))
    ids = _ids()
    return made, {"input_ids": ids, "labels": ids}


def _gpt2() -> tuple[Any, Inputs]:
    keys = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
    return _language("GPT2LMHeadModel", "GPT2Config", resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, **keys)


def _bert() -> tuple[Any, Inputs]:
    return _language("BertForMaskedLM", "BertConfig", **_TEXT, **_POSITIONS, **_NO_DROPOUT)


def _albert() -> tuple[Any, Inputs]:
    keys = {"embedding_size": 8, "classifier_dropout_prob": 0.0}
    return _language("AlbertForMaskedLM", "AlbertConfig", **_TEXT, **_POSITIONS, **_NO_DROPOUT, **keys)


def _t5() -> tuple[Any, Inputs]:
    keys = {"d_model": 16, "d_ff": 24, "d_kv": 8, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
    return _language("T5ForConditionalGeneration", "T5Config", decoder_start_token_id=0, **keys)


def _llama() -> tuple[Any, Inputs]:
    return _language("LlamaForCausalLM", "LlamaConfig", **_TEXT, **_POSITIONS, num_key_value_heads=1)


def _mixtral() -> tuple[Any, Inputs]:
    keys = {"num_local_experts": 3, "num_key_value_heads": 1, "output_router_logits": True}
    model, inputs = _language("MixtralForCausalLM", "MixtralConfig", **_TEXT, **_POSITIONS, **keys)
    model.set_experts_implementation("eager")  # the grouped one has no float64
    return model, inputs


def _bart() -> tuple[Any, Inputs]:
    return _language("BartForConditionalGeneration", "BartConfig", **_ENCODER_DECODER, **_POSITIONS)


def _mamba() -> tuple[Any, Inputs]:
    keys = {"hidden_size": 16, "num_hidden_layers": 2, "state_size": 4, "time_step_rank": 4}
    return _language("MambaForCausalLM", "MambaConfig", **keys)


def _whisper() -> tuple[Any, Inputs]:
    keys = {"num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 32, "decoder_start_token_id": 1}
    config = transformers.WhisperConfig(**{**_SMALL, **_ENCODER_DECODER, **keys})
    features = torch.randn(2, 8, 32, dtype=torch.float64)
    return transformers.WhisperForConditionalGeneration(config), {"input_features": features, "labels": _ids()}


def _image() -> torch.Tensor:
    return torch.randn(2, 3, 16, 16, dtype=torch.float64)


def _vit() -> tuple[Any, Inputs]:
    config = transformers.ViTConfig(**_TEXT, **_NO_DROPOUT, image_size=16, patch_size=8, num_labels=4)
    return transformers.ViTForImageClassification(config), {"pixel_values": _image(), "labels": torch.tensor([1, 2])}


def _resnet() -> tuple[Any, Inputs]:
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=4
    )
    return transformers.ResNetForImageClassification(config), {"pixel_values": _image(), "labels": torch.tensor([1, 2])}


def _clip() -> tuple[Any, Inputs]:
    config = transformers.CLIPConfig(
        text_config={**_TEXT, **_SMALL, **_POSITIONS},
        vision_config={**_TEXT, "image_size": 16, "patch_size": 8},
        projection_dim=8,
    )
    ids = _ids()
    return transformers.CLIPModel(config), {"input_ids": ids, "pixel_values": _image(), "return_loss": True}


MODELS: dict[str, Callable[[], tuple[Any, Inputs]]] = {
    "GPT-2": _gpt2,
    "BERT": _bert,
    "ALBERT": _albert,
    "T5": _t5,
    "Llama": _llama,
    "Mixtral": _mixtral,
    "BART": _bart,
    "Mamba": _mamba,
    "Whisper": _whisper,
    "ViT": _vit,
    "ResNet": _resnet,
    "CLIP": _clip,
}


def alternating(model: nn.Module, levels: int = 2) -> dict[str, int]:
    """Owners: direct children of the top levels go in turn to another rank than their parent's; lists count as none."""
    owners = {"": 0}
    turn = 0
    depth = {"": 0}
    for name, _ in model.named_modules():
        if not name:
            continue
        parent = name.rpartition(".")[0]
        is_list = isinstance(model.get_submodule(parent), nn.ModuleList)
        depth[name] = depth[parent] + (0 if is_list else 1)
        owners[name] = owners[parent]
        module = model.get_submodule(name)
        if depth[name] <= levels and not isinstance(module, nn.ModuleList):
            turn += 1
            owners[name] = (owners[parent] + 1 + turn % 2) % 3
    return owners


def assert_exact(model: Any, inputs: Inputs, checkpointing: bool = False, autocast: bool = False) -> Any:
    """One step both ways; every gradient, buffer and result alike."""
    model.double() if not autocast else model.float()
    model.train()
    prepare(model, announce=False)
    plain = copy.deepcopy(model)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})

    def step(model: Any, backward: Callable[..., None]) -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            result = model(**inputs)
        loss = result.loss
        for values in (result.get("hidden_states"), result.get("attentions")):
            if values is not None:
                loss = loss + sum(value.square().mean() for value in values if value is not None)
        kept = {key: value for key, value in result.items() if key != "past_key_values"}
        backward(loss)
        return kept

    expected = step(plain, torch.autograd.backward)
    job = LoopbackJob(model, alternating(model).__getitem__)
    with guarded():
        found = job.run(lambda backward: step(model, backward))
    assert job.live_frames == 0
    assert job.server.kinds.count("forward") >= 3
    assert list(expected) == list(found)
    leaves = zip(torch.utils._pytree.tree_leaves(expected), torch.utils._pytree.tree_leaves(found), strict=True)
    tolerance = {"rtol": 1e-12, "atol": 1e-14} if not autocast else {"rtol": 1e-5, "atol": 1e-6}
    for one, other in leaves:
        torch.testing.assert_close(other, one, **tolerance)
    scale = max(float(p.grad.abs().max()) for p in plain.parameters() if p.grad is not None)
    for (name, one), (_, other) in zip(plain.named_parameters(), model.named_parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), name
        if one.grad is not None:
            error = float((one.grad - other.grad).abs().max()) / max(float(one.grad.abs().max()), 1e-3 * scale)
            assert error < (1e-2 if autocast else 1e-12), f"{name}: {error}"
    buffers = job.owned_buffers()
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(buffers[name], buffer, **tolerance)
    return found


@pytest.mark.parametrize("name", MODELS)
def test_every_child_of_two_levels_on_another_rank(name: str) -> None:
    torch.manual_seed(0)
    assert_exact(*MODELS[name]())


@pytest.mark.parametrize("name", ["GPT-2", "BERT", "T5", "Llama", "Mixtral", "ViT", "CLIP"])
def test_collected_hidden_states_and_attentions(name: str) -> None:
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    for part in model.modules():
        if isinstance(part, transformers.PreTrainedModel):
            part.set_attn_implementation("eager")
    found = assert_exact(model, {**inputs, "output_hidden_states": True, "output_attentions": True})
    if name in ("GPT-2", "BERT", "Llama"):
        assert len(found["hidden_states"]) == 3
        assert len(found["attentions"]) == 2


def test_collected_layers_can_be_chosen() -> None:
    torch.manual_seed(0)
    model, inputs = _llama()
    found = assert_exact(model, {**inputs, "output_hidden_states": [1]})
    # Newer versions of transformers name the last layer's too.
    assert [value is None for value in found["hidden_states"]][:2] == [True, False]


@pytest.mark.parametrize("checkpointing", [True, "reentrant"])
@pytest.mark.parametrize("name", ["GPT-2", "Llama", "T5", "Mixtral", "BERT"])
def test_gradient_checkpointing(name: str, checkpointing: Any) -> None:
    torch.manual_seed(0)
    assert_exact(*MODELS[name](), checkpointing=checkpointing)


@pytest.mark.parametrize("name", ["GPT-2", "Mixtral"])
def test_autocast(name: str) -> None:
    torch.manual_seed(0)
    assert_exact(*MODELS[name](), autocast=True)


def test_a_cache_that_the_user_gives_is_filled_where_modules_run() -> None:
    torch.manual_seed(0)
    model, inputs = _llama()
    model.eval()
    plain, ids = copy.deepcopy(model), inputs["input_ids"]
    job = LoopbackJob(model, alternating(model).__getitem__)

    def called(model: Any) -> torch.Tensor:
        cache, parts = transformers.DynamicCache(config=plain.config), []
        for part in (ids[:, :3], ids[:, 3:4], ids[:, 4:]):
            parts.append(model(input_ids=part, past_key_values=cache, use_cache=True).logits)
            cache.reorder_cache(torch.arange(len(ids)).flip(0))
        return torch.cat(parts, 1)

    with guarded(), torch.no_grad():
        assert torch.allclose(job.run(lambda backward: called(model)), called(plain), rtol=0, atol=1e-12)


def test_own_caches_are_switched_off() -> None:
    model, _ = _gpt2()
    assert model.config.use_cache
    prepare(model, announce=False)
    assert not model.config.use_cache


def test_generation_gives_the_same_tokens() -> None:
    torch.manual_seed(0)
    model, inputs = _gpt2()
    model.eval()
    prepare(model, announce=False)
    plain = copy.deepcopy(model)
    expected = plain.generate(inputs["input_ids"], max_new_tokens=5, do_sample=False)
    job = LoopbackJob(model, alternating(model).__getitem__)
    with guarded():
        found = job.run(lambda backward: model.generate(inputs["input_ids"], max_new_tokens=5, do_sample=False))
    assert torch.equal(expected, found)
