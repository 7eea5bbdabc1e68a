"""A rank of a job with distributed modules: clips and trains, saves and loads, beside one process.

``saved.py PP TP OPTIMIZE PRESCALED``; PRESCALED is 0 or 1.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import shardwright as smp
import torch
from divided import SIZES, initialized
from job import compare, error
from language_model import POSITIONS, VOCABULARY
from plain import PlainLanguageModel
from torch import nn

WIDTH, SAMPLES, LENGTH, STEPS = 8, 4, 5, 3
OPTIONS = {**SIZES, "causal_mask_size": POSITIONS}


class Net(nn.Module):
    """A language model, an embedding and a linear layer that are divided, with a norm that is not."""

    def __init__(self, *, divided: bool, seed: int = 1) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.divided = divided
        if divided:
            self.language = smp.nn.DistributedTransformerLMHead(
                2, **OPTIONS, vocab_size=VOCABULARY, num_positions=POSITIONS
            )
            self.embedding = smp.nn.DistributedEmbedding(VOCABULARY, WIDTH)
            self.last = smp.nn.DistributedLinear(VOCABULARY + 1, WIDTH)
        else:
            self.language = PlainLanguageModel(VOCABULARY, POSITIONS, **OPTIONS)
            self.embedding = nn.Embedding(VOCABULARY, WIDTH)
            self.last = nn.Linear(VOCABULARY + 1, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.register_buffer("scale", torch.full((1,), float(seed)))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits = self.language((ids,) if self.divided else ids)
        hidden = self.last(nn.functional.pad(logits, (0, 1), value=1.0)).tanh() + self.embedding(ids)
        return self.norm(hidden) * self.scale


def data(step: int, replica: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + replica)
    ids = torch.randint(0, VOCABULARY, (SAMPLES, LENGTH), generator=generator)
    return ids, torch.randn(SAMPLES, LENGTH, WIDTH, generator=generator)


def main() -> None:
    pipeline, tensor, optimize, prescaled = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4] == "1"
    torch.set_default_dtype(torch.float64)
    smp.init(
        {
            "pipeline_parallel_degree": pipeline,
            "tensor_parallel_degree": tensor,
            "ddp": True,
            "microbatches": 2,
            "optimize": optimize,
            "prescaled_batch": prescaled,
        }
    )
    model = smp.DistributedModel(Net(divided=True))
    whole = initialized(Net(divided=False))
    loaded = model.load_state_dict(whole.state_dict())
    assert loaded == ([], []), loaded
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5))
    reference = torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.5)
    replica, replicas = (smp.rdp_rank(), smp.rdp_size()) if prescaled else (smp.dp_rank(), smp.dp_size())

    @smp.step
    def train(ids: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = (model(ids) - y).square().mean()
        model.backward(loss)
        return loss

    def step(number: int) -> None:
        optimizer.zero_grad()
        reference.zero_grad()
        losses = train(*data(number, replica))
        expected = torch.stack(
            [(whole(ids) - y).square().mean() for ids, y in (data(number, r) for r in range(replicas))]
        )
        expected.mean().backward()
        assert error(losses.reduce_mean(), expected[replica].detach()) < 1e-11
        norm_type = (2.0, 1.0, float("inf"))[number % 3]
        wanted = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.01, norm_type)
        with pytest.raises(smp.NotOwnedError, match="clip by the norm of its own part"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01, norm_type)
        found = smp.clip_grad_norm_(model, 0.01, norm_type)
        assert error(found, wanted) < 1e-11, (norm_type, found, wanted)
        compare(model, whole, f"step {number}")
        optimizer.step()
        reference.step()

    for number in range(STEPS):
        step(number)
    if pipeline > 1:
        assert any("seq_layers" in name for name, _ in model.local_named_parameters()), "a stage without layers"
        assert 0 < len(list(model.local_parameters())) < len(list(whole.parameters())), "nothing was divided"
    whole_state_dicts(model, whole)
    fresh(model.state_dict(), model, replica)
    local_parts(model)
    optimizer.load_state_dict(optimizer.local_state_dict())
    step(STEPS)
    refused(model, optimizer, train, data(0, replica))
    print("saved")


def same(state: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float = 1e-10) -> None:
    assert list(state) == list(expected), (list(state), list(expected))
    for name, tensor in expected.items():
        assert state[name].shape == tensor.shape, name
        assert error(state[name], tensor) <= tolerance, name


def whole_state_dicts(model: smp.DistributedModel, whole: nn.Module) -> None:
    state = model.state_dict()
    same(state, whole.state_dict())
    Net(divided=False).load_state_dict(state)
    first = model.state_dict(gather_to_rank0=True)
    if smp.mp_rank() == 0:
        same(first, state, 0.0)
    else:
        assert first == {}


def fresh(state: dict[str, torch.Tensor], model: smp.DistributedModel, replica: int) -> None:
    """A new model gives the same outputs, loaded before it is divided over pipeline ranks or after."""
    other = smp.DistributedModel(Net(divided=True, seed=2))

    @smp.step
    def predict(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return model(ids), other(ids)

    def differs() -> float:
        with torch.no_grad():
            expected, found = predict(data(9, replica)[0])
        return error(found.concat(), expected.concat()) if smp.pp_rank() == 0 else 0.0

    other.load_state_dict(state)
    same(other.state_dict(), state, 0.0)
    assert differs() == 0
    other.load_state_dict({name: 2 * tensor for name, tensor in state.items()})
    assert differs() > 0 or smp.pp_rank() > 0
    other.load_state_dict(state)
    assert differs() == 0
    same(other.state_dict(), state, 0.0)


def local_parts(model: smp.DistributedModel) -> None:
    before = model.state_dict()
    part = model.local_state_dict()
    part = {name: one.clone() if isinstance(one, torch.Tensor) else one for name, one in part.items()}
    for options in ({}, {"same_partition_load": True}):
        for parameter in model.local_parameters():
            parameter.data.zero_()
        assert model.load_state_dict(part, **options) == ([], [])
        same(model.state_dict(), before, 0.0)


def refused(model: smp.DistributedModel, optimizer: torch.optim.Optimizer, train: object, given: tuple) -> None:
    """On every rank; nobody is left waiting."""

    def expect(kind: type[Exception], pattern: str, run: Callable[[], object]) -> None:
        with pytest.raises(kind, match=pattern):
            run()
        smp.barrier()

    state = model.state_dict()
    for name in ("last.bias", "language.word_embedding.weight"):
        rest = {key: one for key, one in state.items() if key != name}
        expect(RuntimeError, f"Missing key.*{name}", lambda rest=rest: model.load_state_dict(rest))
        assert model.load_state_dict(rest, strict=False).missing_keys == [name]
        wrong = {**state, name: torch.zeros(3, *state[name].shape[1:])}
        expect(RuntimeError, f"size mismatch for {name}", lambda wrong=wrong: model.load_state_dict(wrong))
    expect(smp.ConfigError, r"model.cpu\(\) with tensor_parallel_degree 2", model.cpu)
    expect(smp.ConfigError, "optimizer.local_state_dict", optimizer.state_dict)
    whole = {"state": {}, "param_groups": []}
    expect(smp.ConfigError, "optimizer.local_state_dict", lambda: optimizer.load_state_dict(whole))
    expect(smp.ConfigError, "norm_type is 0", lambda: smp.clip_grad_norm_(model, 1.0, 0))
    expect(smp.ConfigError, "smp.verify with tensor_parallel_degree 2", lambda: smp.verify(train, *given))


if __name__ == "__main__":
    main()
