"""Runs a script whose trainers train over ranks, for ``shardwright run --trainers``: ``CONFIG KIND NAME ARGUMENTS``.

The classes of this package stand in the place of those of ``transformers`` before the script imports them.
"""

from __future__ import annotations

import json
import os
import runpy
import sys

import transformers

from shardwright import huggingface
from shardwright.job.ranks import data_group, group_ranks, rank, size
from shardwright.logs import logger
from shardwright.start import init
from shardwright.state import state

_NAMES = ("Trainer", "TrainingArguments", "Seq2SeqTrainer", "Seq2SeqTrainingArguments")


def stand_in() -> None:
    """Let the trainers of transformers, and all that are made of them from now on, train over ranks."""
    for name in _NAMES:
        plain, own = getattr(transformers, name), getattr(huggingface, name)
        for module in list(sys.modules.values()):
            of_module = getattr(module, "__dict__", {})
            is_ours = getattr(module, "__name__", "").startswith("shardwright.")
            if of_module.get(name) is plain and not is_ours:
                setattr(module, name, own)
        setattr(transformers, name, own)


def main() -> None:
    """Run the script that the arguments name."""
    config, kind, script, *arguments = sys.argv[1:]
    degrees = json.loads(config)
    # Batches are padded each to its own length, which tensor-parallel ranks with different samples would not share.
    init({"ddp": True, "prescaled_batch": degrees.get("tensor_parallel_degree", 1) > 1, **degrees})
    stand_in()
    if rank() == 0:
        logger.warning(
            "trainers of transformers, and those made of them, train over %d ranks: pipelines of %d, %d with samples "
            "of their own, batches in %d microbatches",
            size(),
            state.cfg.pipeline_parallel_degree,
            len(group_ranks(data_group())),
            state.cfg.microbatches,
        )
    if kind == "module":
        sys.argv = [script, *arguments]
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        sys.argv = [script, *arguments]
        sys.path[0] = os.path.dirname(os.path.abspath(script))
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
