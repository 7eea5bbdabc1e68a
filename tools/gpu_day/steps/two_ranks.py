"""Two ranks on one device: a GPT-2 with AdamW beside one process, and the rate of copies between both."""

from __future__ import annotations

import os
import time
from typing import Any

import shardwright as smp
import torch

from benches.gpt2.model import make_optimizer
from tools.gpu_day.cases import run_cases, run_listed
from tools.gpu_day.figures import seconds_of, synchronize
from tools.gpu_day.findings import Findings
from tools.gpu_day.options import Options
from tools.gpu_day.training import (
    TOLERANCES,
    Size,
    begin_peak,
    language_loss,
    make_gpt2,
    make_ids,
    relative,
    repeatable,
    train_plain,
    train_ranks,
)

SECONDS = 55.0
#: GPT-2 medium but for its vocabulary.
SIZE = Size(blocks=24, width=1024, heads=16, sequence=512, batch=8, microbatches=4)
TINY = Size(blocks=4, width=64, heads=2, sequence=32, batch=8, microbatches=4, vocabulary=64)
STEPS = 4
#: Of tensors that are sent, and how many of each size. The rate that counts is that of the largest.
SENT = {"1_mib": (1 << 20, 64), "16_mib": (16 << 20, 64), "256_mib": (256 << 20, 64)}
TINY_SENT = {"64_kib": (64 << 10, 8), "256_kib": (256 << 10, 8)}
#: How many are on their way at once. Twice as many have to fit into the device buffer.
WINDOW = 2
BUFFER_BYTES = 4 * WINDOW * (256 << 20)
#: Of the rate at which the device copies its own memory.
LEAST_SHARE = 0.4
#: How far the account may be from what was predicted: an optimizer counts its steps for each parameter.
ACCOUNT = 0.01
#: How long two ranks may take to open each other's memory.
OPEN_SECONDS = 20.0
CASES: dict[str, dict[str, Any]] = {"training": {"what": "training"}, "copies": {"what": "copies"}}


def run(options: Options) -> dict[str, Any]:
    """Train, and send."""
    findings = Findings()
    route = "peer_copy" if options.device == "cuda" else "shared_memory"
    for name, answers, error in run_cases(on_rank, CASES, options, seconds=SECONDS):
        findings.expect(not error, f"{name}: {error}")
        if not answers:
            continue
        if name == "training":
            _judge_training(findings, answers, route)
        else:
            _judge_copies(findings, answers, route, options)
    return findings.result()


def _judge_training(findings: Findings, answers: list[dict[str, Any]], route: str) -> None:
    findings.add({name: answers[0][name] for name in ("loss_error", "losses_bitwise", "step_seconds", "plain_seconds")})
    findings.expect(
        answers[0]["loss_error"] <= TOLERANCES["float32"], f"losses are off by {answers[0]['loss_error']:.3g}"
    )
    for rank, answer in enumerate(answers):
        measured, predicted = answer["account"]["measured"], answer["account"]["predicted"]
        for kind in ("parameters", "gradients", "optimizer_state", "activations"):
            findings.add({f"rank{rank}_{kind}_bytes": measured[kind], f"rank{rank}_{kind}_predicted": predicted[kind]})
        findings.add({f"rank{rank}_device_peak_bytes": answer["device_peak_bytes"]})
        findings.add({f"rank{rank}_{kind}_sent": answer["routes"][kind]["bytes_sent"] for kind in answer["routes"]})
        findings.add({f"rank{rank}_fallbacks": str(answer["fallbacks"])})
        findings.expect(route in answer["routes"], f"rank {rank} sent no tensor by {route}")
        for kind in ("parameters", "gradients", "optimizer_state"):
            findings.expect(
                abs(measured[kind] - predicted[kind]) <= ACCOUNT * predicted[kind],
                f"rank {rank} has {measured[kind]} bytes of {kind}, and {predicted[kind]} were predicted",
            )


def _judge_copies(findings: Findings, answers: list[dict[str, Any]], route: str, options: Options) -> None:
    sent, received = answers
    findings.add({"devices": sent["devices"], "memory_copy_bytes_per_second": sent["memory_rate"]})
    findings.expect(received["right"], "what rank 1 received is not what rank 0 sent")
    for name, rate in sent["rates"].items():
        findings.add({f"sent_{name}_bytes_per_second": rate})
    for name, by_route in sent["routes"].items():
        findings.expect(
            by_route == {route: sent["counts"][name]}, f"tensors of {name} went by {by_route}, and not by {route}"
        )
    share = list(sent["rates"].values())[-1] / sent["memory_rate"]
    findings.at_least("share_of_memory_copy", share, LEAST_SHARE, judged=options.device == "cuda" and not options.tiny)


def on_rank(options: Options) -> dict[str, Any]:
    """Be a rank."""
    return run_listed(options, _run, CASES)


def _run(options: Options, what: str) -> dict[str, Any]:
    return training(options) if what == "training" else copies(options)


