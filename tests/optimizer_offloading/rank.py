"""One rank of a job that trains with and without the optimizer's state on a disk, once for each case."""

from __future__ import annotations

from typing import Any

import shardwright as smp
import torch
from shardwright.memory.optimizers import nbytes
from shardwright.offloading.tensors import MIN_BYTES
from shardwright.optimizer.offloading import storage
from shardwright.sharded_data_parallel.parameters import shard_of
from torch import nn

from tests.jobs.listed import run_listed
from tests.offloading.late_streams import LateStreams
from tests.optimizer_offloading.problems import OPTIMIZERS, CountedPieces, groups_of, same, small_chunks, wrap

STEPS, ROWS, WIDTH = 3, 8, 6
#: Of a weight, beside one process.
TOLERANCE = 1e-10


def layers() -> nn.Sequential:
    """Layers with weights of two and of a hundred KiB, so that every stage has both."""
    torch.manual_seed(4)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, 131), nn.Tanh(), nn.Linear(131, 97), nn.Linear(97, WIDTH)) for _ in range(3))
    )


def batch(step: int, replica: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + replica)
    return torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64).to(torch.get_default_dtype())


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


@smp.step
def train(model: Any, x: torch.Tensor) -> torch.Tensor:
    loss = _wide(model(x)).square().mean()
    model.backward(loss)
    return torch.as_tensor(loss)


def trained(case: dict[str, Any], where: Any) -> dict[str, Any]:
    """Train in a job of its own, save and load the state on the way, and return what came of it."""
    keys = {"microbatches": 2, "auto_partition": False, "default_partition": 0, "deterministic_server": True}
    smp.init({**keys, "overlapping_allreduce": False, **case["config"], "offload_optimizer": where})
    counted = CountedPieces()
    module = layers()
    for index, part in enumerate(module):
        smp.set_partition(part, index * smp.pp_size() // len(module))
    model: Any = smp.DistributedModel(module)
    optimizer = wrap(OPTIMIZERS[case["optimizer"]](groups_of(model)))
    for step in range(STEPS):
        optimizer.zero_grad()
        train(model, batch(step, smp.dp_rank()).to(next(model.local_parameters()).dtype))
        optimizer.step()
        if step == 1:
            local = optimizer.local_state_dict(gather_if_shard=False)
            optimizer.load_state_dict(local)
    report = smp.memory_report()[smp.rank()]
    found = {
        "weights": {name: value.detach().clone() for name, value in whole(model).items()},
        "state": optimizer.state_dict(),
        "report": report,
        "small": small_bytes(optimizer),
        "pieces": counted.end(),
        "sent": smp.stats()["server"]["total"]["sent"]["forward"],
        "is_root": smp.pp_rank() == 0,
        "replicas": smp.dp_size(),
    }
    smp.barrier()
    smp.shutdown()
    return found


def small_bytes(optimizer: Any) -> int:
    """Bytes of state, and of master weights, in tensors that are too small to leave."""
    values = [value for entry in optimizer.state.values() for value in entry.values() if torch.is_tensor(value)]
    masters = optimizer._masters.tensors() if optimizer.has_masters else []
    return sum(nbytes(value) for value in (*values, *masters) if nbytes(value) < MIN_BYTES)


def whole(model: Any) -> dict[str, torch.Tensor]:
    """This rank's weights, or its shards of them."""
    return {name: shard_of(value) for name, value in model.local_named_parameters()}


def reference(optimizer_name: str, replicas: int) -> dict[str, torch.Tensor]:
    """Train in this process alone, with the batches of all replicas."""
    module = layers()
    optimizer = OPTIMIZERS[optimizer_name](groups_of(module))
    for step in range(STEPS):
        optimizer.zero_grad()
        parts = [part for replica in range(replicas) for part in batch(step, replica).chunk(2)]
        for part in parts:
            (module(part).square().mean() / len(parts)).backward()
        optimizer.step()
    return {name: value.detach() for name, value in module.named_parameters()}


def run(case: dict[str, Any]) -> None:
    """Compare a training with state on a disk with one without, bit for bit, and with one process."""
    small_chunks()
    torch.set_default_dtype(torch.float64 if case["dtype"] == "float64" else torch.float32)
    plain = trained(case, False)
    made = storage.CudaStreams
    if case["streams"] == "late":
        streams = LateStreams()
        storage.CudaStreams = lambda: streams  # type: ignore[assignment, misc, return-value]
    streamed = trained(case, case["where"])
    storage.CudaStreams = made  # type: ignore[misc]
    if case["streams"] == "late":
        assert streams.log.count("in") > 10, "nothing passed through the device"
        assert streams.under_way == 0
    same(plain["weights"], streamed["weights"], "weights")
    same(plain["state"], streamed["state"], "state")
    assert plain["pieces"] == 0
    assert streamed["pieces"] > 10, "no parameter was cut"
    assert plain["report"]["offloaded_optimizer_state"] == 0
    whole_bytes = plain["report"]["measured"]["optimizer_state"]
    left = streamed["report"]["measured"]["optimizer_state"]
    assert whole_bytes == left + streamed["report"]["offloaded_optimizer_state"]
    assert left == streamed["small"] < 0.25 * whole_bytes, (left, streamed["small"], whole_bytes)
    assert streamed["weights"]
    if "pipeline_parallel_degree" in case["config"] and streamed["is_root"]:
        assert streamed["sent"] > 0, "nothing crossed"
    if case["dtype"] == "float64" and "sharded_data_parallel_degree" not in case["config"]:
        expected = reference(case["optimizer"], streamed["replicas"])
        for name, value in streamed["weights"].items():
            assert (value - expected[name]).abs().max() <= TOLERANCE, name


if __name__ == "__main__":
    run_listed(run)
