"""One of the ranks of a job whose microbatches have different numbers of labels: how far off its gradients are."""

import copy
import json
import sys

import shardwright as smp
import torch
from torch import nn

degree, passes = int(sys.argv[1]), int(sys.argv[2])
smp.init({"pipeline_parallel_degree": degree, "ddp": True, "microbatches": 4})
torch.manual_seed(0)
VOCABULARY, WIDTH = 11, 160
plain = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, VOCABULARY))
plain.double()
own = copy.deepcopy(plain)
if degree == 2:
    smp.set_partition(own, 0)
    smp.set_partition(own[1], 1)
model = smp.DistributedModel(own, backward_passes_per_step=passes)


@smp.step
def train(model, tokens, labels, weighted):
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
    if weighted is None:
        model.backward(loss)
    elif isinstance(weighted, float):
        model.backward(loss, weight=weighted)
    else:
        model.backward(loss, weight=(labels != -100).sum() if weighted else 2.5)
    return {"loss": loss}


def batches(seed):
    """Each data-parallel rank's."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY, (8 * smp.dp_size(), 6), generator=generator)
    labels = tokens.roll(1)
    labels[torch.rand(labels.shape, generator=generator) < 0.6] = -100
    labels[2:4] = -100  # a microbatch without any
    return tokens.chunk(smp.dp_size()), labels.chunk(smp.dp_size())


def expected(seed):
    """The gradients of the mean loss over all labels of the batch, and each data-parallel rank's own mean loss."""
    tokens, labels = batches(seed)
    losses = [
        nn.functional.cross_entropy(plain(t).flatten(0, 1), y.flatten()).item()
        for t, y in zip(tokens, labels, strict=True)
    ]
    loss = nn.functional.cross_entropy(plain(torch.cat(tokens)).flatten(0, 1), torch.cat(labels).flatten())
    return torch.autograd.grad(loss, list(plain.parameters())), losses


def error(sums):
    """How far this rank's gradients are from those of the whole batches, summed."""
    wanted = dict(zip([name for name, _ in plain.named_parameters()], sums, strict=True))
    worst = 0.0
    for name, parameter in model.local_named_parameters():
        scale = wanted[name].abs().max()
        worst = max(worst, ((parameter.grad - wanted[name]).abs().max() / scale).item())
    return worst


def step(seed, weighted=True):
    tokens, labels = batches(seed)
    return train(model, tokens[smp.dp_rank()], labels[smp.dp_rank()], weighted)["loss"].reduce_mean().item()


errors, losses, total = [], [], None
for seed in range(2 * passes):  # gradients of earlier steps stay, and are added to
    losses.append(abs(step(seed) - expected(seed)[1][smp.dp_rank()]))
    gradients = expected(seed)[0]
    total = gradients if total is None else [a + b for a, b in zip(total, gradients, strict=True)]
    if (seed + 1) % passes == 0:
        errors.append(error(total))
model.zero_grad(set_to_none=True)

refused, unsummed = [], []
if passes == 1:
    for seed in range(3):  # without weights, and what earlier steps sent while they ran
        model.zero_grad(set_to_none=True)
        step(seed, weighted=None)
    unweighted = error(expected(2)[0])
    if smp.dp_size() > 1:
        try:
            step(7, weighted=None if smp.dp_rank() else True)
        except smp.ShardwrightError as raised:
            refused.append(str(raised).splitlines()[0])
    for weight in (1e308, 1.0 if smp.dp_rank() else 1e308):  # of all replicas, and of the first
        try:
            step(7, weighted=weight)
        except (ValueError, smp.RemoteError) as raised:
            unsummed.append(str(raised).splitlines()[0])
    for seed in range(3):
        model.zero_grad(set_to_none=True)
        step(seed)
    errors.append(error(expected(2)[0]))
    model.zero_grad(set_to_none=True)
    step(5, weighted=False)
    tokens, labels = batches(5)
    parts = 4 * smp.dp_size()
    mean = 0.0
    for part, targets in zip(torch.cat(tokens).chunk(parts), torch.cat(labels).chunk(parts), strict=True):
        total = nn.functional.cross_entropy(plain(part).flatten(0, 1), targets.flatten(), reduction="sum")
        mean = mean + total / max((targets != -100).sum(), 1) / parts
    alike = torch.autograd.grad(mean, list(plain.parameters()))
    errors.append(error(alike))
else:
    unweighted = 1.0
print(
    json.dumps({"errors": errors, "losses": losses, "unweighted": unweighted, "refused": refused, "unsummed": unsummed})
)
