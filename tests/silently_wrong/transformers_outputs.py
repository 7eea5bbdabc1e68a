"""What models of ``transformers`` collect on the way: hidden states, attentions, router logits; and their caches."""

from __future__ import annotations

import copy
from typing import Any

import shardwright as smp
import torch

from tests.silently_wrong.scenario import MICROBATCHES, Exact, compare_gradients, differences, scenario
from tests.silently_wrong.stages import BATCH

SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
}


def _collected(
    model: Any, wanted: tuple[str, ...], apart: str | None = None, *, before: str | None = None, **inputs: Any
) -> Any:
    """One step that returns what the model collected; compares it, and the gradients, with the whole model's.

    No other module may have to be with the one at the path ``apart``. ``before`` names what the model was used for
    before it is wrapped.
    """
    plain = copy.deepcopy(model)
    if before is not None:
        _use(model, before, inputs)
    divided = smp.DistributedModel(model)
    tokens = torch.randint(0, 40, (BATCH, 5), generator=torch.Generator().manual_seed(2))

    def run(model: Any, tokens: torch.Tensor) -> Any:
        output = model(input_ids=tokens, **inputs)
        loss = output[0].square().mean()
        for name in wanted:
            loss = loss + sum(one.square().mean() for one in output[name])
        return loss, {name: list(output[name]) for name in wanted}

    @smp.step
    def step(model: Any, tokens: torch.Tensor) -> Any:
        loss, collected = run(model, tokens)
        model.backward(loss)
        return collected

    found = step(divided, tokens)
    expected = []
    for part in tokens.chunk(MICROBATCHES):
        loss, collected = run(plain, part)
        (loss / MICROBATCHES).backward()
        expected.append(collected)
    outputs: dict[str, Any] = {}
    wanted_outputs: dict[str, Any] = {}
    for name in wanted:
        assert len(found[name]) == len(expected[0][name]) > 1
        for layer, output in enumerate(found[name]):
            for microbatch, value in enumerate(output.outputs):
                outputs[f"{name} {layer} {microbatch}"] = value
                wanted_outputs[f"{name} {layer} {microbatch}"] = expected[microbatch][name][layer].detach()
    same = differences(outputs, wanted_outputs)
    gradients = compare_gradients(divided, plain)
    decision = divided.placement.ownership.decision
    assert not any(apart in join.modules for join in decision.joins), decision.joins
    shares = [decision.parameter_bytes(rank) for rank in range(2)]
    assert max(shares) < 0.75 * sum(shares), shares
    return Exact(max(same.worst, gradients.worst), same.compared + gradients.compared)


def _use(model: Any, how: str, inputs: dict[str, Any]) -> None:
    tokens = torch.randint(0, 40, (2, 5), generator=torch.Generator().manual_seed(3))
    if how == "trained":
        model(input_ids=tokens, **inputs)[0].square().mean().backward()
        model.zero_grad()
    elif how == "generated from":
        model.generate(input_ids=tokens, max_new_tokens=2, do_sample=False)
    else:
        with torch.no_grad():
            (model.base_model if how == "its inner model evaluated" else model)(
                input_ids=tokens, output_attentions=True
            )


@scenario
def hidden_states_and_attentions_of_llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**SIZES, attn_implementation="eager")
    return _collected(
        LlamaForCausalLM(config).double(),
        ("hidden_states", "attentions"),
        output_hidden_states=True,
        output_attentions=True,
    )


@scenario
def hidden_states_and_attentions_of_bert() -> Any:
    from transformers import BertConfig, BertModel

    config = BertConfig(**SIZES, attn_implementation="eager", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return _collected(
        BertModel(config, add_pooling_layer=False).double(),
        ("hidden_states", "attentions"),
        output_hidden_states=True,
        output_attentions=True,
    )


def _mixtral() -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(**SIZES, num_local_experts=3, num_experts_per_tok=2, attn_implementation="eager")
    model = MixtralForCausalLM(config).double()
    model.set_experts_implementation("eager")  # the grouped one has no float64
    return model


@scenario
def router_logits_of_mixtral() -> Any:
    model = _mixtral()
    return _collected(
        model,
        ("hidden_states", "attentions", "router_logits"),
        output_hidden_states=True,
        output_attentions=True,
        output_router_logits=True,
    )


@scenario
def a_cache_that_the_script_gives() -> Any:
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**SIZES)
    return _collected(LlamaForCausalLM(config).double(), (), past_key_values=DynamicCache(config=config))


@scenario
def a_model_that_makes_caches() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**SIZES)
    assert config.use_cache
    return _collected(LlamaForCausalLM(config).double(), ())


@scenario
def a_model_that_keeps_states_for_generation() -> Any:
    from transformers import RecurrentGemmaConfig, RecurrentGemmaForCausalLM

    config = RecurrentGemmaConfig(
        **(SIZES | {"num_key_value_heads": 1}), lru_width=16, attention_window_size=4, conv1d_width=2
    )
    model = RecurrentGemmaForCausalLM(config).double()
    return _collected(model, (), apart="model")


@scenario
def hidden_states_of_a_model_that_was_evaluated() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=40, n_embd=16, n_layer=4, n_head=2, n_positions=16, attn_implementation="eager", resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    wanted = ("hidden_states", "attentions")
    return _collected(
        GPT2LMHeadModel(config).double(),
        wanted,
        before="evaluated",
        output_hidden_states=True,
        output_attentions=True,
    )


@scenario
def attentions_of_a_model_that_was_generated_from_and_copied() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**SIZES, attn_implementation="eager")).double()
    _use(model, "its inner model evaluated", {})
    return _collected(
        copy.deepcopy(model),
        ("hidden_states", "attentions"),
        before="generated from",
        output_hidden_states=True,
        output_attentions=True,
    )


@scenario
def router_logits_of_a_model_that_was_trained() -> Any:
    return _collected(_mixtral(), ("router_logits",), before="trained", output_router_logits=True)
