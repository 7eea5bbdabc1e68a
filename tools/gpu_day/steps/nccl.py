"""What NCCL says to two ranks on one device, and what the library makes of that."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from tools.gpu_day.options import Options
from tools.gpu_day.ranks import RankEnded, run_ranks

_SECONDS = 15.0
_TEXT = 600


def plain(options: Options) -> dict[str, Any]:
    """An all-reduce of torch's own; on the CPU over Gloo."""
    backend = "nccl" if options.device == "cuda" else "gloo"
    torch.distributed.init_process_group(backend, timeout=timedelta(seconds=_SECONDS))
    try:
        tensor = torch.ones(1 << 10, device=options.device)
        torch.distributed.all_reduce(tensor)
        return {"sum": float(tensor[0])}
    finally:
        torch.distributed.destroy_process_group()


def library(options: Options) -> dict[str, Any]:
    """The library, with the backend that is asked for by name."""
    return _started("nccl")


def automatic(options: Options) -> dict[str, Any]:
    """The library, with the backend of its own choice: a step of data parallelism."""
    found = _started("auto")
    if "error" not in found:
        import shardwright as smp

        model = smp.DistributedModel(torch.nn.Linear(4, 4).to(options.device))

        @smp.step
        def train(model: Any, inputs: torch.Tensor) -> torch.Tensor:
            loss = model(inputs).square().mean()
            model.backward(loss)
            return loss.detach()

        train(model, torch.ones(4, 4, device=options.device))
        found["gradient"] = float(next(model.parameters()).grad.abs().sum())
    return found


def _started(backend: str) -> dict[str, Any]:
    import shardwright as smp

    try:
        smp.init({"ddp": True, "ddp_dist_backend": backend})
        group = smp.get_dp_process_group()
        return {"backend": torch.distributed.get_backend(group)}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:_TEXT]}


def _words(ended: list[RankEnded]) -> str:
    """What the ranks came to, in words."""
    return " | ".join(
        f"rank {rank}: {each.result}"
        if each.result is not None
        else f"rank {rank} ended with {each.code}: {each.said()[-_TEXT:]}"
        for rank, each in enumerate(ended)
    )


def run(options: Options) -> dict[str, Any]:
    """Ask; it passes if the library refuses what does not work, on all ranks, and its own choice works."""
    asked = run_ranks(plain, options, seconds=_SECONDS + 5, environment={"NCCL_DEBUG": "WARN"}, grace=5)
    named = run_ranks(library, options, seconds=_SECONDS, grace=5)
    chosen = run_ranks(automatic, options, seconds=_SECONDS, grace=5)
    works = all(each.result is not None for each in asked)
    shares = options.device == "cpu" or torch.cuda.device_count() < 2
    refused = [each.result is not None and "error" in each.result for each in named]
    automatically = [each.result is not None and each.result.get("gradient", 0.0) > 0.0 for each in chosen]
    found = {"plain_works": works, "plain": _words(asked), "named": _words(named), "automatic": _words(chosen)}
    return {
        "passed": all(automatically) and (all(refused) if shares else not any(refused)),
        **found,
    }
