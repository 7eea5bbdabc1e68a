"""A rank that runs a whole model: what a failed step has changed in modules is put back, of each kind of state."""

import itertools
from collections import deque

import pytest
import shardwright as smp
import torch
from torch import nn

LARGE = 20000  # as float64, more than is copied before each step


class Counter:
    def __init__(self):
        self.count, self.log = 0, []


class Slotted(nn.Linear):
    __slots__ = ("count",)


class Keeps(nn.Linear):
    """Keeps one kind of state, on which its result depends."""

    def __init__(self, kind):
        super().__init__(4, 4, dtype=torch.float64)
        self.kind = kind
        self.k, self.history, self.by_name, self.objects = 0, [], {"inner": []}, Counter()
        self.t = torch.zeros(4, dtype=torch.float64)
        self.large = torch.zeros(LARGE, dtype=torch.float64)
        self.long = deque(range(1000))
        self.numbers = itertools.count()
        self.child = nn.Identity()
        self.slotted = Slotted(4, 4, dtype=torch.float64)
        self.slotted.count = 0
        self.register_buffer("none", None)

    def forward(self, inputs):
        value = getattr(self, f"_{self.kind}")()
        return super().forward(inputs) + value

    def _int(self):
        self.k += 1
        return self.k

    def _past_setattr(self):
        vars(self)["k"] = self.k + 1
        return self.k

    def _new_attribute(self):
        self.made = getattr(self, "made", 0) + 1
        return self.made

    def _of_a_child(self):
        self.child.seen = [*getattr(self.child, "seen", []), 1]
        return len(self.child.seen)

    def _list(self):
        self.history.append(1.0)
        return len(self.history)

    def _list_in_dict(self):
        self.by_name["inner"].append(1)
        return len(self.by_name["inner"])

    def _nested_later(self):
        if not self.history:
            self.history.append([])
        self.history[0].append(1)
        return len(self.history[0])

    def _new_list(self):
        self.history = [*self.history, 1]
        return len(self.history)

    def _object(self):
        self.objects.count += 1
        self.objects.log.append(2)
        return self.objects.count + len(self.objects.log)

    def _slot(self):
        self.slotted.count += 1
        return self.slotted.count

    def _tensor(self):
        self.t = self.t + 1
        return self.t

    def _tensor_in_place(self):
        self.t.add_(1)
        return self.t.clone()

    def _tensor_data(self):
        self.t.data = self.t.data + 1
        return self.t.clone()

    def _large_tensor(self):
        self.large.add_(1)
        return self.large[:4].clone()

    def _long_deque(self):
        self.long.append(len(self.long))
        return len(self.long)

    def _iterator(self):
        return next(self.numbers)

    def _children(self):
        self.child = nn.Sequential(self.child, nn.Identity())
        return sum(1 for _ in self.child.modules())

    def _none_buffer(self):
        self.none = torch.ones(4, dtype=torch.float64) if self.none is None else self.none + 1
        return self.none

    def _new_buffer(self):
        if "zz" not in self._buffers:
            self.register_buffer("zz", torch.zeros(4, dtype=torch.float64), persistent=False)
        self.zz += 1
        return self.zz.clone()

    def _gone_buffer(self):
        if self._buffers.get("none", 0) is None:
            del self.none
            return 1
        return 2

    def _mode(self):
        self.child.eval() if self.child.training else self.child.train()
        return 1.0 if self.child.training else 2.0

    def get_extra_state(self):
        return {"k": self.k, "history": list(self.history)}

    def set_extra_state(self, state):
        self.k, self.history = state["k"], state["history"]


KINDS = [name[1:] for name, value in vars(Keeps).items() if name[0] == "_" and name[1] != "_" and callable(value)]


@smp.step
def train(model, inputs, fails):
    loss = model(inputs).square().mean()
    model.backward(loss)
    if fails and smp.rank() == smp.size() - 1:
        raise ValueError("on purpose")
    return loss


def plain(module, inputs):
    losses = [module(part).square().mean() for part in inputs.chunk(2)]
    return torch.stack(losses).mean().item()


def state(module):
    return {name: value for name, value in module.state_dict().items() if not isinstance(value, torch.Tensor)}


def made(kind):
    torch.manual_seed(0)
    return nn.Sequential(Keeps(kind), Keeps(kind))


def check(kind, succeeded_before):
    module, reference = made(kind), made(kind)
    model = smp.DistributedModel(module)
    inputs = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for _ in range(succeeded_before):
        train(model, inputs, False)
        plain(reference, inputs)
    for _ in range(2):
        with pytest.raises((ValueError, smp.RemoteError), match="on purpose"):
            train(model, inputs, True)
    assert state(module) == state(reference), (kind, state(module), state(reference))
    assert [*module.state_dict()] == [*reference.state_dict()], kind
    for _ in range(2):
        ours, theirs = train(model, inputs, False).reduce_mean().item(), plain(reference, inputs)
        assert ours == pytest.approx(theirs, rel=1e-12), (kind, succeeded_before, ours, theirs)


class Late(nn.Linear):
    """Writes to what earlier steps did not write to, from its second step on."""

    def __init__(self, what):
        super().__init__(4, 4, dtype=torch.float64)
        self.what, self.writes = what, False
        self.large = torch.zeros(LARGE, dtype=torch.float64)

    def forward(self, inputs):
        if self.writes:
            with torch.no_grad():
                (self.weight if self.what == "weight" else self.large).add_(1)
        return super().forward(inputs) + self.large[:4].clone()


def check_late(what):
    module = nn.Sequential(nn.Linear(4, 4, dtype=torch.float64), Late(what))
    model = smp.DistributedModel(module)
    inputs = torch.ones(4, 4, dtype=torch.float64)
    for _ in range(2):
        train(model, inputs, False)
    module[1].writes = True
    before = getattr(module[1], what).detach().clone()
    with pytest.raises((ValueError, smp.RemoteError)):
        train(model, inputs, True)
    with pytest.raises(smp.ShardwrightError, match=rf"'1.{what}' was written to") as failed:
        train(model, inputs, False)
    with torch.no_grad():
        getattr(module[1], what).copy_(before)
    smp.resume_after_failure(failed.value)
    with pytest.raises((ValueError, smp.RemoteError)):
        train(model, inputs, True)
    assert torch.equal(getattr(module[1], what), before), what
    train(model, inputs, False)


def main():
    smp.init({"microbatches": 2, "ddp": True})
    for kind in KINDS:
        for succeeded_before in (0, 2):
            check(kind, succeeded_before)
    for what in ("weight", "large") if smp.size() == 1 else ():  # others may be stopped before they write
        check_late(what)
    print(f"put back {len(KINDS)} kinds")


if __name__ == "__main__":
    main()
