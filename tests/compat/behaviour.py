"""What a rank does with one name of the old import path: ``python -m tests.compat.behaviour CASE``.

The configuration comes from the environment, as SageMaker passes it.
"""

from __future__ import annotations

import copy
import pickle
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import smdistributed.modelparallel.torch as smp
import torch
import torch.distributed as dist
from torch import nn

from tests.compat import examples


def _layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)))


def only_forward() -> None:
    """Steps evaluate, whatever the number of microbatches, and `model.backward` says why it cannot."""
    module = _layers()
    inputs = torch.randn(12, 6)
    with torch.no_grad():  # by microbatches, whose sums are rounded as those of the whole batch are not
        expected = torch.cat([module(part) for part in inputs.chunk(smp.state.cfg.microbatches)])
    model = smp.DistributedModel(copy.deepcopy(module))

    @smp.step
    def evaluate(model: Any, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = model(inputs)
        return result

    @smp.step
    def train(model: Any, inputs: torch.Tensor) -> None:
        model.backward(model(inputs).sum())

    assert smp.state.cfg.pipeline == "_only_forward"
    for _ in range(3):
        with torch.no_grad():
            torch.testing.assert_close(evaluate(model, inputs).concat(), expected, rtol=0, atol=0)
    own = sum(1 for _ in model.local_parameters())
    assert (own == 8) if smp.size() == 1 else (0 < own < 8)
    with pytest.raises((smp.ConfigError, smp.RemoteError), match='"_only_forward", which is for evaluation alone'):
        train(model, inputs)
    with torch.no_grad():
        torch.testing.assert_close(evaluate(model, inputs).concat(), expected, rtol=0, atol=0)


def detached() -> None:
    """The output of several microbatches is detached as one, and is an output still."""
    model = smp.DistributedModel(_layers())
    inputs = torch.randn(8, 6)

    @smp.step(detach_outputs=False)
    def train(model: Any, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        outputs = model(inputs)
        model.backward(outputs.square().mean())
        return outputs, outputs.square().mean()

    outputs, loss = train(model, inputs)
    whole = outputs.detach().concat()
    assert whole.shape == (8, 6)
    assert not whole.requires_grad
    torch.testing.assert_close(loss.detach().reduce_mean(), whole.square().mean())
    assert isinstance(loss.detach(), smp.StepOutput)


def translated() -> None:
    """State dicts of a model with replaced modules become those of `transformers`, and come back."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 24, "n_positions": 8, "n_embd": 16, "n_layer": 2, "n_head": 4}
    torch.manual_seed(0)
    with smp.model_creation(tensor_parallelism=True):
        module = GPT2LMHeadModel(GPT2Config(**sizes))
    expected = {name: values.clone() for name, values in module.state_dict().items()}
    assert smp.state.module_manager.translate_functions == []
    model = smp.DistributedModel(module)
    state = model.state_dict()
    assert state.keys() != expected.keys()
    assert set(module.transformer.seq_layers) <= set(model.distributed_modules())
    assert module.transformer.seq_layers is module.transformer.h
    ((to_transformers, to_distributed),) = smp.state.module_manager.translate_functions
    found = to_transformers(state)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        torch.testing.assert_close(found[name], values, rtol=0, atol=0)
    back = to_distributed(found)
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], values) for name, values in state.items())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    # A whole state dict is translated when it is loaded, unless it says that it needs none.
    assert model.load_state_dict(expected) == ([], [])
    assert all(torch.equal(values, model.state_dict()[name]) for name, values in state.items())
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({**expected, "_smp_is_partial": False})
    assert model.load_state_dict({**state, "_smp_is_partial": False}) == ([], [])


def comm_hook() -> None:
    """A hook that is registered under the older name reduces the gradients."""
    model = smp.DistributedModel(_layers())
    calls = []

    def hook(state: list[Any], bucket: Any) -> Any:
        state.append(bucket)
        gradients = bucket.buffer().div_(smp.dp_size() * smp.state.cfg.microbatches)
        work = dist.all_reduce(gradients, group=smp.get_dp_process_group(), async_op=True)
        assert work is not None
        return work.get_future().then(lambda future: future.value()[0])

    model._register_comm_hook(calls, hook)
    inputs = torch.randn(16, 6, generator=torch.Generator().manual_seed(1))

    @smp.step
    def train(model: Any, inputs: torch.Tensor) -> None:
        model.backward(model(inputs).square().mean())

    train(model, inputs.chunk(smp.dp_size())[smp.dp_rank()])
    assert calls
    plain = _layers()
    plain(inputs).square().mean().backward()
    for own, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad, theirs.grad)


def shards_of(model: Any) -> list[torch.Tensor]:
    """What a script's own helper reads, which knows parameters by the attributes of DeepSpeed's and nothing else."""
    return [parameter.ds_tensor.view(-1)[: parameter.ds_numel] for parameter in model.parameters()]


def sharded_attributes() -> None:
    """Parameters that are sharded say how large they are, and which shard is here, in the dtype that they have."""
    torch.manual_seed(0)
    model = smp.DistributedModel(nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 1200)))
    shapes = [(7, 5), (7,), (1200, 7), (1200,)]
    dtype = torch.bfloat16 if smp.state.cfg.bf16 else torch.float32
    optimizer = None
    for _ in range(3):
        shards = shards_of(model)
        assert {shard.dtype for shard in shards} == {dtype}
        whole = model.state_dict().values()
        for parts, value in zip(zip(*smp.allgather(shards, smp.WORLD), strict=True), whole, strict=True):
            assert torch.equal(torch.cat(parts), value.flatten())
        for shape, parameter in zip(shapes, model.parameters(), strict=True):
            assert tuple(parameter.ds_shape) == shape
            assert parameter.ds_numel == torch.Size(shape).numel()
            own = parameter.ds_tensor
            assert own.shape[0] in (shape[0] // 2, -(-shape[0] // 2))
            # The parameter itself has the same values there.
            assert torch.equal(own, parameter.to_local())
        if optimizer is None:
            optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        model.backward(model(torch.randn(4, 5, dtype=dtype)).float().sum())
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer._global_grad_norm > 0


def files() -> None:
    """Values are saved and loaded with the arguments of the original library."""
    folder = Path(smp.allgather(tempfile.mkdtemp(), smp.WORLD)[0])
    path, value = str(folder / "value.pt"), {"rank": smp.rank(), "tensor": torch.arange(3) + smp.rank()}
    smp.save(value, path, True, pickle, 2)
    assert (folder / f"value.pt_{smp.pp_rank()}_{smp.tp_rank()}").exists()
    found = smp.load(path, None, pickle, None, True)
    assert found["rank"] == smp.rank()
    assert torch.equal(found["tensor"], value["tensor"])

    of_shards = str(folder / "shards.pt")
    smp.save(value, of_shards, partial=True, v3=True)
    assert (folder / f"shards.pt_{smp.pp_rank()}_{smp.tp_rank()}_{smp.rdp_rank()}").exists()
    assert smp.load(of_shards, partial=True)["rank"] == smp.rank()

    older = str(folder / "older.pt")
    torch.save(value, f"{older}_{smp.mp_rank()}")
    assert smp.load(older, back_compat=True)["rank"] == smp.rank()
    smp.barrier()
    if smp.rank() == 0:
        smp.save(value, path, partial=False)
    smp.barrier()
    assert smp.load(path, partial=False)["rank"] == 0
    _removed_by_name(folder)
    for call in (
        lambda: smp.save(value, path, pickle_module=torch),
        lambda: smp.load(path, pickle_module=torch),
        lambda: smp.load(path, pickle_load_args={"encoding": "latin1"}),
    ):
        with pytest.raises(smp.ConfigError, match=r"nothing is unpickled|files have no pickle"):
            call()


def _removed_by_name(folder: Path) -> None:
    """Scripts remove their old partial files by the name that any version gave them."""
    ours = f"{smp.pp_rank()}_{smp.tp_rank()}", str(smp.mp_rank())

    def names() -> set[str]:
        return {one.name for one in folder.glob("step*") if one.name.partition("_")[2] in ours}

    for suffix in ours:
        for number in range(4):
            smp.save(number, str(folder / f"step{number}.pt"), partial=True)
            assert smp.load(str(folder / f"step{number}.pt"), back_compat=True) == number
            if number >= 2:
                (folder / f"step{number - 2}.pt_{suffix}").unlink()
        smp.save(5, str(folder / "step2.pt"), partial=True)  # one of its names is there, and is given anew
        assert smp.load(str(folder / "step2.pt")) == smp.load(str(folder / "step2.pt"), back_compat=True) == 5
        assert names() == {f"step{number}.pt_{one}" for number in (2, 3) for one in ours}
        for one in names():
            (folder / one).unlink()
    another = folder / f"another_{smp.mp_rank()}"
    another.write_text("not of smp.save")
    smp.save(1, str(folder / "another"))
    assert another.read_text() == "not of smp.save"


def environment() -> None:
    """The configuration is that of the environment; variables without effect are named."""
    assert (smp.state.cfg.partitions, smp.state.cfg.microbatches) == (2, 3)
    assert smp.state.cfg.prescaled_batch


CASES = {
    case.__name__: case
    for case in (only_forward, detached, translated, comm_hook, sharded_attributes, files, environment)
} | examples.CASES


def main() -> int:
    """Run one case on this rank."""
    smp.init()
    CASES[sys.argv[1]]()
    smp.barrier()
    return 0


if __name__ == "__main__":
    sys.exit(main())
