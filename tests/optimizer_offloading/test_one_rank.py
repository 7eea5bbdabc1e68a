"""An optimizer whose state is offloaded is the plain one, bit for bit, whatever the script does with it.

Where it passes through a device, streams that run late stand for those of one; ``tests/device`` runs CUDA's.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from typing import Any

import pytest
import shardwright as smp
import torch
from shardwright.errors import ConfigError
from shardwright.job.runtime import current_runtime
from shardwright.optimizer.offloading import StateStorage, StreamedState, chunks, storage
from torch import nn

from tests.offloading.late_streams import LateStreams

from .problems import OPTIMIZERS, WIDTH, CountedPieces, Uneven, groups_of, same, small_chunks, wrap

#: Where the state is, and whether it passes through a device.
PLACES = {"disk": ("disk", False), "host and device": (True, True), "disk and device": ("disk", True)}


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> tuple[Any, bool]:
    found: tuple[Any, bool] = PLACES[request.param]
    return found


@pytest.fixture(autouse=True)
def _job(place: tuple[Any, bool], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("CHUNK_BYTES", "CUT_ELEMENTS"):
        monkeypatch.setattr(chunks, name, getattr(chunks, name))
    small_chunks()
    where, on_device = place
    if on_device:
        streams = LateStreams()
        monkeypatch.setattr(storage, "CudaStreams", lambda: streams)
    torch.set_default_dtype(torch.float64)
    smp.init({"offload_optimizer": where})
    yield
    smp.shutdown()
    torch.set_default_dtype(torch.float32)


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return Uneven()


class Pair:
    """The same training twice: by PyTorch alone, and with the state on a disk."""

    def __init__(self, name: str, **keys: Any) -> None:
        self.keys = keys
        self.modules = model(), model()
        plain, made = (OPTIMIZERS[name](groups_of(module), **keys) for module in self.modules)
        self.plain: Any = plain
        self.streamed = wrap(made)
        assert isinstance(self.streamed, StreamedState)

    def gradients(self, step: int) -> None:
        batch = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(step))
        for module, optimizer in zip(self.modules, (self.plain, self.streamed), strict=True):
            optimizer.zero_grad()
            # PyTorch's fused SGD cannot begin with some of the parameters.
            module(batch, seldom=step % 2 == 1 or "fused" in self.keys).square().sum().backward()

    def run(self, steps: int, first: int = 0) -> None:
        for step in range(first, first + steps):
            self.gradients(step)
            self.plain.step()
            self.streamed.step()

    def check(self) -> None:
        same(self.modules[0].state_dict(), self.modules[1].state_dict())
        same(self.plain.state_dict(), self.streamed.state_dict())


WAYS = [
    (name, keys)
    for name, make in OPTIMIZERS.items()
    for keys in ({"foreach": False}, {"foreach": True}, {"fused": True})
    if "fused" not in keys or name in ("sgd", "nesterov", "adam", "adamw", "adagrad")
]


#: On a device every optimizer once: what differs from host memory is how chunks come and go.
SIZED = [
    pytest.param(place, name, keys, size, id=f"{place}-{name}-{next(iter(keys))}-{size}")
    for place in PLACES
    for name, keys in WAYS
    for size in (4096, 20_000, 1 << 30)
    if place == "disk" or (size == 20_000 and "foreach" in keys and keys["foreach"]) or name == "adamw"
]


@pytest.mark.parametrize(("place", "name", "keys", "chunk_bytes"), SIZED, indirect=["place"])
def test_weights_and_state_are_those_of_the_plain_optimizer(name: str, keys: dict[str, bool], chunk_bytes: int) -> None:
    small_chunks(chunk_bytes)
    counted = CountedPieces()
    pair = Pair(name, **keys)
    pair.run(4)
    number = counted.end()
    pair.check()
    assert (number > 20) == (chunk_bytes < 1 << 30 and name not in ("adafactor", "sgd without momentum"))
    large = [value for entry in pair.streamed.state.values() for value in entry.values() if torch.is_tensor(value)]
    large = [value for value in large if value.numel() * 8 >= 4096]
    assert bool(large) == (name not in ("adafactor", "sgd without momentum"))
    assert all(value in current_runtime()[StateStorage] for value in large)
    nbytes = sum(8 * value.numel() for value in large)
    assert nbytes <= pair.streamed.streamed_bytes() <= 1.05 * nbytes  # what is cut may be small


def test_the_first_state_that_is_made_before_the_optimizer_is_wrapped_goes_to_the_disk() -> None:
    pair = Pair("adagrad")
    assert pair.streamed.streamed_bytes() > 0
    pair.run(2)
    pair.check()


@pytest.mark.parametrize("name", ["adamw", "sgd", "adagrad", "nadam"])
def test_state_dicts_go_to_a_plain_optimizer_and_back(name: str) -> None:
    pair = Pair(name)
    pair.run(3)
    whole, plain = io.BytesIO(), io.BytesIO()
    torch.save(pair.streamed.state_dict(), whole)
    torch.save(pair.plain.state_dict(), plain)
    assert whole.tell() <= plain.tell() + 1000, "only what a tensor shows is saved"
    whole.seek(0)
    saved = torch.load(whole)
    back = copy.deepcopy(pair.plain.state_dict())
    pair.plain.load_state_dict(saved)
    pair.streamed.load_state_dict(back)
    assert pair.streamed.streamed_bytes() > 0
    pair.run(3, first=3)
    pair.check()


def test_hooks_and_closures_are_called_once_a_step() -> None:
    pair, calls = Pair("adam"), list[Any]()

    def before(optimizer: Any, *_: Any) -> None:
        calls.append(("before", [len(group["params"]) for group in optimizer.param_groups]))

    def after(optimizer: Any, *_: Any) -> None:
        calls.append(("after", [len(group["params"]) for group in optimizer.param_groups]))

    pair.streamed.register_step_pre_hook(before)
    pair.streamed.register_step_post_hook(after)
    pair.gradients(0)
    pair.plain.step()

    def closure() -> torch.Tensor:
        assert torch.is_grad_enabled()
        pair.streamed.zero_grad()
        batch = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(0))
        loss = pair.modules[1](batch).square().sum()
        loss.backward()
        calls.append("closure")
        return torch.as_tensor(loss)

    loss = pair.streamed.step(closure)
    assert loss.item() > 0
    sizes = [len(group["params"]) for group in pair.plain.param_groups]
    assert calls == [("before", sizes), "closure", ("after", sizes)]
    pair.check()
    calls.clear()
    pair.streamed.load_state_dict(pair.streamed.state_dict())
    pair.streamed.step(closure)
    assert calls == [("before", sizes), "closure", ("after", sizes)]


def test_parameters_may_come_later_and_groups_stay_what_they_are() -> None:
    pair = Pair("adamw")
    pair.run(2)
    added = [nn.Parameter(torch.linspace(-1, 1, 3000).view(50, 60)) for _ in range(2)]
    lists = [group["params"] for group in pair.streamed.param_groups]
    for step in range(3):
        for one, optimizer in zip(added, (pair.plain, pair.streamed), strict=True):
            if step == 0:
                optimizer.add_param_group({"params": [one], "lr": 0.3})
        pair.gradients(step)
        for one, optimizer in zip(added, (pair.plain, pair.streamed), strict=True):
            one.grad = torch.full_like(one, 0.25)
            optimizer.step()
    assert torch.equal(*added)
    assert [group["params"] for group in pair.streamed.param_groups[:2]] == lists
    pair.check()


@pytest.mark.parametrize("name", ["sgd without momentum", "adagrad"])
def test_sparse_gradients(name: str) -> None:
    _compare_gradients(
        OPTIMIZERS[name], lambda step: torch.sparse_coo_tensor(torch.tensor([[step, 7]]), torch.ones(2, 60), (50, 60))
    )


def test_sparse_adam_of_whole_parameters() -> None:
    def gradient(step: int) -> torch.Tensor:
        return torch.sparse_coo_tensor(torch.tensor([[step, 7]]), torch.ones(2, 60), (50, 60))

    _compare_gradients(torch.optim.SparseAdam, gradient)


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "expanded", "complex"])
def test_parameters_and_gradients_in_every_memory_format(layout: str) -> None:
    def gradient(step: int) -> torch.Tensor:
        made = torch.randn(50, 60, generator=torch.Generator().manual_seed(step))
        return {
            "contiguous": made,
            "transposed": made.view(60, 50).t(),
            "expanded": made[:, :1].expand(50, 60),
            "complex": torch.complex(made, made.flip(0)),
        }[layout]

    _compare_gradients(OPTIMIZERS["adamw"], gradient, torch.complex128 if layout == "complex" else torch.float64)
    if layout == "transposed":
        _compare_gradients(OPTIMIZERS["adamw"], gradient, make=lambda: torch.ones(60, 50).t())


def _compare_gradients(build: Any, gradient: Any, dtype: torch.dtype = torch.float64, make: Any = None) -> None:
    made = [nn.Parameter(torch.ones(50, 60, dtype=dtype) if make is None else make()) for _ in range(2)]
    optimizers = build([made[0]]), wrap(build([made[1]]))
    for step in range(4):
        for parameter, optimizer in zip(made, optimizers, strict=True):
            parameter.grad = gradient(step)
            optimizer.step()
        assert torch.equal(*made)
    same(optimizers[0].state_dict(), optimizers[1].state_dict())


def test_schedulers_and_settings_that_change() -> None:
    pair = Pair("sgd")
    schedulers = [torch.optim.lr_scheduler.StepLR(one, 1, 0.5) for one in (pair.plain, pair.streamed)]
    for step in range(4):
        pair.run(1, first=step)
        for scheduler in schedulers:
            scheduler.step()
        for optimizer in (pair.plain, pair.streamed):
            optimizer.param_groups[1]["momentum"] = 0.5 + 0.1 * step
    pair.check()
    assert pair.streamed.param_groups[0]["lr"] == 0.05 / 16


@pytest.mark.parametrize("keys", [{"foreach": False}, {"fused": True}])
def test_a_scaler_leaves_out_a_step_with_infinities(keys: dict[str, bool]) -> None:
    pair = Pair("adam", **keys)
    scalers: list[Any] = [torch.amp.grad_scaler.GradScaler("cpu", init_scale=4.0) for _ in range(2)]
    for step in range(4):
        pair.gradients(step)
        for module, optimizer, scaler in zip(pair.modules, (pair.plain, pair.streamed), scalers, strict=True):
            scaler.scale(torch.ones(()))
            for parameter in module.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(4.0 if step != 2 else torch.inf)
            scaler.step(optimizer)
            scaler.update()
    pair.check()
    assert scalers[0].get_scale() == scalers[1].get_scale() == 2.0


def test_scripts_may_look_at_the_state_and_change_it() -> None:
    pair = Pair("adam")
    pair.run(2)
    for optimizer in (pair.plain, pair.streamed):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                entry = optimizer.state.get(parameter)
                if entry:
                    entry["exp_avg"].mul_(0.5)
                    entry["exp_avg_sq"] = entry["exp_avg_sq"] * 2
    pair.run(2, first=2)
    pair.check()
    for optimizer in (pair.plain, pair.streamed):
        optimizer.state.clear()
    assert pair.streamed.streamed_bytes() == 0
    pair.run(2)
    pair.check()


def test_a_copy_of_the_optimizer_has_its_own_state() -> None:
    pair = Pair("adamw")
    pair.run(2)
    modules, optimizers = zip(*(copy.deepcopy(each) for each in _with_modules(pair)), strict=True)
    pair.run(2, first=2)
    pair.check()
    pair.modules, (pair.plain, pair.streamed) = modules, optimizers
    pair.run(2, first=2)
    pair.check()
    assert pair.streamed.streamed_bytes() > 0


def _with_modules(pair: Pair) -> list[tuple[nn.Module, Any]]:
    return list(zip(pair.modules, (pair.plain, pair.streamed), strict=True))


def test_a_step_after_the_job_uses_the_same_storage(place: tuple[Any, bool]) -> None:
    pair = Pair("adam")
    pair.run(2)
    smp.shutdown()
    pair.run(2, first=2)
    same(pair.plain.state_dict(), pair.streamed.state_dict())
    smp.init({"offload_optimizer": place[0]})


def test_a_step_that_fails_leaves_the_groups_as_they_were() -> None:
    pair = Pair("adam")
    pair.run(1)
    groups = pair.streamed.param_groups
    weights = list(pair.modules[1].parameters())
    pair.gradients(1)
    weights[-1].grad = torch.sparse_coo_tensor(torch.ones(2, 1), torch.ones(1), weights[-1].shape)
    with pytest.raises(RuntimeError, match="sparse gradients"):
        pair.streamed.step()
    assert pair.streamed.param_groups is groups
    assert {id(one) for group in groups for one in group["params"]} == set(map(id, weights))
    assert set(map(id, pair.streamed.state)) <= set(map(id, weights))


def test_optimizers_that_cannot_be_streamed_are_refused_by_name() -> None:
    class Mine(torch.optim.Adam):
        """Looks at all gradients."""

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            every = [one for group in self.param_groups for one in group["params"]]
            nn.utils.clip_grad_norm_(every, 0.1)
            return super().step(closure)

    class Alike(torch.optim.Adam):
        """Does what Adam does."""

    parameters = list(model().parameters())
    for optimizer in (
        torch.optim.LBFGS(parameters),
        smp.optimizers.FusedLamb(parameters),
        smp.optimizers.FusedNovoGrad(parameters),
        Mine(parameters),
    ):
        with pytest.raises(ConfigError, match=f"{type(optimizer).__name__} .*offload_optimizer"):
            wrap(optimizer)
    with pytest.raises(ConfigError, match=r"Adam with differentiable=True.*offload_optimizer"):
        wrap(torch.optim.Adam(parameters, differentiable=True))
    wrap(Alike(parameters))
    fused = wrap(smp.optimizers.FusedAdam(parameters))
    fused.add_param_group({"params": [nn.Parameter(torch.ones(3))], "differentiable": True})
    with pytest.raises(ConfigError, match="differentiable=True"):
        fused.step()
