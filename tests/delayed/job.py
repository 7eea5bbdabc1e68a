"""One rank of a job whose model is created with delayed parameters; ``job.py PP TP`` on PP * TP ranks."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import shardwright as smp
import torch
from shardwright.delayed.materialise import has_delayed, is_delayed
from shardwright.delayed.operations import Operation
from shardwright.delayed.shapes import ShapeTensor
from shardwright.partition.stand_ins import StandIns
from torch import nn

from tests.soak.held import give_large_memory_back

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


def each_weight_is_made_once_and_measured_before() -> None:
    """On the rank that owns it; the trace measures modules one at a time, on memory that stands in for weights."""
    torch.manual_seed(7)
    whole = make(64)
    torch.manual_seed(7)
    with smp.delay_param_initialization():
        module = make(64)
    names = {id(each.value.memory): name for name, each in module.named_parameters()}
    drawing = {name: each.value.memory.writes[-1] for name, each in module.named_parameters()}
    storages = {each.meta.untyped_storage()._cdata: name for name, each in module.named_parameters()}
    made: dict[str, int] = dict.fromkeys(names.values(), 0)
    standing: list[tuple[str, weakref.ref[torch.Tensor]]] = []
    most_modules, measured = 0, 0
    traces: list[Any] = []
    decide = import_module("shardwright.partition.decide")
    run, stand_in, divide = Operation.run, StandIns._stand_in, decide.divide

    def counted(operation: Operation, real: Any) -> Any:
        for name, one in drawing.items():
            made[name] += one is operation
        return run(operation, real)

    def watched(self: StandIns, leaf: object, described: Any) -> object:
        nonlocal most_modules, measured
        given = stand_in(self, leaf, described)
        if isinstance(leaf, ShapeTensor) and (name := storages.get(leaf.meta.untyped_storage()._cdata)) is not None:
            measured += 1
            assert isinstance(given, torch.Tensor)
            standing.append((name.rpartition(".")[0], weakref.ref(given)))
            most_modules = max(most_modules, len({path for path, each in standing if each() is not None}))
        return given

    def noted(module: nn.Module, trace: Any, *others: Any) -> Any:
        traces.append(trace)
        return divide(module, trace, *others)

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(decide, "divide", noted)
        patches.setattr(Operation, "run", counted)
        patches.setattr(StandIns, "_stand_in", watched)
        model = smp.DistributedModel(module, trace_execution_times=True)
        train(model, ids())
    owned = {name for name, _ in model.local_named_parameters()}
    assert 0 < len(owned) < len(names)
    assert made == {name: int(name in owned) for name in made}
    if smp.pp_rank() == 0:
        assert most_modules == 1
        assert measured >= 2  # the embedding, and a layer that stands for those like it
        (trace,) = traces
        assert trace.measurement is not None
        assert all(trace.modules[path].own_seconds > 0 for path in ("0", "1", "2", "3"))
        assert trace.modules["1"].own_seconds == trace.modules["2"].own_seconds
    check(model, whole)


def memory_is_that_of_a_share() -> None:
    """At most the share, the largest weight a few times, and what a step needs were ever in memory."""
    give_large_memory_back()  # what the allocator keeps of freed pieces depends on what came before
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
        each_weight_is_made_once_and_measured_before()
    print("all hold")


main()
