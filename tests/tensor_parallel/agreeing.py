"""What carries that which ranks tell each other before a collective: messages of hosts, whatever carries tensors."""

from __future__ import annotations

import torch
import torch.distributed as dist
from shardwright.nn.linear import DistributedLinear
from shardwright.tensor_parallel.agreement import Rule
from shardwright.tensor_parallel.back_ends.process_group import ByProcessGroup
from shardwright.tensor_parallel.group import TensorGroup


class _Watched(ByProcessGroup):
    """Notes which collectives it was asked for: on a GPU each would be one of its device."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self.asked: list[str] = []

    def all_gather(self, *args, **kwargs):
        self.asked.append("all_gather")
        return super().all_gather(*args, **kwargs)

    def all_to_all(self, *args, **kwargs):
        self.asked.append("all_to_all")
        return super().all_to_all(*args, **kwargs)

    def all_reduce(self, *args, **kwargs):
        self.asked.append("all_reduce")
        return super().all_reduce(*args, **kwargs)


def check(group: TensorGroup) -> None:
    back_end = _Watched(group._process_group)
    watched = TensorGroup(group._process_group, back_end=back_end, host=group._host)
    features = 4 * group.size
    for num_rows in (group.rank + 1, 40):
        agreement = watched.agree(Rule("a rule", (0,), free_dim=0), [torch.ones(num_rows, 160)])
        assert agreement.sizes(0) == [rank + 1 if num_rows < 40 else 40 for rank in range(group.size)]
        assert watched.as_first(group.rank == 0)
        watched.meet("a place")
        long = Rule("a name of more bytes than a message has, " * 20)
        assert watched.agree(long, [torch.ones(1)]).sizes(0) == [1] * group.size
        assert back_end.asked == [], "the back end of tensors moves nothing else"
        output = DistributedLinear(features, 6, group=watched)(torch.ones(num_rows, features, requires_grad=True))
        assert back_end.asked == ["all_to_all", "all_to_all"], back_end.asked
        output.sum().backward()
        back_end.asked.clear()
