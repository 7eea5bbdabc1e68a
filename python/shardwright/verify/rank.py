"""One rank of the job that ``python -m shardwright.verify`` starts. Its argument is a file of options."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

import shardwright as smp
from shardwright.job.runtime import current_runtime
from shardwright.launch import end_with_launcher


def load(path: str, name: str) -> Callable[[], Any]:
    """Return a function of a script, with the script's folder on the import path."""
    sys.path.insert(0, str(Path(path).resolve().parent))
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    if spec is None or spec.loader is None:
        raise smp.ConfigError(f"{path!r} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        raise smp.ConfigError(f"{path!r} has no function {name!r}")
    return function  # type: ignore[no-any-return]


def main(options_path: str) -> None:
    """Build the model, verify the step, and write the outcome on rank 0."""
    end_with_launcher(os.environ)
    options = json.loads(Path(options_path).read_text())
    path, _, name = options["target"].rpartition(":")
    build = load(path, name)
    smp.init(
        {
            "pipeline_parallel_degree": options["pp"],
            "microbatches": options["microbatches"],
            "pipeline": options["pipeline"],
            "ddp": options["dp"] > 1,
            **options["config"],
        }
    )
    dtype = getattr(torch, options["dtype"])

    def built() -> tuple[nn.Module, Any, tuple[Any, ...], dict[str, Any]]:
        torch.manual_seed(options["seed"])
        return _checked(build(), name)

    module, step, batch, extra = built()
    device = current_runtime().place.device
    model = smp.DistributedModel(module.to(device, dtype), **extra)
    batch = tree_map(lambda leaf: _converted(leaf, device, dtype), batch)
    report = smp.verify(step, model, *batch, reference=lambda: built()[0].to(dtype), tolerance=options["tolerance"])
    if smp.rank() == 0:
        written = Path(options["result"]).with_suffix(".part")
        written.write_text(json.dumps({**report.summary(), "text": str(report)}))
        written.rename(options["result"])


def _checked(made: Any, name: str) -> tuple[nn.Module, Any, tuple[Any, ...], dict[str, Any]]:
    if not isinstance(made, tuple) or len(made) not in (3, 4) or not isinstance(made[0], nn.Module):
        raise smp.ConfigError(
            f"{name}() returned {type(made).__qualname__}; allowed: (model, step_function, batch), with a "
            "torch.nn.Module first, or those and a dict of arguments of smp.DistributedModel"
        )
    module, step, batch, *rest = made
    if isinstance(module, smp.DistributedModel):
        raise smp.ConfigError(f"{name}() wrapped its model in smp.DistributedModel; return the module itself")
    arguments = batch if isinstance(batch, tuple) else (batch,)
    return module, step, arguments, dict(rest[0]) if rest else {}


def _converted(leaf: Any, device: torch.device, dtype: torch.dtype) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return leaf.to(device, dtype) if leaf.is_floating_point() else leaf.to(device)


if __name__ == "__main__":
    main(sys.argv[1])
