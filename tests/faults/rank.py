"""One rank: faults come over standard input, one after another, and what came of each goes to standard output."""

from __future__ import annotations

import faulthandler
import gc
import json
import logging
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardwright.tensor_parallel.group import TensorGroup

from tests.faults import saves
from tests.faults.cases import SAVING

CASE = json.loads(sys.argv[1])
#: How often a place is passed before the fault: others are then in the middle of something.
VISITS = {"forward": 2, "backward": 2, "optimizer": 2}
LIMITS = {
    "30 descriptors": (resource.RLIMIT_NOFILE, 30),
    "600 MB of address space more": (resource.RLIMIT_AS, 600 << 20),
    "1.5 GB of address space more": (resource.RLIMIT_AS, 1500 << 20),
    "2.7 GB of address space more": (resource.RLIMIT_AS, 2700 << 20),
    "1 MB of a file": (resource.RLIMIT_FSIZE, 1 << 20),
    "no locked memory": (resource.RLIMIT_MEMLOCK, 0),
}


def say(event: str, **fields: Any) -> None:
    """Tell the runner something."""
    sys.stdout.write(json.dumps({"event": event, "at": time.monotonic(), **fields}) + "\n")
    sys.stdout.flush()


def hear() -> Any:
    """Wait for what the runner says."""
    line = sys.stdin.readline()
    if not line:
        os._exit(0)
    return json.loads(line)


def replace_everywhere(function: Callable[..., Any], other: Callable[..., Any]) -> None:
    """Replace a function of the library in every module that has imported it."""
    name = function.__name__
    holders = [module for module in list(sys.modules.values()) if vars(module).get(name) is function]
    assert len(holders) > 1, "where it is defined, and where it is used"
    for module in holders:
        setattr(module, name, other)


class ScriptError(Exception):
    """The script's own exception."""


class Unprintable(Exception):
    """An exception that cannot be shown."""

    def __str__(self) -> str:
        raise ValueError("no text")

    __repr__ = __str__


class Noteless(Exception):
    """An exception that takes no notes."""

    def add_note(self, note: str) -> None:
        raise OSError("no note")


def raising(error: BaseException) -> Callable[[], None]:
    """An action that raises."""

    def action() -> None:
        say("fault")
        raise error

    return action


def killed(number: int) -> None:
    say("fault")
    os.kill(os.getpid(), number)


def allocate() -> None:
    import torch

    say("fault")
    torch.empty(1 << 46, dtype=torch.uint8)


def allocate_in_python() -> None:
    say("fault")
    bytearray(1 << 46)


def end_thread() -> None:
    """Raise, and let every try to report that end the worker's thread."""
    from shardwright.execution import worker

    real, tries = worker.failure_text, 0

    class Failing:
        """In the place of the module that reports errors."""

        @staticmethod
        def add_note(*_: object) -> None:
            """Add none."""

        @staticmethod
        def report(*_: object, **__: object) -> None:
            """Report nothing."""
            nonlocal tries
            tries += 1
            if tries == 2:  # the worker's own, and that of its outermost handler
                worker.failure_text = real
            raise SystemExit

    worker.failure_text = Failing  # type: ignore[assignment]
    say("fault")
    raise ScriptError("deliberate failure")


def exit_at_once() -> None:
    say("fault")
    os._exit(5)


ACTIONS: dict[str, Callable[[], None]] = {
    "raise": raising(ScriptError("deliberate failure")),
    "raise a lone surrogate": raising(ScriptError("\ud800 is no character")),
    "raise what cannot be printed": raising(Unprintable()),
    "raise 20 MB of text": raising(ScriptError("x" * 20_000_000)),
    "raise what takes no note": raising(Noteless("deliberate failure")),
    "interrupt": lambda: killed(signal.SIGINT),
    "sys.exit, caught": raising(SystemExit(3)),
    "sys.exit": raising(SystemExit(3)),
    "out of memory": allocate,
    "out of memory in Python": allocate_in_python,
    "stop for 3 s": lambda: killed(signal.SIGSTOP),
    "stop for ever": lambda: killed(signal.SIGSTOP),
    "worker's thread ends": end_thread,
    "os._exit": exit_at_once,
    "kill -9": lambda: killed(signal.SIGKILL),
}


