"""One rank of a job that trains as a configuration of the paper says: ``-m tests.paper.rank NAME FOLDER``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import shardwright as smp
import torch
from torch import nn

from .configurations import CONFIGURATIONS, Configuration

STEPS = 2
VOCABULARY = 512


def make_model(of: Configuration) -> nn.Module:
    """The model, whose layers the library divides."""
    from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, RobertaConfig, RobertaForMaskedLM

    if of.architecture == "gpt":
        return GPT2LMHeadModel(
            GPT2Config(
                vocab_size=VOCABULARY,
                n_positions=of.sequence,
                n_embd=of.width,
                n_layer=of.layers,
                n_head=of.heads,
                attn_pdrop=0.0,  # processors have a fused kernel of attention without it
                use_cache=False,
                bos_token_id=0,
                eos_token_id=0,
            )
        )
    config, model = (
        (RobertaConfig, RobertaForMaskedLM) if of.architecture == "roberta" else (BertConfig, BertForMaskedLM)
    )
    made: nn.Module = model(
        config(
            vocab_size=VOCABULARY,
            max_position_embeddings=of.sequence + 2,  # RoBERTa's positions begin at 2
            hidden_size=of.width,
            num_hidden_layers=of.layers,
            num_attention_heads=of.heads,
            intermediate_size=4 * of.width,
            attention_probs_dropout_prob=0.0,
        )
    )
    return made


def layers_of(network: nn.Module, of: Configuration) -> list[nn.Module]:
    """The layers, each of which is checkpointed."""
    inner: Any = network
    return list(inner.transformer.h if of.architecture == "gpt" else getattr(inner, of.architecture).encoder.layer)


def main() -> None:
    """Train, and write what was seen to the folder."""
    name, folder = sys.argv[1:]
    of = next(each for each in CONFIGURATIONS if each.name == name)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    smp.init(of.keys)
    with smp.tensor_parallelism():
        network = make_model(of)
    whole = sum(parameter.numel() for parameter in network.parameters())
    for layer in layers_of(network, of):
        smp.set_activation_checkpointing(layer)
    model = smp.DistributedModel(network)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))

    @smp.step
    def train_step(ids: torch.Tensor) -> torch.Tensor:
        loss = model(input_ids=ids, labels=ids).loss
        model.backward(loss)
        return loss  # type: ignore[no-any-return]

    # With prescaled_batch, all ranks of a TP_GROUP have the same samples.
    index = smp.rdp_rank() if of.keys.get("prescaled_batch") else smp.dp_rank()
    ids = torch.randint(VOCABULARY, (of.samples, of.sequence), generator=torch.Generator().manual_seed(index))
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses.append(float(train_step(ids).reduce_mean()))
        optimizer.step()
    found = {
        "losses": losses,
        "whole": whole,
        "parameters": sum(parameter.numel() for parameter in model.local_parameters()),
        "replaced": sum(one.substitute is not None for one in model.tensor_parallelism_report()),
        "memory": smp.memory_report()[smp.rank()],
    }
    Path(folder, f"{smp.rank()}.json").write_text(json.dumps(found, default=str))
    smp.shutdown()


if __name__ == "__main__":
    main()
