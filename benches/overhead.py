"""Times steps of one rank against plain PyTorch that runs the same microbatches in an accumulation loop."""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import shardwright as smp
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from benches import beside

MICROBATCHES = 4
#: Fresh processes that each take a share of the pairs.
PROCESSES = 5
#: The most that a step of one rank may cost: as a ratio on GPT-2, in microseconds on the small network.
BARS = {"median_ratio": 1.02, "mlp_added_us": 100.0}
Step = Callable[[], None]


def gpt2_loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, labels=ids).loss


def mlp_loss(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    return model(inputs).square().mean()


def make_gpt2(device: str) -> tuple[nn.Module, torch.Tensor]:
    wide = 768 if device == "cuda" else 160
    config = GPT2Config(
        vocab_size=256, n_positions=64, n_embd=wide, n_layer=4, n_head=wide // 32, use_cache=False,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config).eval(), torch.randint(256, (16, 64))


def make_mlp(device: str) -> tuple[nn.Module, torch.Tensor]:
    wide = 2048 if device == "cuda" else 160
    layers = [layer for _ in range(3) for layer in (nn.Linear(wide, wide), nn.ReLU())]
    return nn.Sequential(*layers), torch.randn(64, wide)


def plain_step(model: nn.Module, loss_of: Callable[..., torch.Tensor], batch: torch.Tensor) -> Step:
    parameters = list(model.parameters())

    def run() -> None:
        for microbatch in batch.chunk(MICROBATCHES):
            loss_of(model, microbatch).backward()
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.div_(MICROBATCHES)

    return run


def library_step(model: nn.Module, loss_of: Callable[..., torch.Tensor], batch: torch.Tensor) -> Step:
    distributed = smp.DistributedModel(model)

    @smp.step
    def train_step(model: Any, batch: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model, batch)
        model.backward(loss)
        return loss

    return lambda: train_step(distributed, batch)


def timed(step: Step, model: nn.Module, device: str) -> float:
    """Seconds of one step, from zeroed gradients to finished ones."""
    model.zero_grad()
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def compare(make: Callable[[str], Any], loss_of: Callable[..., torch.Tensor], pairs: int, device: str) -> list[Any]:
    """Pairs (plain seconds, library seconds), timed in turns."""
    torch.manual_seed(0)
    model, batch = make(device)
    plain_model, library_model, batch = model.to(device), copy.deepcopy(model).to(device), batch.to(device)
    plain, library = plain_step(plain_model, loss_of, batch), library_step(library_model, loss_of, batch)
    for _ in range(5):
        timed(plain, plain_model, device)
        timed(library, library_model, device)
    for ours, theirs in zip(library_model.parameters(), plain_model.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        torch.testing.assert_close(ours.grad, theirs.grad)
    seconds = []
    for pair in range(pairs):
        if pair % 2:
            ours = timed(library, library_model, device)
            seconds.append((timed(plain, plain_model, device), ours))
        else:
            theirs = timed(plain, plain_model, device)
            seconds.append((theirs, timed(library, library_model, device)))
        print(f"\rpair {pair + 1}/{pairs}", end="", file=sys.stderr)
    print(file=sys.stderr)
    return seconds


def measure(pairs: int, device: str) -> dict[str, list[Any]]:
    """The pairs of both models, timed in this process."""
    smp.init({"microbatches": MICROBATCHES})
    return {
        "GPT-2": compare(make_gpt2, gpt2_loss, pairs, device),
        "MLP": compare(make_mlp, mlp_loss, pairs * 5, device),
    }


def measure_in_process(pairs: int, device: str, environment: Mapping[str, str]) -> dict[str, list[Any]]:
    """Measures in a fresh process: where its memory lies moves all of its figures together."""
    command = [sys.executable, "-m", "benches.overhead", "--pairs", str(pairs), "--device", device, "--this-process"]
    done = subprocess.run(command, env={**os.environ, **environment}, check=True, stdout=subprocess.PIPE)
    measured: dict[str, list[Any]] = json.loads(done.stdout)
    return measured


def compare_commits(commit: str, at_most: float, pairs: int, device: str) -> int:
    """Prints each process's figures of both commits, and how many times as much a step of this one costs."""
    sides: dict[str, dict[str, str]] = {"this": {}, commit: beside.variables_of(commit)}
    ratios: dict[tuple[str, str], list[float]] = {}
    print(f"{'model':8}{'commit':>14}{'plain ms':>10}{'library ms':>12}{'ratio':>8}{'added us':>10}")
    for index in range(PROCESSES):
        for side in list(sides)[:: 1 if index % 2 else -1]:
            for name, found in measure_in_process(pairs // PROCESSES, device, sides[side]).items():
                ratios.setdefault((name, side), []).append(print_row(name, f" {side[:12]}", found)[0])
    figures = {
        f"{name.lower().replace('-', '')}_vs_beside": beside.ratio(*(ratios[name, side] for side in sides))
        for name in ("GPT-2", "MLP")
    }
    return beside.conclude(figures, at_most)


def print_row(name: str, process: str, pairs: list[Any]) -> tuple[float, float]:
    """Prints the medians of some pairs; returns that of their ratios and that of the microseconds added."""
    plain, library = (1e3 * statistics.median(column) for column in zip(*pairs, strict=True))
    ratio = statistics.median(ours / theirs for theirs, ours in pairs)
    added = 1e6 * statistics.median(ours - theirs for theirs, ours in pairs)
    print(f"{name:8}{process:>14}{plain:10.3f}{library:12.3f}{ratio:8.4f}{added:10.1f}")
    return ratio, added


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=100, help=f"of GPT-2, over {PROCESSES} processes")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--this-process", action="store_true", help="measure here and print the pairs as JSON")
    beside.add_argument(parser)
    args = parser.parse_args()
    if args.pairs < PROCESSES and not args.this_process:
        parser.error(f"--pairs is {args.pairs}; each of the {PROCESSES} processes needs one")
    if args.this_process:
        print(json.dumps(measure(args.pairs, args.device)))
        return 0
    if args.beside:
        return compare_commits(args.beside, args.at_most, args.pairs, args.device)
    shares = [args.pairs // PROCESSES + (index < args.pairs % PROCESSES) for index in range(PROCESSES)]
    processes = [measure_in_process(share, args.device, {}) for share in shares]
    print(f"{'model':8}{'process':>14}{'plain ms':>10}{'library ms':>12}{'ratio':>8}{'added us':>10}")
    medians: dict[str, tuple[float, float]] = {}
    for name in ("GPT-2", "MLP"):
        for index, process in enumerate(processes):
            print_row(name, str(index), process[name])
        medians[name] = print_row(name, "all", [pair for process in processes for pair in process[name]])
    figures = {"median_ratio": medians["GPT-2"][0], "pairs": args.pairs, "mlp_added_us": medians["MLP"][1]}
    missed = [name for name, bar in BARS.items() if figures[name] > bar]
    for name in missed:
        print(f"missed: {name} is {figures[name]:.4g}, the bar is {BARS[name]:g}")
    print(json.dumps(figures), flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