def text_of(error: BaseException) -> str:
    """What an error says, as far as it says anything."""
    try:
        return str(error)[:3000].encode(errors="replace").decode()
    except Exception:
        return "unprintable"


def described(error: BaseException | None) -> dict[str, Any] | None:
    """An error for the runner."""
    import shardwright as smp

    if error is None:
        return None
    own = isinstance(error, smp.ShardwrightError)
    return {"type": type(error).__name__, "text": text_of(error), "at": time.monotonic(), "from_library": own}


class Rank:
    """Goes through cases."""

    def __init__(self) -> None:
        import shardwright as smp
        import torch

        from tests.faults import model as faulty

        torch.set_num_threads(1)
        pp, tp, dp = CASE["degrees"]
        keys: dict[str, Any] = {
            "pipeline_parallel_degree": pp,
            "tensor_parallel_degree": tp,
            "ddp": tp * dp > 1,
            "microbatches": faulty.MICROBATCHES,
            "skip_tracing": True,
            **CASE["keys"],
        }
        self.smp, self.faulty, self.place = smp, faulty, faulty.place
        #: Brings about an interrupt, from when the next step begins.
        self.timer: threading.Timer | None = None
        if CASE["starts"]:
            self.lack(CASE["starts"], keys)
        smp.init(keys)
        self.rank = smp.rank()
        self.watch_waits()
        saves.watch(self.place)

    def lack(self, case: dict[str, Any], keys: dict[str, Any]) -> None:
        """Take something away before the job starts."""
        if case["rank"] not in (-1, int(os.environ["RANK"])):
            return
        if case["fault"] == "other configuration":
            keys["microbatches"] += 1
            return
        which, most = LIMITS[case["fault"]]
        if case["fault"].endswith(" more"):
            most += int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(which, (most, most))
        say("fault")

    def watch_waits(self) -> None:
        """Make waits for other ranks at the end of a step, and within tensor parallelism, a place."""
        from shardwright.job.exchange import receive_object, wait_collective
        from shardwright.timeline.trace import begin_step

        for function in (wait_collective, receive_object):
            replace_everywhere(function, self.visiting(function))

        def timed(runtime: Any) -> None:
            # Before a step begins, an interrupt is the script's own, and the others wait for a step that never comes.
            if self.timer is not None and self.timer.ident is None:
                self.timer.start()
            begin_step(runtime)

        replace_everywhere(begin_step, timed)

    def visiting(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def visiting(runtime: Any, *args: Any, **kwargs: Any) -> Any:
            alone = runtime.place.launch.world_size == runtime.place.pp_size
            if runtime.step.running and (
                runtime.step.voted if alone else runtime.step.committing or runtime.find(TensorGroup) is not None
            ):
                self.place.visit_("reduction")
            return method(runtime, *args, **kwargs)

        return visiting

    def run(self) -> None:
        """Build the model, and take one case after another."""
        self.training = self.faulty.Training()
        say("exact", error=self.training.exact_step(), peers=self.smp.comm_stats()["peers"])
        began = time.monotonic()
        say("exact", error=self.training.exact_step())
        self.seconds = time.monotonic() - began
        while (case := hear()) is not None:
            self.take(case)
        self.smp.shutdown()
        say("end")

    def take(self, case: dict[str, Any]) -> None:
        """One fault, and what follows."""
        self.place.disarm()
        attempt = self.attempt(case)
        said = self.exchange("tried", **attempt)
        moved = [each["updated"] for each in said]
        if all(moved):
            self.training.take_plain(self.batches)
            self.training.optimizer.zero_grad()  # an interrupt may have ended it half-way
        elif any(moved):  # some have updated their weights, and some not
            self.training.optimizer.zero_grad()
            error = self.caught(lambda: self.training.take(self.training.draw()))
            self.exchange("refused", error=described(error))
            self.training.model.load_state_dict(self.training.plain.state_dict())
            self.training.optimizer.zero_grad()
        if case["fault"] in ("other model", "dropped model"):
            self.training.build()
            gc.collect()
        error = self.caught(self.go_on)
        self.exchange("after", error=described(error), worst=self.worst if error is None else None)

    def go_on(self) -> None:
        self.worst = self.training.exact_step()

    def exchange(self, event: str, **fields: Any) -> list[dict[str, Any]]:
        """Say something, and hear what all ranks have said."""
        say(event, **fields)
        heard: list[dict[str, Any]] = hear()
        return heard

    @staticmethod
    def caught(part: Callable[[], Any]) -> BaseException | None:
        """What a part of the script raises."""
        try:
            part()
        except BaseException as error:
            return error
        return None

    def attempt(self, case: dict[str, Any]) -> dict[str, Any]:
        """A turn of the training loop in which something goes wrong here, or elsewhere."""
        training, here = self.training, case["rank"] in (-1, self.rank)
        self.batches = training.draw()
        self.updated, self.timer = False, None
        if here:
            self.prepare(case)
        errors: list[BaseException | None] = []

        def whole() -> None:
            errors.append(self.caught(lambda: self.turn(case, here)))
            if self.timer is not None:
                self.timer.join()
                time.sleep(0.02)

        late = self.caught(whole)  # an interrupt may come when the turn is over
        error = next((error for error in errors if error is not None), late)
        if case["moment"] in SAVING and self.rank == 0:
            error = self.caught(lambda: saves.lock(CASE["folder"])) or error
        if case["ends"] and isinstance(error, SystemExit):
            raise error
        return {"error": described(error), "updated": self.updated}

    def turn(self, case: dict[str, Any], here: bool) -> None:
        training = self.training
        if here and case["moment"] == "start":
            self.place.visit_("start")
        if case["moment"] in SAVING:
            saves.save_twice(CASE["folder"], training)
        if case["moment"] == "start":
            training.build(3 if here and case["fault"] == "other model" else 0)
        # A fault between steps is caught there, and the loop goes on.
        between = self.caught(lambda: self.place.visit_("between steps"))
        if case["ends"] and between is not None:
            raise between
        if here and case["fault"] == "other step function":
            training.other_step(training.model, self.batches[self.smp.dp_rank()])
        else:
            training.take(self.batches)
        self.place.visit_("before the update")
        training.optimizer.step()
        self.updated = True
        training.optimizer.zero_grad()
        if case["moment"] == "end":
            self.place.visit_("end")
            self.smp.barrier()

    def prepare(self, case: dict[str, Any]) -> None:
        """Arrange for the fault."""
        fault, moment = case["fault"], case["moment"]
        if moment == "anywhere":
            after = float(fault.split()[2]) / 100 * self.seconds
            self.timer = threading.Timer(after, lambda: killed(signal.SIGINT))
            self.timer.daemon = True
            return
        if fault == "dropped model":
            self.training.model = None
            gc.collect()
        action = ACTIONS.get(fault)
        if action is None:
            return
        self.place.arm(moment, action, VISITS.get(moment, 1))
        if moment == "hook":
            parameter = next(iter(self.training.model.local_parameters()))
            handle: Any = None

            def hook(gradient: Any) -> None:
                handle.remove()
                self.place.visit_("hook")

            handle = parameter.register_hook(hook)


def main() -> None:
    faulthandler.enable()
    logging.basicConfig(level=logging.ERROR)
    try:
        Rank().run()
    except Exception as error:
        say("ended", error=described(error))
        raise


if __name__ == "__main__":
    main()
