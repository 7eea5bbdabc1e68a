"""One of two data-parallel ranks: buffers of all dtypes are broadcast, and those that differ are refused in words."""

import pytest
import shardwright as smp
import torch
from torch import nn

DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint16, torch.uint32, torch.uint64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
]


class Typed(nn.Linear):
    def __init__(self):
        super().__init__(3, 3, dtype=torch.float64)
        for number, dtype in enumerate(DTYPES):
            self.register_buffer(f"b{number}", (torch.arange(3) % 2 + smp.rank()).to(dtype))
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("single", torch.tensor(smp.rank(), dtype=torch.int16))
        self.register_buffer("expanded", torch.full((1, 1), float(smp.rank())).expand(2, 3))
        self.register_buffer("conjugate", torch.full((2,), 1j * (smp.rank() + 1)).conj())


@smp.step
def train(model, inputs):
    loss = model(inputs).square().mean()
    model.backward(loss)
    return loss


def check_dtypes():
    module = Typed()
    model = smp.DistributedModel(module)
    for _ in range(2):
        for number, dtype in enumerate(DTYPES):
            found = module.get_buffer(f"b{number}").to(torch.complex128)
            assert torch.equal(found, (torch.arange(3) % 2).to(dtype).to(torch.complex128)), dtype
        assert module.single.item() == 0
        assert torch.equal(module.expanded, torch.zeros(2, 3))
        assert torch.equal(module.conjugate, torch.full((2,), 1j).conj())
        with torch.no_grad():  # sent again before the next step
            module.single.fill_(smp.rank())
            module.b3.copy_((torch.arange(3) % 2 + smp.rank()).to(torch.int16))
        train(model, torch.ones(2, 3, dtype=torch.float64))


def check_refused():
    module = nn.Linear(3, 3)
    module.register_buffer("graph", torch.eye(3).to_sparse())
    with pytest.raises(smp.ConfigError, match=r"buffer 'graph' is of layout torch.sparse_coo"):
        smp.DistributedModel(module)


class Differs(nn.Linear):
    """Changes its buffers on some ranks, as told."""

    def __init__(self):
        super().__init__(3, 3, dtype=torch.float64)
        self.register_buffer("last", None)
        self.register_buffer("grown", torch.zeros(2, dtype=torch.float64))
        self.how = ""

    def forward(self, inputs):
        if self.how == "set":
            self.last = inputs.detach().mean(0)
        if self.how == "shape":
            self.grown = torch.zeros(3, dtype=torch.float64)
        if self.how == "dtype":
            self.grown = self.grown.float()
        if self.how == "gone":
            del self.grown
        return super().forward(inputs) + (0 if self.last is None else self.last)


def check_differing(how, between_steps):
    module = nn.Sequential(Differs())
    model = smp.DistributedModel(module)
    inputs = torch.ones(2, 3, dtype=torch.float64)
    loss = train(model, inputs).reduce_mean().item()
    name = "'0.last'" if how == "set" else "'0.grown'"
    if smp.rank() == 1:
        module[0].how = how
        if between_steps:
            module[0](inputs)
            module[0].how = ""
    for _ in range(2):
        with pytest.raises(smp.ShardwrightError, match=rf"(?s)all of them have to have the same ones.*{name}"):
            train(model, inputs)
    module[0].how = ""
    if between_steps and smp.rank() == 1:
        module[0].last = None
        module[0].register_buffer("grown", torch.zeros(2, dtype=torch.float64))
    assert train(model, inputs).reduce_mean().item() == loss
    if how != "gone":
        module[0].how = how  # alike on both
        for _ in range(3):
            train(model, inputs)


def check_failure_of_one_replica():
    module = nn.Sequential(Differs())
    model = smp.DistributedModel(module)

    @smp.step
    def failing(model, inputs):
        if smp.rank() == 1:
            raise ValueError("on purpose")
        loss = model(inputs).square().mean()
        model.backward(loss)
        return loss

    module[0].how = "set"
    with pytest.raises((ValueError, smp.RemoteError), match="on purpose"):
        failing(model, torch.ones(2, 3, dtype=torch.float64))
    assert module[0].last is None
    train(model, torch.ones(2, 3, dtype=torch.float64))
    train(model, torch.ones(2, 3, dtype=torch.float64))


def check_not_broadcast():
    module = nn.Sequential(Differs())
    model = smp.DistributedModel(module, broadcast_buffers=False)
    module[0].how = "set" if smp.rank() else ""
    for _ in range(2):
        train(model, torch.ones(2, 3, dtype=torch.float64))


def main():
    smp.init({"ddp": True})
    torch.manual_seed(0)
    check_dtypes()
    check_refused()
    for how in ("set", "shape", "dtype", "gone"):
        check_differing(how, False)
        check_differing(how, True)
    check_failure_of_one_replica()
    check_not_broadcast()
    print("buffers are alike")


if __name__ == "__main__":
    main()
