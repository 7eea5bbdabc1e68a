"""Modules of ``transformers`` that are divided, and their state dicts with distributed layers (the spec's 2.7.7).

``transformers`` is not imported: a class is recognised by its name once a script has imported it.
"""

from shardwright.nn.huggingface import (
    bert,
    gpt2,
    gptj,
    gptneo,
    gptneox,
    llama,
    mistral,
    mixtral,
    qwen3,
    roberta,
    vit,
)

_MODELS = (bert, gpt2, gptj, gptneo, gptneox, llama, mistral, mixtral, qwen3, roberta, vit)

#: By the name of the Python module and that of the class in it.
REPLACED = {(model.BLOCK.module, model.BLOCK.cls): model.BLOCK for model in _MODELS}

__all__ = [
    "REPLACED",
    "bert",
    "gpt2",
    "gptj",
    "gptneo",
    "gptneox",
    "llama",
    "mistral",
    "mixtral",
    "qwen3",
    "roberta",
    "vit",
]
