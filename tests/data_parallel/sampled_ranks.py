"""One of the ranks of two pipelines: what the sampler gives it, and what it is told of other batches."""

import json

import shardwright as smp
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

smp.init({"pipeline_parallel_degree": 2, "ddp": True, "microbatches": 2})
torch.manual_seed(1)
model = smp.DistributedModel(nn.Sequential(nn.Linear(4, 40), nn.Linear(40, 4)))


@smp.step
def train(model, batch, scale):
    loss = scale * model(batch["x"]).square().mean()
    model.backward(loss)
    return loss


@smp.step
def train_on_others(model, inputs, labels):
    loss = nn.functional.cross_entropy(model(inputs), labels)
    model.backward(loss)
    return loss


data = TensorDataset(torch.arange(24 * 4.0).view(24, 4))
sampler = smp.DistributedSampler(data, seed=3)
loader = DataLoader(data, batch_size=4, sampler=sampler)
epochs = []
for epoch in range(2):
    sampler.set_epoch(epoch)
    epochs.append([])
    for (x,) in loader:
        train(model, {"x": x}, 0.5)
        epochs[-1] += [int(row[0]) // 4 for row in x]
    state = sampler.state_dict()

sampler.set_epoch(0)
indices = iter(sampler)
first = [next(indices) for _ in range(5)]
again = smp.DistributedSampler(data, seed=3)
again.load_state_dict(sampler.state_dict())
again.set_epoch(0)
rest = list(again)
restarted = list(again)

# Every rank has its own inputs, and the labels are on the first only.
inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(smp.rank()))
for _ in range(4):
    train_on_others(model, inputs, torch.zeros(8, dtype=torch.long) if smp.pp_rank() == 0 else None)

found = {
    "dp_rank": smp.dp_rank(),
    "pp_rank": smp.pp_rank(),
    "epochs": epochs,
    "first": first,
    "rest": rest,
    "restarted": restarted,
    "state": state,
}
print(json.dumps(found))
