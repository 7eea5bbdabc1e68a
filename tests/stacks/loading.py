"""What a rank needs while it loads a model in 4 bits: ``FOLDER``, of whole weights, which rank 0 makes.

Prints, as JSON, the most that the rank has had in memory before the first step ran, beyond what it had before, with the
bytes of its share and of one layer of the files.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
from pathlib import Path
from typing import Any

import peft
import shardwright as smp
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

#: Sizes of the model that is measured, and of one of the same kind that everything has been used by before.
LARGE, SMALL = {"hidden_size": 2048, "intermediate_size": 5632}, {"hidden_size": 64, "intermediate_size": 128}


def made(folder: Path, sizes: dict[str, int]) -> None:
    """Write a model of four layers."""
    config = LlamaConfig(
        vocab_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4, use_cache=False, **sizes
    )
    torch.manual_seed(1)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def loaded(folder: Path) -> tuple[Any, int]:
    """A model on this rank's part of which a step has run, and the most memory until it was placed."""
    with smp.delay_param_initialization():
        base = AutoModelForCausalLM.from_pretrained(
            folder,
            quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
            dtype=torch.bfloat16,
        )
    module = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    model = smp.DistributedModel(module)
    most: list[int] = []
    model.register_post_partition_hook(lambda *_: most.append(memory("VmHWM")))

    @smp.step
    def step(model: Any, ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
        model.backward(loss)
        return loss

    step(model, torch.arange(16).reshape(2, 8))
    return model, most[0]


def memory(name: str) -> int:
    """A size of this process, as the system tells it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) << 10


def main() -> None:
    """Measure."""
    folder = Path(sys.argv[1])
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 1, "stall_timeout_seconds": 300})
    for name, sizes in (("small", SMALL), ("large", LARGE)):
        if smp.rank() == 0:
            made(folder / name, sizes)
    smp.barrier()
    small, _ = loaded(folder / "small")
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the most memory is counted from here on
    before = memory("VmRSS")
    large, most = loaded(folder / "large")
    config = large.module.config
    layer = 2 * (4 * config.hidden_size**2 + 3 * config.hidden_size * config.intermediate_size)
    share = smp.stats()["parameter_bytes"]
    told = {"rank": smp.rank(), "peak": most - before, "share": share, "layer": layer}
    print(json.dumps(told), flush=True)
    del small


if __name__ == "__main__":
    main()
