"""What a script does with the wrapper as if it were its module; a rank of one or two: ``wrapper_program.py DEGREE``."""

from __future__ import annotations

import io
import math
import pickle
import sys
import tempfile
from typing import Any

import shardwright as smp
import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.nn.parallel import DistributedDataParallel

DEGREE = int(sys.argv[1])


class Net(nn.Module):
    """Two layers, on two ranks where there are two; what it computes depends on what it was given."""

    factor: float = 1.0

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.register_buffer("shift", torch.zeros(width))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        shift = self.late if hasattr(self, "late") else self.shift
        outputs: torch.Tensor = self.second(torch.tanh(self.first(inputs))) * self.factor + shift
        return outputs * 2 if self.training else outputs


def wrapped(width: int = 6, kind: type[Net] = Net) -> tuple[Any, Net]:
    """A model, and a plain module with the same weights."""
    torch.manual_seed(3)
    module, plain = kind(width), kind(width)
    plain.load_state_dict(module.state_dict())
    smp.set_partition(module.second, DEGREE - 1)
    return smp.DistributedModel(module), plain


@smp.step
def train(model: Any, inputs: torch.Tensor) -> torch.Tensor:
    outputs: torch.Tensor = model(inputs)
    model.backward(outputs.square().mean())
    return outputs


@smp.step
def evaluate(model: Any, inputs: torch.Tensor) -> torch.Tensor:
    outputs: torch.Tensor = model(inputs)
    return outputs


def inputs_of(plain: Net, rows: int = 4) -> torch.Tensor:
    """A batch, the same each time."""
    return torch.randn(rows, plain.first.in_features, generator=torch.Generator().manual_seed(5))


def same(model: Any, plain: Net, rows: int = 4) -> None:
    """Assert that both compute the same, and the same gradients."""
    inputs = inputs_of(plain, rows)
    model.zero_grad()
    plain.zero_grad()
    torch.testing.assert_close(train(model, inputs).concat(), plain(inputs).detach())
    for part in inputs.chunk(2):
        (plain(part).square().mean() / 2).backward()
    gradients = {name: parameter.grad for name, parameter in plain.named_parameters()}
    for name, parameter in model.local_named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], msg=lambda text, name=name: f"{name}: {text}")


def refused(call: Any, kind: type[Exception], *said: str) -> None:
    """Assert that a call is refused with these words."""
    text = "nothing was refused"
    try:
        call()
    except kind as error:
        text = str(error)
    for words in said:
        assert words in text, f"{words!r} is not in {text}"


def attributes_reach_the_module() -> None:
    for width, rows in ((6, 4), (160, 80)):
        model, plain = wrapped(width)
        for step in range(3):
            model.factor = plain.factor = 0.5 + step
            assert model.factor == model.module.factor == plain.factor
            assert "factor" not in vars(model)
            same(model, plain, rows)
        del model.factor, plain.factor
        assert model.factor == 1.0
        model.training = plain.training = False
        assert not model.module.training
        same(model, plain, rows)
        model.train()
        assert model.training
        assert model.module.training


def tensors_and_modules_reach_the_module() -> None:
    model, plain = wrapped()
    model.shift = torch.ones(6)
    plain.shift = torch.ones(6)
    model.register_buffer("late", torch.full((6,), 3.0))
    plain.register_buffer("late", torch.full((6,), 3.0))
    torch.manual_seed(8)
    model.first = nn.Linear(6, 6)
    plain.first.load_state_dict(model.first.state_dict())
    model.register_parameter("unused", nn.Parameter(torch.ones(2)))
    plain.unused = nn.Parameter(torch.ones(2))
    model.add_module("more", nn.Identity())
    assert model.module.more is model.more
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert list(model._modules) == ["module"]
    same(model, plain)
    assert list(model.state_dict()) == list(plain.state_dict())


def what_is_the_wrapper_s_own_stays_its_own() -> None:
    model, plain = wrapped()
    model.average_grads_across_microbatches = True
    assert "average_grads_across_microbatches" not in vars(model.module)
    calls: list[str] = []
    forward = model.forward
    model.forward = lambda inputs: calls.append("called") or forward(inputs)
    same(model, plain)
    assert len(calls) == (2 if smp.pp_rank() == 0 else 0)
    del model.forward
    same(model, plain)
    assert len(calls) == (2 if smp.pp_rank() == 0 else 0)
    handle = model.register_forward_hook(lambda *_: calls.append("hooked"))
    same(model, plain)
    assert calls[2:] == (["hooked"] * 2 if smp.pp_rank() == 0 else [])
    handle.remove()


def a_setting_in_the_step_function_is_refused() -> None:
    if DEGREE == 1:
        return
    model, plain = wrapped()
    same(model, plain)

    @smp.step
    def sets(model: Any, inputs: torch.Tensor) -> None:
        model.factor = 3.0
        model.backward(model(inputs).sum())

    refused(lambda: sets(model, torch.ones(4, 6)), smp.ShardwrightError, "attribute 'factor'", "outside the step")
    assert model.factor == 1.0
    same(model, plain)


