"""Trains a model under precisions that contradict each other, as the ranks of a job; writes what was wrong as JSON.

usage: precision_program.py CODE, which is run first, as one of the ranks
"""

from __future__ import annotations

import contextlib
import copy
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import shardwright as smp
import torch
from torch import nn

WIDTH, MICROBATCHES = 160, 4
PLACED = {"auto_partition": False, "default_partition": 0, "microbatches": MICROBATCHES}
BACKENDS = torch.backends


def precisions() -> list[str]:
    """What torch says under all names that can be read."""
    getters: list[Callable[[], object]] = [
        torch.get_float32_matmul_precision,
        lambda: BACKENDS.cudnn.allow_tf32,
        lambda: BACKENDS.cuda.matmul.allow_tf32,
    ]
    if hasattr(torch._C, "_get_fp32_precision_getter"):
        getters.append(lambda: BACKENDS.fp32_precision)
        for backend in (BACKENDS.cuda.matmul, BACKENDS.cudnn, BACKENDS.cudnn.conv, BACKENDS.cudnn.rnn):
            getters.append(lambda backend=backend: backend.fp32_precision)  # type: ignore[misc]
        for name in ("matmul", "conv", "rnn"):
            getters.append(lambda name=name: getattr(BACKENDS.mkldnn, name).fp32_precision)  # type: ignore[misc]
    found = []
    for get in getters:
        try:
            found.append(str(get()).replace("none", "ieee"))  # the same, and what putting an older name back leaves
        except RuntimeError:
            found.append("contradicted")
    return found


def _newer() -> list[Any]:
    if not hasattr(torch._C, "_get_fp32_precision_getter"):
        return []
    return [BACKENDS.mkldnn.matmul, BACKENDS.cuda.matmul, BACKENDS.cudnn.conv, BACKENDS.cudnn.rnn]


@contextlib.contextmanager
def _set(number: int) -> Iterator[None]:
    """Set one for the block, and put all back that it may have set, so that each microbatch finds the same."""
    before = [one.fp32_precision for one in _newer()]
    if number == 0:
        older: Any = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("medium" if older != "medium" else "high")
        yield
        torch.set_float32_matmul_precision(older)
    elif number == 1:
        older = BACKENDS.cudnn.allow_tf32
        BACKENDS.cudnn.allow_tf32 = not older
        yield
        BACKENDS.cudnn.allow_tf32 = older
    else:
        _newer()[number - 2].fp32_precision = "ieee" if before[number - 2] == "tf32" else "tf32"
        yield
    for one, value in zip(_newer(), before, strict=True):
        one.fp32_precision = value


def _can_set(number: int) -> bool:
    if number > 1:
        return hasattr(torch._C, "_get_fp32_precision_getter")
    return precisions()[number] != "contradicted"


class Looks(nn.Linear):
    """Computes otherwise under each precision."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        factor = sum(2.0**-n * (1 + sum(map(ord, text)) % 7) for n, text in enumerate(precisions()))
        return super().forward(x) * factor


class Sets(nn.Module):
    """Calls a child elsewhere under other precisions, and looks whether they are still there."""

    def __init__(self) -> None:
        super().__init__()
        self.child, self.own = Looks(WIDTH, WIDTH), Looks(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.own(self.child(x).tanh())
        for number in filter(_can_set, range(5)):
            with _set(number):
                inside = precisions()
                x = self.own(self.child(x).tanh()).tanh()
                assert precisions() == inside
        return x


def main(code: str) -> None:
    """Train three steps, and compare each with the same in one process."""
    exec(code)
    before = precisions()
    smp.init({"pipeline_parallel_degree": 2, "ddp": False, **PLACED})
    torch.manual_seed(0)
    whole = Sets().double()
    module = copy.deepcopy(whole)
    smp.set_partition(module.child, 1)
    model = smp.DistributedModel(module)

    @smp.step
    def train(part: torch.Tensor) -> torch.Tensor:
        loss = model(part).square().mean()
        model.backward(loss)
        return loss

    wrong = []
    for _ in range(3):
        batch = torch.randn(4 * MICROBATCHES, WIDTH, dtype=torch.float64)
        model.zero_grad()
        losses = train(batch).outputs
        if precisions() != before:
            wrong.append(f"precisions are left changed: {precisions()}, and not {before}")
        whole.zero_grad()
        for part, loss in zip(batch.chunk(MICROBATCHES), losses, strict=True):
            expected = whole(part).square().mean()
            (expected / MICROBATCHES).backward()
            if not torch.allclose(loss, expected, rtol=1e-10):
                wrong.append(f"loss {loss} and not {expected}")
        for name, parameter in model.local_named_parameters():
            wanted = whole.get_parameter(name).grad
            if parameter.grad is None or wanted is None or not torch.allclose(parameter.grad, wanted, rtol=1e-8):
                wrong.append(f"gradient of {name}")
        if precisions() != before:
            wrong.append(f"the test leaves {precisions()}, and not {before}")
    print(json.dumps({"wrong": wrong, "sent": smp.stats()["server"]["total"]["sent"]["forward"]}))


if __name__ == "__main__":
    main(sys.argv[1])
