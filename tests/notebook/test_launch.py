"""A notebook's function runs as the ranks of a job; results come back by rank, errors with their rank and traceback."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import shardwright as smp
import torch
from shardwright.notebook import launch, watch

from tests.jobs.ranks import run_ranks

SEED, STEPS = 3, 3
WIDTH = 64


def made() -> torch.nn.Module:
    torch.manual_seed(SEED)
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 1)).double()


def batch() -> torch.Tensor:
    return torch.randn(16, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(SEED))


@smp.step
def step(model: Any, inputs: torch.Tensor) -> torch.Tensor:
    loss = model(inputs).square().mean()
    model.backward(loss)
    return loss


def train(degree: int) -> tuple[int, int, list[float]]:
    smp.init({"pipeline_parallel_degree": degree, "microbatches": 2})
    model = smp.DistributedModel(made())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses.append(step(model, batch()).reduce_mean().item())
        optimizer.step()
    stats = smp.stats()["server"]["total"]
    return smp.rank(), stats["sent"]["forward"] + stats["served"]["forward"], losses


def plain() -> list[float]:
    model, losses = made(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(batch()).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_ranks_train_as_one_process_does_after_the_notebook_has_used_torch() -> None:
    torch.randn(500, 500).matmul(torch.randn(500, 500))  # with a pool of threads, where the machine has cores
    expected = plain()
    for ranks in (2, 1, 3):  # again and again, in the same process
        results = launch(train, ranks, ranks=ranks)
        assert [rank for rank, _, _ in results] == list(range(ranks))
        for _, requests, losses in results:
            assert losses == pytest.approx(expected, rel=1e-12, abs=0)
            assert requests > 0 or ranks != 2


def test_ranks_train_after_the_notebook_has_trained_as_one_rank() -> None:
    _, _, alone = train(1)
    smp.init({"pipeline_parallel_degree": 1, "microbatches": 2})  # as when a cell is run again
    smp.shutdown()
    for _, requests, losses in launch(train, 2):
        assert losses == pytest.approx(alone, rel=1e-12, abs=0)
        assert requests > 0


def test_a_process_with_threads_for_gradients_is_told_what_to_do(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\nimport shardwright.notebook\n"
        "torch._C._ensureCUDADeviceGuardSet()\n"  # as a compilation does
        "torch.ones(1, requires_grad=True).sum().backward()\n"
        "shardwright.notebook.launch(int)\n"
    )
    (ended,) = run_ranks(script, ranks=0)
    assert "restart the notebook's kernel, and call launch before any other backward" in ended.err


def test_what_the_notebook_has_is_there_and_stays_as_it_is(capfd: pytest.CaptureFixture[str]) -> None:
    seen = ["before"]

    def told(*, word: str) -> list[str]:
        seen.append(word)
        print("one\ntwo", end="")
        os.system("echo from a child >&2")
        return seen

    environment = dict(os.environ)
    assert launch(told, ranks=2, word="after") == [["before", "after"]] * 2
    assert seen == ["before"]
    assert dict(os.environ) == environment
    shown = capfd.readouterr()
    assert sorted(shown.out.splitlines()) == [f"[rank {rank}] {word}" for rank in (0, 1) for word in ("one", "two")]
    assert sorted(shown.err.splitlines()) == ["[rank 0] from a child", "[rank 1] from a child"]


def test_a_progress_bar_is_shown_as_it_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    def shown() -> None:
        for piece in ("\r 0%", "\r 50%", "\r100%\n", "windows\r\n", "\n", "rest\r"):
            os.write(2, piece.encode())
            time.sleep(0.05)

    launch(shown, ranks=1)
    bar = "[rank 0]  0%\r[rank 0]  50%\r[rank 0] 100%\n"
    assert capsys.readouterr().err == f"{bar}[rank 0] windows\n[rank 0] \n[rank 0] rest\n"


def test_large_results_and_much_output_pass(capsys: pytest.CaptureFixture[str]) -> None:
    def told() -> torch.Tensor:
        print("x" * 300_000)
        return torch.arange(1 << 20)

    for result in launch(told, ranks=2):
        assert torch.equal(result, torch.arange(1 << 20))
    assert sorted(map(len, capsys.readouterr().out.splitlines())) == [300_009] * 2


def test_the_error_of_the_rank_that_failed_is_raised_not_those_that_follow() -> None:
    def failing() -> None:
        train(2)
        if smp.rank() == 1:
            raise LookupError("no such luck")
        smp.barrier()

    with pytest.raises(smp.RemoteError, match=r"rank 1 on host .*: LookupError: no such luck") as caught:
        launch(failing)
    assert "in failing" in caught.value.traceback
    assert (caught.value.rank, caught.value.kind) == (1, "LookupError")


def test_a_rank_that_is_killed_ends_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(watch, "END_SECONDS", 0.5)

    def killed(path: Path) -> None:
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(100)
        path.write_text("to its end")

    with pytest.raises(smp.RemoteError, match=r"rank 1 .*ended by signal 9"):
        launch(killed, tmp_path / "ran")
    assert not (tmp_path / "ran").exists()


def test_an_interrupt_ends_the_ranks(tmp_path: Path) -> None:
    def waiting(folder: Path) -> None:
        (folder / os.environ["RANK"]).write_text(str(os.getpid()))
        time.sleep(100)

    def interrupt() -> None:
        while len(list(tmp_path.iterdir())) < 2 or not all(file.read_text() for file in tmp_path.iterdir()):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Thread(target=interrupt)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        launch(waiting, tmp_path)
    timer.join()
    assert not any(Path("/proc", file.read_text()).exists() for file in tmp_path.iterdir())


def test_an_interrupt_while_ranks_are_started_leaves_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, pids = sys.modules["shardwright.notebook.launch"], []
    start = module._start  # type: ignore[attr-defined]

    def interrupted(*given: Any) -> Any:
        one = start(*given)
        signal.raise_signal(signal.SIGINT)  # when nobody but this frame knows of the rank
        pids.append(one.pid)
        return one

    monkeypatch.setattr(module, "_start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        launch(time.sleep, 100)
    assert len(pids) == 2
    assert not any(Path("/proc", str(pid)).exists() for pid in pids)


def test_a_result_that_cannot_be_pickled_says_what_can() -> None:
    with pytest.raises(smp.RemoteError, match=r"returned a function that cannot be pickled .* return numbers"):
        launch(lambda: lambda: None)


class Irretrievable:
    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("no number",)


def test_a_result_that_cannot_be_unpickled_says_what_can() -> None:
    with pytest.raises(smp.RemoteError, match=r"cannot be unpickled \(ValueError: .*return numbers"):
        launch(Irretrievable)


def test_no_pipe_is_left_open() -> None:
    before = set(os.listdir("/proc/self/fd"))
    launch(int, ranks=2)
    assert set(os.listdir("/proc/self/fd")) <= before


def test_a_process_that_cannot_be_forked_is_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(smp.ConfigError, match="ranks is 0"):
        launch(int, ranks=0)
    with pytest.raises(smp.ConfigError, match="allowed: a function, without calling it"):
        launch(train(1))  # type: ignore[arg-type]
    with pytest.raises(smp.ShardwrightError, match="which is a rank itself"):
        launch(int)
    smp.shutdown()
    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "is_initialized", lambda: True)
        with pytest.raises(smp.ShardwrightError, match="uses a GPU already"):
            launch(int)
        patched.setattr(torch.distributed, "is_initialized", lambda: True)
        with pytest.raises(smp.ShardwrightError, match="destroy_process_group"):
            launch(int)
    errors: list[Exception] = []

    def in_thread() -> None:
        try:
            launch(int)
        except smp.ShardwrightError as error:
            errors.append(error)

    thread = threading.Thread(target=in_thread)
    thread.start()
    thread.join()
    assert "in the main thread" in str(errors[0])