def alike(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Assert that two state dicts have the same names in the same order, with the same values."""
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, msg=lambda text, name=name: f"{name}: {text}")


def a_module_around_it_saves_and_loads() -> None:
    for divided in (False, True):
        model, plain = wrapped()
        if divided:
            same(model, plain)
        torch.manual_seed(4)
        head = nn.BatchNorm1d(6)
        around: Any = nn.ModuleDict({"net": nn.Sequential(model), "head": head})
        plainly = nn.ModuleDict({"net": nn.Sequential(plain), "head": head})
        alike(around.state_dict(), plainly.state_dict())
        assert around.state_dict()._metadata["head"] == {"version": 2}
        given: dict[str, Any] = {"here": 1}
        assert model.state_dict(destination=given, prefix="a.") is given
        alike(given, {"here": 1, **{f"a.{name}": value for name, value in plain.state_dict().items()}})
        if divided and DEGREE > 1:
            refused(lambda model=model: model.state_dict(keep_vars=True), smp.ConfigError, "local_named_parameters")
        else:
            assert model.state_dict(keep_vars=True)["first.weight"] is model.first.weight

        changed = {name: value + 1 for name, value in plainly.state_dict().items()}
        assert not any(around.load_state_dict(changed))
        alike(around.state_dict(), changed)
        plainly.load_state_dict(changed)
        same(model, plain)
        odd = {name: value for name, value in changed.items() if name != "net.0.second.bias"}
        odd["net.0.third.bias"] = torch.ones(6)
        for strict in (True, False):
            if strict:
                refused(lambda around=around, odd=odd: around.load_state_dict(odd), RuntimeError, "net.0.second.bias")
            else:
                found = around.load_state_dict(odd, strict=False)
                assert (found.missing_keys, found.unexpected_keys) == (["net.0.second.bias"], ["net.0.third.bias"])
        wrong = {**changed, "net.0.first.weight": torch.ones(2, 2)}
        refused(lambda around=around, wrong=wrong: around.load_state_dict(wrong), RuntimeError, "size mismatch")
        around.load_state_dict(changed)  # what was loaded in part is refused until all of it is loaded
        same(model, plain)


@smp.step
def train_around(around: nn.Module, model: Any, inputs: torch.Tensor) -> None:
    model.backward(around(inputs).square().mean())


def other_parallel_wrappers_are_refused_where_they_would_do_something() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for wrapper in (DistributedDataParallel(Net()), nn.Sequential(nn.DataParallel(Net()))):
            refused(
                lambda wrapper=wrapper: smp.DistributedModel(wrapper),
                smp.ConfigError,
                "DataParallel: its collectives",
                "Give smp.DistributedModel the plain module",
            )
        model, plain = wrapped()
        for around in (model, nn.ModuleDict({"net": model})):
            if DEGREE > 1:
                refused(lambda around=around: DistributedDataParallel(around), smp.ConfigError, "leave the wrapper out")
            # What `DataParallel` calls to have a copy for another GPU of the process.
            copying = next(part for part in nn.DataParallel(around).modules() if part is model)
            refused(copying._replicate_for_data_parallel, smp.ConfigError, "DataParallel", "leave the wrapper out")
        DistributedDataParallel(Net())
        same(model, plain)
        for kind in (nn.DataParallel, *((DistributedDataParallel,) if DEGREE == 1 else ())):
            around, before = kind(model), [parameter.grad.clone() for parameter in model.local_parameters()]
            model.zero_grad()
            train_around(around, model, inputs_of(plain))
            for parameter, gradient in zip(model.local_parameters(), before, strict=True):
                torch.testing.assert_close(parameter.grad, gradient)
    finally:
        dist.destroy_process_group()
    same(model, plain)


def compiling_the_whole_is_refused() -> None:
    if DEGREE == 1:
        return
    model, plain = wrapped()
    inputs = inputs_of(plain)
    for call in (
        lambda: train(torch.compile(model), inputs),
        lambda: train(torch.compile(nn.Sequential(model), backend="eager"), inputs),
        lambda: train(inputs=inputs, model=torch.compile(backend="eager")(model)),
        model.compile,
    ):
        refused(call, smp.FrameError, "torch.compile of a smp.DistributedModel", "module.compile()")
    same(model, plain)


class Adapted(Net):
    """With a method that peft's models have, which writes to one layer after another."""

    def merge_and_unload(self) -> None:
        for layer in (self.first, self.second):
            layer.weight.data += 1.0


def pickling_and_merging_are_refused_with_advice_that_fits() -> None:
    saved, whole = "save model.state_dict(), which every rank", "pickling of a smp.DistributedModel"
    for model, plain in (wrapped(), wrapped(kind=Adapted)):
        refused(lambda model=model: pickle.dumps(model), smp.ShardwrightError, whole, saved)
        same(model, plain)
        refused(lambda model=model: torch.save(model, io.BytesIO()), smp.ShardwrightError, saved)
        torch.save(model.state_dict(), io.BytesIO())
        if DEGREE == 1:
            continue
        refused(lambda model=model: pickle.dumps(model.module), smp.NotOwnedError, "live on pp_rank", saved)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        if isinstance(plain, Adapted):
            refused(lambda model=model: model.merge_and_unload(), smp.NotOwnedError, "merge there")
            alike(model.state_dict(), before)
            refused(model.module.merge_and_unload, smp.NotOwnedError, "merge there", "'")
            model.load_state_dict(before)
        same(model, plain)


def a_model_of_transformers_is_saved() -> None:
    torch.manual_seed(6)
    settings = {"n_layer": 2, "n_embd": 8, "n_head": 2, "vocab_size": 16, "n_positions": 8}
    net = transformers.GPT2LMHeadModel(transformers.GPT2Config(**settings))
    smp.set_partition(net.transformer.h[1], DEGREE - 1)
    model: Any = smp.DistributedModel(net)

    @smp.step
    def step(model: Any, tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
        model.backward(loss)
        return loss

    step(model, torch.arange(32).reshape(4, 8) % 16)
    with tempfile.TemporaryDirectory() as folder:
        state = model.state_dict()
        model.module.save_pretrained(folder, state_dict=dict(state))
        alike(transformers.GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float64).state_dict(), state)


def an_optimizer_that_is_not_wrapped_does_not_save_a_part() -> None:
    model, plain = wrapped()
    optimizer, alone = (torch.optim.AdamW(each.parameters(), lr=0.1) for each in (model, plain))
    assert len(optimizer.state_dict()["param_groups"][0]["params"]) == 4
    same(model, plain)
    optimizer.step()
    alone.step()
    if DEGREE > 1:
        said = ("AdamW.state_dict()", "2 of its 4 parameters", "smp.DistributedOptimizer(optimizer)")
        refused(optimizer.state_dict, smp.NotOwnedError, *said)
    optimizer = smp.DistributedOptimizer(optimizer)
    found, wanted = optimizer.state_dict()["state"], alone.state_dict()["state"]
    for index, values in wanted.items():
        alike(found[index], values)
    same(model, plain)


def the_norm_of_all_gradients_is_had_without_clipping() -> None:
    for width, rows in ((6, 4), (160, 80)):
        model, plain = wrapped(width)
        same(model, plain, rows)
        before = {name: parameter.grad.clone() for name, parameter in model.local_named_parameters()}
        found = smp.clip_grad_norm_(model, math.inf)
        torch.testing.assert_close(found, nn.utils.get_total_norm([each.grad for each in plain.parameters()]))
        alike({name: parameter.grad for name, parameter in model.local_named_parameters()}, before)
        by_hand = sum(each.grad.norm() ** 2 for each in model.local_parameters())
        squares = smp.allgather(float(by_hand), smp.PP_GROUP)
        torch.testing.assert_close(torch.tensor(math.sqrt(sum(squares))), found)


def a_module_of_an_earlier_job_is_used_again_where_it_is_whole() -> None:
    model, plain = wrapped()
    same(model, plain)
    module = model.module
    if DEGREE > 1:  # in this job too
        refused(lambda: smp.DistributedModel(module), smp.ConfigError, "divided already", "Make the model anew")
    smp.shutdown()
    start()
    if DEGREE > 1:
        refused(lambda: smp.DistributedModel(module), smp.ConfigError, "divided already", "Make the model anew")
    else:
        same(smp.DistributedModel(module), plain)


def start() -> None:
    smp.init(
        pipeline_parallel_degree=DEGREE,
        microbatches=2,
        auto_partition=False,
        default_partition=0,
        reproducible_rng=True,
    )


SCENARIOS = [
    attributes_reach_the_module,
    tensors_and_modules_reach_the_module,
    what_is_the_wrapper_s_own_stays_its_own,
    a_setting_in_the_step_function_is_refused,
    a_module_around_it_saves_and_loads,
    other_parallel_wrappers_are_refused_where_they_would_do_something,
    compiling_the_whole_is_refused,
    pickling_and_merging_are_refused_with_advice_that_fits,
    an_optimizer_that_is_not_wrapped_does_not_save_a_part,
    the_norm_of_all_gradients_is_had_without_clipping,
    a_model_of_transformers_is_saved,
    a_module_of_an_earlier_job_is_used_again_where_it_is_whole,
]

if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    start()
    for scenario in SCENARIOS:
        scenario()
        smp.barrier()
        sys.stdout.write(f"{scenario.__name__}\n")
