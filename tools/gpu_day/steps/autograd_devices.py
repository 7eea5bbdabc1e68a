"""Backward through tensors that stay on another rank, on devices with and without an index."""

from __future__ import annotations

import os
from typing import Any

import torch

from tools.gpu_day.options import Options
from tools.gpu_day.ranks import results_of_ranks, run_ranks
from tools.gpu_day.small import EXACT, Divided, seen_devices

#: Names, for a rank of its own, the device of the tensor that it makes.
_DEVICE = "GPU_DAY_TENSOR_DEVICE"


class Head(torch.autograd.Function):
    """The head of a graph: its result requires a gradient, which ends here, as at a cut of the library's."""

    @staticmethod
    def forward(ctx: Any, _anchor: torch.Tensor, box: list[torch.Tensor]) -> torch.Tensor:
        """The tensor in the box."""
        return box.pop()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, None]:
        """Nothing."""
        return None, None


def wrapper(options: Options) -> dict[str, Any]:
    """Go backward through a remote tensor that is made by hand, as torch's autograd sees it."""
    from shardwright.frames.remote import remote_tensor

    class Source:
        def take(self) -> torch.Tensor:
            return torch.full((8,), 3.0, device=options.device)

        def arrived(self, before: object, after: object) -> None:
            pass

    anchor = torch.zeros((), device=os.environ[_DEVICE], requires_grad=True)
    tensor = Head.apply(anchor, [remote_tensor([8], [1], torch.float32, os.environ[_DEVICE], Source())])
    said = str(tensor.device)
    local = torch.ones(8, device=options.device, requires_grad=True)
    (tensor * local).sum().backward()
    assert local.grad is not None
    return {"device": said, "gradient": float(local.grad[0])}


def two_ranks(options: Options) -> dict[str, Any]:
    """Steps whose results stay on their rank until rank 0 uses them, in the step and in its backward."""
    divided = Divided(options.device, 16 if options.tiny else 1024)
    difference = max(divided.exact_step() for _ in range(3))
    return {"difference": difference, "devices": sorted(set(seen_devices)), "own": str(divided.draw().device)}


def run(options: Options) -> dict[str, Any]:
    """Try both kinds; it passes if a device with an index works, and the library's own tensors do."""
    names = ["cuda", "cuda:0"] if options.device == "cuda" else ["cpu"]
    found: dict[str, Any] = {}
    for name in names:
        (ended,) = run_ranks(wrapper, options, 1, seconds=12, environment={_DEVICE: name})
        key = name.replace(":", "_")
        if ended.result is not None and ended.code == 0:
            found[key] = f"gradient {ended.result['gradient']} on {ended.result['device']}"
            found[f"{key}_works"] = ended.result["gradient"] == 3.0
        else:
            found[key] = f"ended with {ended.code}: {ended.said()[-300:]}"
            found[f"{key}_works"] = False
    ranks = results_of_ranks(two_ranks, options, seconds=20)
    found["difference"] = max(each["difference"] for each in ranks)
    found["results_say"], found["values_are_on"] = ", ".join(ranks[0]["devices"]), ranks[0]["own"]
    found["said_device_is_the_values"] = ranks[0]["devices"] == [ranks[0]["own"]]
    passed = (
        found["said_device_is_the_values"]
        and found[f"{names[-1].replace(':', '_')}_works"]
        and found["difference"] <= EXACT
    )
    return {"passed": bool(passed), "bars": {"difference": EXACT}, **found}
