"""Steps on a side stream, with CUDA graphs beside and inside them, and with a compiled module."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from tools.gpu_day.options import Options
from tools.gpu_day.ranks import results_of_ranks
from tools.gpu_day.small import EXACT, MICROBATCHES, Divided

_CAPTURES = 20


@contextlib.contextmanager
def side_stream(device: str) -> Iterator[None]:
    """A block on a stream of its own that is busy when it begins; on the CPU, just a block."""
    if device == "cpu":
        yield
        return
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        yield
    torch.cuda.current_stream().wait_stream(stream)


def capture(device: str) -> float:
    """Capture a graph and replay it; what it computed. On the CPU it is computed at once."""
    inputs = torch.ones(64, device=device)
    if device == "cpu":
        return float((inputs * 2 + 1).sum())
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        result = inputs * 2 + 1
    graph.replay()
    torch.cuda.synchronize()
    return float(result.sum())


def streams(options: Options) -> dict[str, Any]:
    """One of two ranks: steps on a side stream, whose batch and update are made there as well."""
    divided = Divided(options.device, 32 if options.tiny else 1024)
    differences = []
    for _ in range(3):
        with side_stream(options.device):
            differences.append(divided.exact_step())
    return {"difference": max(differences)}


def graph_beside(options: Options) -> dict[str, Any]:
    """One of two ranks: another thread captures graphs while steps send tensors."""
    divided = Divided(options.device, 32 if options.tiny else 512)
    stop, found, errors = threading.Event(), [], []

    def work() -> None:
        try:
            while not stop.is_set() and len(found) < _CAPTURES:
                found.append(capture(options.device))
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}"[:400])

    thread = threading.Thread(target=work)
    thread.start()
    differences = [divided.exact_step() for _ in range(5)]
    stop.set()
    thread.join()
    return {"difference": max(differences), "captures": len(found), "right": set(found) <= {192.0}, "errors": errors}


class Graphed(nn.Module):
    """A module that runs as a graph, forward and backward."""

    def __init__(self, width: int, device: str) -> None:
        """Make it, and capture it."""
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(width, width), nn.Tanh()).to(device)
        if device == "cuda":
            sample = torch.randn(4, width, device=device, requires_grad=True)
            self.layer = torch.cuda.make_graphed_callables(self.layer, (sample,))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Replay it."""
        result: torch.Tensor = self.layer(inputs)
        return result


def _one_rank(options: Options, module: nn.Module, compiled: Any, width: int) -> float:
    """The difference of a step's gradients between a module by itself and what was made of it, on one rank."""
    import shardwright as smp

    smp.init({"microbatches": MICROBATCHES})
    try:
        model = smp.DistributedModel(compiled)

        @smp.step
        def train(model: Any, inputs: torch.Tensor) -> torch.Tensor:
            loss = model(inputs).square().mean()
            model.backward(loss)
            return loss.detach()

        inputs = torch.randn(4 * MICROBATCHES, width, device=options.device)
        for _ in range(2):
            model.zero_grad()
            train(model, inputs)
        for microbatch in inputs.chunk(MICROBATCHES):
            (module(microbatch).square().mean() / MICROBATCHES).backward()
        pairs = zip(model.parameters(), module.parameters(), strict=True)
        return max(float((left.grad - right.grad).abs().max() / right.grad.abs().max()) for left, right in pairs)
    finally:
        smp.shutdown()


def graph_inside(options: Options) -> dict[str, Any]:
    """One rank: a step through a module that runs as a graph."""
    width = 16 if options.tiny else 256
    torch.manual_seed(0)
    graphed = Graphed(width, options.device)
    plain = nn.Sequential(nn.Linear(width, width), nn.Tanh()).to(options.device)
    plain.load_state_dict({name.removeprefix("layer."): value for name, value in graphed.state_dict().items()})
    return {"difference": _one_rank(options, plain, graphed, width)}


def graph_around(options: Options) -> dict[str, Any]:
    """One rank: a whole step is captured. It may be refused; a result that is not told to be wrong may not be."""
    import shardwright as smp

    width = 16
    smp.init({"microbatches": 1})
    model = smp.DistributedModel(nn.Linear(width, width).to(options.device))

    @smp.step
    def train(model: Any, inputs: torch.Tensor) -> torch.Tensor:
        loss = model(inputs).square().mean()
        model.backward(loss)
        return loss.detach()

    inputs = torch.randn(4, width, device=options.device)
    for _ in range(3):
        train(model, inputs)
    if options.device == "cpu":
        return {"outcome": "there are no graphs on a CPU"}
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            train(model, inputs)
        graph.replay()
        torch.cuda.synchronize()
        outcome = "it was captured and replayed"
    except Exception as error:
        outcome = f"{type(error).__name__}: {error}"[:400]
    return {"outcome": outcome}


def compiled(options: Options) -> dict[str, Any]:
    """One rank: a step through a module under ``torch.compile``."""
    width = 16 if options.tiny else 256
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width)).to(options.device)
    ours = copy.deepcopy(plain)
    ours.compile(backend="inductor" if options.device == "cuda" else "eager")
    return {"difference": _one_rank(options, plain, ours, width)}


def run(options: Options) -> dict[str, Any]:
    """All of them; it passes if every result is exact, and graphs are captured beside steps."""
    found: dict[str, Any] = {}
    failed = []
    parts = (
        (streams, 2, EXACT),
        (graph_beside, 2, EXACT),
        (graph_inside, 1, 1e-4),
        (compiled, 1, 1e-4),
        (graph_around, 1, None),
    )
    for part, ranks, most in parts:
        try:
            results = results_of_ranks(part, options, ranks, seconds=30 if part is compiled else 15)
        except Exception as error:  # the others are worth knowing
            found[part.__name__] = f"{type(error).__name__}: {error}"[:600]
            failed.append(part.__name__)
            continue
        found[part.__name__] = results if most is None else max(each["difference"] for each in results)
        if most is not None and found[part.__name__] > most:
            failed.append(part.__name__)
        if part is graph_beside:
            found["captures"] = [each["captures"] for each in results]
            found["capture_errors"] = [error for each in results for error in each["errors"]]
            if found["capture_errors"] or not all(each["right"] and each["captures"] for each in results):
                failed.append("captures")
    return {"passed": not failed, "failed": failed, **found}
