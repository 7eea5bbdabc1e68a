"""One of two data-parallel ranks; runs every scenario and fails where a gradient is not the mean."""

import copy
import sys

import shardwright as smp
import torch
import torch.distributed as dist
from shardwright.data_parallel.reducer import Reducer
from torch import nn

MICROBATCHES = 2


class Branching(nn.Module):
    """Layers that a batch may use twice, or not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.third = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)

    def forward(self, inputs, uses):
        for name, count in uses.items():
            for _ in range(count):
                inputs = getattr(self, name)(inputs)
        return self.norm(inputs)


@smp.step
def train(model, inputs, uses):
    loss = model(inputs, uses).square().sum()
    model.backward(loss)
    return loss


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * step + rank), dtype=torch.float64)


def reference(module: nn.Module, step: int, uses: list[dict[str, int]], ranks: int) -> dict[str, torch.Tensor | None]:
    """The mean over ranks of the mean over microbatches; buffers end as those of rank 0."""
    gradients: dict[str, torch.Tensor] = {}
    start = {name: buffer.clone() for name, buffer in module.named_buffers()}
    for rank in reversed(range(ranks)):  # rank 0 last, whose buffers stay
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                buffer.copy_(start[name])
        for microbatch in batch(step, rank).chunk(MICROBATCHES):
            module.zero_grad()
            module(microbatch, uses[rank]).square().sum().backward()
            for name, parameter in module.named_parameters():
                if parameter.grad is not None:
                    scaled = parameter.grad / (MICROBATCHES * ranks)
                    gradients[name] = gradients[name] + scaled if name in gradients else scaled.clone()
    module.zero_grad()
    return {name: gradients.get(name) for name, _ in module.named_parameters()}


def check(model: smp.DistributedModel, expected: dict[str, torch.Tensor | None], what: str) -> None:
    for name, parameter in model.named_parameters():
        wanted = expected[name]
        if wanted is None:
            assert parameter.grad is None, f"{what}: {name} has a gradient"
        else:
            assert parameter.grad is not None, f"{what}: {name} has no gradient"
            torch.testing.assert_close(parameter.grad, wanted, rtol=1e-12, atol=1e-12, msg=f"{what}: {name}")


def changing_graphs(**options: object) -> None:
    torch.manual_seed(smp.rank())  # ranks start from rank 0's weights all the same
    module = Branching()
    model = smp.DistributedModel(module, bucket_cap_mb=1e-4, **options)
    plain = copy.deepcopy(module)
    once = {"first": 1, "second": 1, "third": 1}
    uses = [
        [once, once],
        [once, once],
        [once, {"first": 2, "second": 1, "third": 1}],  # another gradient after the bucket was sent
        [once, once],
        [{"first": 1, "third": 1}, once],  # one rank skips a layer
        [{"first": 1}, {"first": 1}],  # nobody has a gradient
        [once, once],
    ]
    for step, used in enumerate(uses):
        expected = reference(plain, step, used, 2)
        model.zero_grad(set_to_none=step != 3)  # once, zeros are there before
        if step == 3:
            expected = {
                n: torch.zeros_like(p) if expected[n] is None else expected[n] for n, p in plain.named_parameters()
            }
        train(model, batch(step, smp.rank()), used[smp.rank()])
        check(model, expected, f"step {step} with {options}")
    for name, buffer in model.named_buffers():
        if smp.rank() == 0:
            torch.testing.assert_close(buffer, dict(plain.named_buffers())[name], msg=name)


def accumulation() -> None:
    torch.manual_seed(0)
    module = Branching()
    model = smp.DistributedModel(module, backward_passes_per_step=2)
    plain = copy.deepcopy(module)
    once = {"first": 1, "second": 1, "third": 1}
    for pair in range(2):
        model.zero_grad()
        total: dict[str, torch.Tensor] = {}
        for step in (2 * pair, 2 * pair + 1):
            for name, gradient in reference(plain, step, [once, once], 2).items():
                total[name] = total[name] + gradient if name in total else gradient
            train(model, batch(step, smp.rank()), once)
        check(model, total, f"accumulation pair {pair}")


def comm_hook() -> None:
    torch.manual_seed(0)
    module = Branching()
    model = smp.DistributedModel(module)
    plain = copy.deepcopy(module)
    seen = []

    def hook(state: str, bucket: smp.data_parallel.bucket.GradBucket) -> torch.futures.Future[torch.Tensor]:
        seen.append((state, bucket.index(), bucket.is_last(), len(bucket.parameters())))
        averaged = bucket.buffer() / (2 * MICROBATCHES)
        work = dist.all_reduce(averaged, group=smp.get_dp_process_group(), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    model.register_comm_hook("mine", hook)
    once = {"first": 1, "second": 1, "third": 1}
    for step in range(3):
        expected = reference(plain, step, [once, once], 2)
        model.zero_grad()
        train(model, batch(step, smp.rank()), once)
        check(model, expected, f"comm hook step {step}")
    assert seen == [("mine", 0, True, 8)] * 3, seen


def uneven_inputs() -> None:
    torch.manual_seed(0)
    model = smp.DistributedModel(Branching())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    once = {"first": 1, "second": 1, "third": 1}
    with model.join():
        for step in range(3 if smp.rank() == 0 else 5):
            optimizer.zero_grad()
            train(model, batch(step, smp.rank()), once)
            optimizer.step()
    weights = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    mine, other = smp.allgather(weights, smp.DP_GROUP)
    assert torch.equal(mine, other)
    model.zero_grad()
    train(model, batch(9, smp.rank()), once)  # the job goes on in lockstep


def main() -> None:
    torch.set_default_dtype(torch.float64)
    smp.init({"microbatches": MICROBATCHES, "ddp": True})
    sent_early = []
    send = Reducer._send

    def counting(self: Reducer, bucket: object) -> None:
        sent_early.append(self._listening)
        send(self, bucket)

    Reducer._send = counting
    changing_graphs()
    assert any(sent_early), "no bucket was sent during backward"
    sent_early.clear()
    changing_graphs(overlapping_allreduce=False)
    assert not any(sent_early)
    changing_graphs(gradient_as_bucket_view=True)
    accumulation()
    comm_hook()
    uneven_inputs()
    sys.stdout.write("all scenarios hold\n")


if __name__ == "__main__":
    main()
