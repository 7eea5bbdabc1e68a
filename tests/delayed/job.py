"""One rank of a job whose model is created with delayed parameters; ``job.py PP TP`` on PP * TP ranks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import shardwright as smp
import torch
from shardwright.delayed.materialise import has_delayed, is_delayed
from torch import nn

LAYERS, WIDTH = 24, 1600
MIB = 1 << 20


def make(width: int = 8, layers: int = 3) -> nn.Module:
    return nn.Sequential(nn.Embedding(20, width), *(nn.Linear(width, width) for _ in range(layers)))


@smp.step
def train(model: smp.DistributedModel, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).square().mean()
    model.backward(loss)
    return loss.detach()


def ids() -> torch.Tensor:
    return torch.arange(8).view(4, 2)


def resident() -> Iterator[int]:
    """Bytes that this process has in memory now, and had at most, without the pages of files that it has now."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    now, most, of_files = (int(status[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM", "RssFile"))
    yield from (now - of_files, most - of_files)


def check(model: smp.DistributedModel, whole: nn.Module) -> None:
    """The whole model's state dict has the values of one that was made at once."""
    found = model.state_dict()
    for name, tensor in whole.state_dict().items():
        assert torch.equal(found[name], tensor), name


def seeds_may_differ() -> None:
    """Tp rank 0's numbers count, and those of the first rank of replicas, as ever."""
    torch.manual_seed(5)
    whole = make()
    torch.manual_seed(5 + 10 * smp.tp_rank())
    with smp.delay_param_initialization(), smp.tensor_parallelism():
        module = make()
    model = smp.DistributedModel(module)
    train(model, ids())
    if smp.tp_size() > 1:
        assert all(isinstance(part, smp.nn.DistributedModule) for part in model.module.children())
    check(model, whole)


def states_before_the_first_step() -> None:
    torch.manual_seed(6)
    whole = make()
    torch.manual_seed(6)
    with smp.delay_param_initialization(), smp.tensor_parallelism():
        model = smp.DistributedModel(make())
    assert has_delayed(model) == (smp.pp_size() > 1)
    check(model, whole)
    loaded = make()
    model.load_state_dict(loaded.state_dict())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    check(model, loaded)
    train(model, ids())
    check(model, loaded)
    assert not any(map(is_delayed, model.local_parameters()))
    optimizer.step()
    with pytest.raises(AssertionError):
        check(model, loaded)


def the_configuration_decides() -> None:
    with smp.model_creation(tensor_parallelism=True, dtype=torch.float64):
        module = make()
    assert all(map(is_delayed, module.parameters()))
    assert all(parameter.dtype == torch.float64 for parameter in module.parameters())


def times_cannot_be_measured() -> None:
    with smp.delay_param_initialization():
        model = smp.DistributedModel(make(), trace_execution_times=True)
    error = smp.PartitionError if smp.pp_rank() == 0 else smp.RemoteError
    with pytest.raises(error, match="needs a model with values, but this one has delayed parameters"):
        train(model, ids())


def memory_is_that_of_a_share() -> None:
    """At most the share, the largest weight a few times, and what a step needs were ever in memory."""
    train(smp.DistributedModel(make(64, 2)), ids())
    import_module("torch._dynamo")  # as what makes substitutes does, whose memory is not counted here
    before, _ = resident()
    Path("/proc/self/clear_refs").write_text("5")  # the most from now on
    torch.manual_seed(smp.rank())
    with smp.delay_param_initialization(), smp.tensor_parallelism():
        module = make(WIDTH, LAYERS)
    size = sum(parameter.nbytes for parameter in module.parameters())
    largest = max(parameter.nbytes for parameter in module.parameters())
    model = smp.DistributedModel(module)
    with torch.no_grad():
        train_without_gradients(model, ids())
    share = sum(parameter.nbytes for parameter in model.local_parameters())
    assert share < 0.6 * size
    now, most = resident()
    allowed = share + 6 * largest
    assert most - before < allowed, (
        f"{(most - before) // MIB} MiB, {allowed // MIB} allowed, {(now - before) // MIB} now"
    )


@smp.step
def train_without_gradients(model: smp.DistributedModel, x: torch.Tensor) -> torch.Tensor:
    return model(x).mean()


def main() -> None:
    pp, tp = map(int, sys.argv[1:])
    smp.init(
        {
            "pipeline_parallel_degree": pp,
            "tensor_parallel_degree": tp,
            "ddp": tp > 1,
            "microbatches": 1,
            "delayed_parameter_initialization": True,
        }
    )
    memory_is_that_of_a_share()
    seeds_may_differ()
    states_before_the_first_step()
    the_configuration_decides()
    if pp > 1:
        times_cannot_be_measured()
    print("all hold")


main()
