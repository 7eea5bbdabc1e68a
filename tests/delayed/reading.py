"""A rank of two whose model ``from_pretrained`` loads with delayed parameters: ``reading.py FOLDER``."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import peft
import shardwright as smp
import torch
from shardwright.delayed.materialise import is_delayed
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

FOLDER = Path(sys.argv[1])
IDS = torch.arange(16).reshape(4, 4)
#: The names that this rank has read of files.
READ: list[str] = []


def watch_reading() -> None:
    """Note what is read."""
    kind = import_module("shardwright.delayed.reading")._Read
    own = kind.__call__

    def read(place: Any) -> torch.Tensor:
        READ.append(place.name)
        values: torch.Tensor = own(place)
        return values

    kind.__call__ = read


def saved(name: str, model: Any) -> Path:
    """A folder of several files, in half precision, that rank 0 writes."""
    if smp.rank() == 0:
        model.to(torch.bfloat16).save_pretrained(FOLDER / name, max_shard_size="6KB")
    smp.barrier()
    assert len(list((FOLDER / name).glob("*.safetensors"))) > 1
    return FOLDER / name


@smp.step
def train(model: Any, ids: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
    model.backward(loss)
    return loss.detach()


def each_rank_reads_what_it_owns(folder: Path, target: str) -> None:
    """Adapters are trained beside weights that only their ranks have read, as in one process."""

    def made() -> Any:
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        torch.manual_seed(2)
        return peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=[target], init_lora_weights=False))

    plain = made()
    READ.clear()
    with smp.delay_param_initialization():
        module = made()
    delayed = {id(one) for one in module.parameters() if is_delayed(one)}
    assert delayed
    assert not READ
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1))
    updates = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.1)
    for _ in range(2):
        loss = train(model, IDS).reduce_mean()
        wanted = sum(plain(input_ids=rows, labels=rows).loss for rows in IDS.chunk(2)) / 2
        wanted.backward()
        torch.testing.assert_close(loss, wanted.detach())
        for each in (optimizer, updates):
            each.step()
            each.zero_grad()
    state = model.state_dict()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name], value)
    every: list[list[str]] = smp.allgather(READ, smp.PP_GROUP)
    assert all(len(names) == len(set(names)) for names in every), "a rank has read something twice"
    assert len(set(every[0]) & set(every[1])) <= 1, every  # of weights that are tied over ranks
    assert len({name for names in every for name in names}) == len(import_files(folder)), every
    assert all(len(names) < len(import_files(folder)) for names in every), "a rank has read all"


def import_files(folder: Path) -> list[str]:
    """The names of all weights in files."""
    from safetensors import safe_open

    names = []
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            names += list(file.keys())
    return names


def main() -> None:
    """Check both."""
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
    watch_reading()
    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 2}
    llama = LlamaForCausalLM(LlamaConfig(vocab_size=32, num_hidden_layers=3, use_cache=False, **sizes))
    each_rank_reads_what_it_owns(saved("llama", llama), "q_proj")
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=3, n_head=2, use_cache=False))
    gpt2.config.resid_pdrop = gpt2.config.embd_pdrop = gpt2.config.attn_pdrop = 0.0
    each_rank_reads_what_it_owns(saved("gpt2", gpt2), "c_attn")
    print("all hold")


if __name__ == "__main__":
    main()