def training(options: Options) -> dict[str, Any]:
    """What a rank does to train; rank 0 trains alone before."""
    repeatable()
    size = TINY if options.tiny else SIZE
    ids = make_ids(size, options.device)
    expected = None
    if os.environ["RANK"] == "0":
        model = make_gpt2(size, options.device, torch.float32)
        parts = ids.chunk(size.microbatches)
        expected = train_plain(model, parts, STEPS, make_optimizer, language_loss, with_values=False)
        del model
    before = begin_peak(options.device)
    answer: dict[str, Any] = {}

    def look() -> None:
        account, stats = smp.memory_report()[smp.rank()], smp.comm_stats()
        peak = torch.cuda.max_memory_allocated() - before if options.device == "cuda" else 0
        answer.update(
            account={kind: account[kind] for kind in ("measured", "predicted")},
            routes={name: counts for name, counts in stats["routes"].items() if counts["bytes_sent"]},
            fallbacks={reason: of["tensors"] for reason, of in stats["fallbacks"].items()},
            device_peak_bytes=peak,
        )

    found = train_ranks(
        {"pipeline_parallel_degree": 2, "microbatches": size.microbatches},
        lambda: make_gpt2(size, options.device, torch.float32),
        ids,
        STEPS,
        make_optimizer,
        language_loss,
        look=look,
        with_values=False,
    )
    if expected is not None:
        pairs = list(zip(found.losses, expected.losses, strict=True))
        answer["loss_error"] = max(relative(own, other) for own, other in pairs)
        answer["losses_bitwise"] = all(torch.equal(own, other) for own, other in pairs)
        answer["step_seconds"], answer["plain_seconds"] = min(found.seconds), min(expected.seconds)
    return answer


def copies(options: Options) -> dict[str, Any]:
    """What a rank does to send, or to receive."""
    repeatable(False)
    os.environ["SMP_D2D_GPU_BUFFER_SIZE_BYTES"] = str(BUFFER_BYTES)
    smp.init({"pipeline_parallel_degree": 2})
    try:
        answer: dict[str, Any] = {"rates": {}, "routes": {}, "counts": {}, "right": True}
        _open(options.device)
        answer["devices"] = smp.comm_stats()["peers"][1 - smp.rank()]["devices"]
        if smp.rank() == 0:
            largest = (4 << 20) if options.tiny else (1 << 30)
            memory = torch.ones(largest // 4, device=options.device)
            into = torch.empty_like(memory)
            answer["memory_rate"] = largest / seconds_of(lambda: into.copy_(memory), options.device)
        smp.barrier()
        for name, (nbytes, count) in (TINY_SENT if options.tiny else SENT).items():
            _send(options.device, nbytes, 2 * WINDOW)
            before = _tensors_sent()
            rate, received = _send(options.device, nbytes, count)
            answer["rates"][name], answer["counts"][name] = rate, count
            answer["routes"][name] = {
                route: more for route, sent in _tensors_sent().items() if (more := sent - before.get(route, 0))
            }
            if received is not None:
                answer["right"] &= bool(received.eq(torch.arange(nbytes // 4, device=options.device)).all())
        return answer
    finally:
        smp.shutdown()


def _open(device: str) -> None:
    """Send to and fro until both ranks have opened each other's memory, where they do."""
    deadline = time.monotonic() + OPEN_SECONDS
    is_open = False
    while not is_open:
        for sender in (0, 1):
            if smp.rank() == sender:
                smp.send(torch.ones(1 << 14, device=device), 1 - sender, smp.RankType.WORLD_RANK)
            else:
                smp.recv_from(sender, smp.RankType.WORLD_RANK)
        known = device == "cpu" or smp.comm_stats()["peers"][1 - smp.rank()]["devices"] != "not used"
        is_open = all(smp.allgather(known or time.monotonic() > deadline, smp.WORLD))


def _send(device: str, nbytes: int, count: int) -> tuple[float, torch.Tensor | None]:
    """Send so many tensors from rank 0 to rank 1; bytes a second, and on rank 1 the last one.

    Rank 1 tells after each window that it has arrived, and rank 0 sends one window ahead of that.
    """
    number = torch.arange(nbytes // 4, device=device, dtype=torch.int32)
    received = None
    smp.barrier()
    synchronize(device)
    began = time.perf_counter()
    for window in range(count // WINDOW):
        if smp.rank() == 0:
            for _ in range(WINDOW):
                smp.send(number, 1, smp.RankType.WORLD_RANK)
            if window > 0:
                smp.recv_from(1, smp.RankType.WORLD_RANK)
        else:
            for _ in range(WINDOW):
                received = smp.recv_from(0, smp.RankType.WORLD_RANK)
            synchronize(device)
            smp.send(window, 0, smp.RankType.WORLD_RANK)
    if smp.rank() == 0:
        smp.recv_from(1, smp.RankType.WORLD_RANK)
    return count * nbytes / (time.perf_counter() - began), received


def _tensors_sent() -> dict[str, int]:
    return {name: counts["tensors_sent"] for name, counts in smp.comm_stats()["routes"].items()}
