"""Device memory that runs out on one rank: every rank says whose, with that rank's account; the next step is exact."""

from __future__ import annotations

import os
from typing import Any

import torch

from tools.gpu_day.options import Options
from tools.gpu_day.ranks import results_of_ranks
from tools.gpu_day.small import EXACT, Divided, actions

#: More than any device, or any machine, has.
_MORE_BYTES = 1 << 48
_TEXT = 1_000


def ranks(options: Options) -> dict[str, Any]:
    """One of two ranks; it is rank 1's memory that runs out, in the second step."""
    divided = Divided(options.device, 32 if options.tiny else 1024)
    found: dict[str, Any] = {"before": divided.exact_step()}

    def allocate(inputs: torch.Tensor) -> None:
        torch.empty(_MORE_BYTES, dtype=torch.uint8, device=inputs.device)

    if os.environ["RANK"] == "1":
        actions["second"] = allocate
    divided.model.zero_grad()
    try:
        divided.train(divided.model, divided.draw())
        found["text"] = "no error"
    except Exception as error:
        text = "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
        found["text"] = text[:_TEXT]
        found["names_the_rank"] = "Memory of rank 1" in text
        found["says_what"] = "memory" in text.lower()
    found["after"] = divided.exact_step()
    return found


def run(options: Options) -> dict[str, Any]:
    """Run out; it passes if both ranks said so and the next step was exact."""
    results = results_of_ranks(ranks, options, seconds=30)
    said = all(each.get("names_the_rank") and each.get("says_what") for each in results)
    worst = max(max(each["before"], each["after"]) for each in results)
    found = {"difference": worst, "said_on_all": said, "rank_0": results[0]["text"], "rank_1": results[1]["text"]}
    return {"passed": said and worst <= EXACT, "bars": {"difference": EXACT}, **found}
