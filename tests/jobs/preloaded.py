"""What ranks of tests import, which the fork server does once for all of them."""

import contextlib
import importlib

import shardwright
import torch
import torch.distributed
import torch.nn.parallel
import torch.optim
import torch.testing
import torch.utils.checkpoint
import torch.utils.data

#: Models of ``transformers`` that several tests build; each takes a tenth of a second or more to import.
_MODELS = ("albert", "bert", "gpt2", "llama", "mixtral", "resnet", "roberta", "t5", "vit")

#: What helpers of tests import, and what a Trainer does: a twentieth and an eighth of a second each time.
for name in ("pytest", "peft", "transformers"):
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
with contextlib.suppress(ImportError):
    for model in _MODELS:
        importlib.import_module(f"transformers.models.{model}.modeling_{model}")

__all__ = ["shardwright", "torch"]
