"""SyncBatchNorm in a divided model: over the ranks that hold the same stage only, and never in a trace."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from shardwright.data_parallel import sync_batch_norm
from shardwright.errors import ConfigError
from shardwright.partition.trace import trace_forward
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

GPU = torch.device("cuda")
REPLICAS = (0, 2)  # of four ranks, two to a pipeline


@pytest.fixture(autouse=True)
def _four_ranks() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


def synchronised(group: dist.ProcessGroup | None) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.SyncBatchNorm(3, process_group=group))


@pytest.mark.parametrize("ranks", [None, (0, 1), (0,)])
def test_a_group_with_other_ranks_is_refused(ranks: tuple[int, ...] | None) -> None:
    model = synchronised(None if ranks is None else dist.new_group(list(ranks)))
    with pytest.raises(ConfigError, match=r"module '1' is a SyncBatchNorm.*smp.get_dp_process_group\(\)"):
        sync_batch_norm.refuse_other_groups(model, REPLICAS, GPU)


def test_the_data_parallel_group_is_taken() -> None:
    model = synchronised(dist.new_group(list(REPLICAS)))
    sync_batch_norm.refuse_other_groups(model, REPLICAS, GPU)


def test_microbatches_take_one_order_where_there_are_replicas() -> None:
    model = synchronised(None)
    assert sync_batch_norm.synchronises(model, REPLICAS)
    assert not sync_batch_norm.synchronises(model, (0,))
    assert not sync_batch_norm.synchronises(nn.BatchNorm1d(3), REPLICAS)


def test_on_the_cpu_it_is_left_to_torch() -> None:
    model = synchronised(None)
    sync_batch_norm.refuse_other_groups(model, REPLICAS, torch.device("cpu"))
    with pytest.raises(ValueError, match="expected input tensor to be on GPU"):
        model(torch.ones(4, 3))


def test_a_trace_does_not_wait_for_other_ranks() -> None:
    model = synchronised(None)
    trace = trace_forward(model, model, (torch.randn(4, 3),))
    assert [path for path, record in trace.modules.items() if record.num_calls] == ["", "0", "1"]
    assert "1.running_mean" in trace.written_buffers
    assert torch.equal(model[1].running_mean, torch.zeros(3))
