"""One of several tp ranks with different inputs; runs every scenario of a part and fails where one does not hold."""

from __future__ import annotations

import datetime
import gc
import os
import sys
from collections.abc import Callable

import agreeing
import cases
import counting
import counting_layers
import custom
import divided
import embeddings
import language_model
import layer_rules
import layers
import parallel_linears
import primitives
import refused
import shardwright as smp
import torch.distributed as dist
import vocabulary
from shardwright.tensor_parallel.group import TensorGroup, current_tensor_group

from tests.jobs.patience import HANG_SECONDS

PARTS: dict[str, Callable[[TensorGroup], None]] = {
    "gradients": lambda group: [cases.check(case, group) for case in cases.cases(group.size)] and None,
    "primitives": primitives.check,
    "agreeing": agreeing.check,
    "counting": counting.check,
    "refused": refused.check,
    "layers": layers.check,
    "transformers": divided.check,
    "layer rules": layer_rules.check,
    "counting layers": counting_layers.check,
    "embeddings": embeddings.check,
    "parallel linears": parallel_linears.check,
    "vocabulary": vocabulary.check,
    "language model": language_model.check,
    "custom": custom.check,
}


def main() -> None:
    """usage: program.py BACK_END PART..., where the back end is ``process_group`` or ``messages``"""
    back_end, *parts = sys.argv[1:]
    if back_end == "messages":
        smp.init(tensor_parallel_degree=int(os.environ["WORLD_SIZE"]), ddp=True)
        group = current_tensor_group()
    else:
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=HANG_SECONDS))
        group = TensorGroup(dist.group.WORLD)
    assert type(group._back_end).__name__ == {"messages": "ByMessages", "process_group": "ByProcessGroup"}[back_end]
    for part in parts:
        PARTS[part](group)
        print(f"{part} hold")
    if back_end == "messages":
        smp.shutdown()
        return
    gc.collect()  # the exceptions that were caught hold frames, and these the group, which must not outlive Python
    dist.destroy_process_group()
    # Gloo's threads may still be giving back tensors, and Python aborts a process where they do so at its very end.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
