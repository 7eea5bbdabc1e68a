"""Modules of ``transformers`` that are divided, and their state dicts with distributed layers (spec, 2.7.7).

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
    t5,
    vit,
)

_MODELS = (bert, gpt2, gptj, gptneo, gptneox, llama, mistral, mixtral, qwen3, roberta, t5, vit)

#: By the name of the Python module and that of the class in it.
REPLACED = {(block.module, block.cls): block for block in (*(model.BLOCK for model in _MODELS), mixtral.EXPERTS)}
