"""The steps in their order: the most valuable first, because a machine may be taken away at any time."""

from __future__ import annotations

from dataclasses import dataclass

_PACKAGE = "tools.gpu_day.steps"


@dataclass(frozen=True)
class Step:
    """One step.

    Attributes:
        name: The name of its module in :mod:`tools.gpu_day.steps`.
        seconds: How long it may take.
        shows: What it shows.
        devices: The kinds of devices on which it runs.
        module: The module's full name, where it is another.
    """

    name: str
    seconds: float
    shows: str
    devices: frozenset[str] = frozenset({"cuda", "cpu"})
    module: str = ""

    @property
    def module_name(self) -> str:
        """The full name of its module."""
        return self.module or f"{_PACKAGE}.{self.name}"


#: What steps import and the runner imports once for all of them; it forks them from itself.
PRELOADED = ("tests.jobs.preloaded",)

PLAN = (
    Step("ceilings", 40, "rates of device memory, of pinned copies both ways and of bf16 matrix products"),
    Step("driver_facts", 40, "what the driver does between two processes on one device"),
    Step("autograd_devices", 30, "backward through remote tensors on devices with and without an index"),
    Step("transfers", 60, "routes and rates of tensors between two ranks"),
    Step("gradients", 60, "gradients of two ranks on one device against one process"),
    Step("gpu_tests", 120, "the tests that need a CUDA device"),
    Step("overhead", 90, "a step of GPT-2 XL on one rank beside plain PyTorch"),
    Step("two_ranks", 60, "two ranks on one device with AdamW: routes and the memory account"),
    Step("activation_offload", 60, "activation offloading: slowdown and share of the PCIe rate"),
    Step("optimizer_offload", 60, "optimizer offloading: exactness, time and memory"),
    Step("gloo_one_device", 60, "data and tensor parallelism over Gloo on one device"),
    Step("nccl", 60, "what NCCL says to two ranks on one device"),
    Step("streams_graph_compile", 60, "a step on a side stream, beside graph capture and under torch.compile"),
    Step("sharded", 60, "sharded data parallelism"),
    Step("out_of_memory", 40, "device memory that runs out on one rank, told on all"),
    Step("killed_rank", 40, "a killed rank whose memory a peer has open"),
    Step("checkpoint", 60, "a checkpoint of 8 GiB beside torch.save"),
    Step("memory_table", 60, "peak device memory and time of each feature that saves memory, beside the account"),
)
