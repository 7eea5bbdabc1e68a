"""Language models of ``transformers``, tiny, from their configurations with random weights."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    AlbertConfig,
    AlbertForMaskedLM,
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    RobertaConfig,
    RobertaForMaskedLM,
    T5Config,
    T5ForConditionalGeneration,
)

from .problem import BATCH, Models, Phase, Problem, one, own_loss, sgd

VOCABULARY = 37
LENGTH = 10
NO_DROPOUT: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
LAYERS: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
}
#: Sizes under the names that most configurations use; below, under those of GPT-2 and of T5.
SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "max_position_embeddings": 2 * LENGTH, **LAYERS}
GPT2_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "n_positions": 2 * LENGTH,
    "n_embd": 16,
    "n_layer": 4,
    "n_head": 2,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
T5_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 24,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 2,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 16,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}


def gpt2(**changes: Any) -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2Config(**{**GPT2_SIZES, **changes}))


def bert() -> BertForMaskedLM:
    return BertForMaskedLM(BertConfig(**SIZES, **NO_DROPOUT))


def roberta() -> RobertaForMaskedLM:
    return RobertaForMaskedLM(RobertaConfig(**SIZES, **NO_DROPOUT))


def albert() -> AlbertForMaskedLM:
    return AlbertForMaskedLM(
        AlbertConfig(
            vocab_size=VOCABULARY,
            embedding_size=8,
            hidden_size=16,
            num_hidden_layers=4,
            num_hidden_groups=1,
            num_attention_heads=2,
            intermediate_size=24,
            max_position_embeddings=2 * LENGTH,
            classifier_dropout_prob=0.0,
            **NO_DROPOUT,
        )
    )


def t5() -> T5ForConditionalGeneration:
    return T5ForConditionalGeneration(T5Config(**T5_SIZES))


def llama() -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(num_key_value_heads=1, **SIZES))


def mixtral(router_loss: bool) -> MixtralForCausalLM:
    return MixtralForCausalLM(
        MixtralConfig(
            num_key_value_heads=1,
            num_local_experts=3,
            num_experts_per_tok=2,
            experts_implementation="eager",
            output_router_logits=router_loss,
            router_aux_loss_coef=0.1,
            **SIZES,
        )
    )


def tokens(step: int, random: torch.Generator) -> tuple[torch.Tensor, ...]:
    return (torch.randint(3, VOCABULARY, (BATCH, LENGTH), generator=random),)


def tokens_of_changing_length(step: int, random: torch.Generator) -> tuple[torch.Tensor, ...]:
    return (torch.randint(3, VOCABULARY, (BATCH, 3 + 2 * step), generator=random),)


def masked_tokens(step: int, random: torch.Generator) -> tuple[torch.Tensor, ...]:
    ids = torch.randint(3, VOCABULARY, (BATCH, LENGTH), generator=random)
    lengths = torch.randint(LENGTH // 2, LENGTH + 1, (BATCH, 1), generator=random)
    mask = (torch.arange(LENGTH) < lengths).long()
    return ids, mask, ids.masked_fill(mask == 0, -100)


def pairs(step: int, random: torch.Generator) -> tuple[torch.Tensor, ...]:
    source = torch.randint(3, VOCABULARY, (BATCH, LENGTH), generator=random)
    target = torch.randint(3, VOCABULARY, (BATCH, LENGTH - 3), generator=random)
    return source, target


def causal_step(models: Models, ids: torch.Tensor) -> Any:
    output = models["model"](input_ids=ids, labels=ids)
    models["model"].backward(output.loss)
    return {"loss": output.loss, "logits": output.logits}


def masked_step(models: Models, ids: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> Any:
    return own_loss(models, ids, attention_mask=mask, labels=labels)


def pair_step(models: Models, source: torch.Tensor, target: torch.Tensor) -> Any:
    return own_loss(models, input_ids=source, labels=target)


def albert_pins(pp: int) -> dict[str, int]:
    return {"model.albert.encoder.albert_layer_groups.0": 1, "model.predictions.dense": pp - 1}


PROBLEMS = {
    "GPT-2": Problem(
        build=one(gpt2), batch=tokens, phases=(Phase(body=causal_step),), optimizer=sgd(momentum=0.9), accounted=True
    ),
    "GPT-2, changing length": Problem(
        build=one(gpt2), batch=tokens_of_changing_length, phases=(Phase(body=causal_step),)
    ),
    "T5": Problem(
        build=one(t5), batch=pairs, phases=(Phase(body=pair_step),), optimizer=sgd(momentum=0.9), accounted=True
    ),
    "BERT": Problem(build=one(bert), batch=masked_tokens, phases=(Phase(body=masked_step),)),
    "RoBERTa": Problem(build=one(roberta), batch=masked_tokens, phases=(Phase(body=masked_step),)),
    "ALBERT": Problem(build=one(albert), batch=masked_tokens, phases=(Phase(body=masked_step),), pins=albert_pins),
    "Llama": Problem(build=one(llama), batch=tokens, phases=(Phase(body=causal_step),)),
    "Mixtral": Problem(build=one(lambda: mixtral(False)), batch=tokens, phases=(Phase(body=causal_step),)),
    "Mixtral, router loss": Problem(build=one(lambda: mixtral(True)), batch=tokens, phases=(Phase(body=causal_step),)),
}
