"""Saves that go on while training does: each rank writes in a thread, and that of rank 0 completes the checkpoint."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from shardwright._core import CheckpointMemory, CheckpointWriter, is_in_store
from shardwright.checkpoints.streamed import Given, copy_part
from shardwright.checkpoints.together import keep_others_out, on_all_ranks
from shardwright.errors import CheckpointError, ShardwrightError
from shardwright.job.runtime import Runtime

#: Between looks for what another rank tells: on a disk, and in a store, where each look is a request.
_POLL_SECONDS = {False: 0.02, True: 0.5}


class BackgroundSave:
    """A save that goes on in the background.

    Ranks tell rank 0 by notes beside their parts what they have written, since messages between ranks are the script's.
    """

    def __init__(
        self,
        runtime: Runtime,
        writer: CheckpointWriter,
        tag: str,
        nonce: str,
        given: Sequence[Given],
        memory: CheckpointMemory,
        pause: float,
    ) -> None:
        """Copy values, and begin to write them.

        Args:
            runtime: The rank.
            writer: Writes this rank's part; on rank 0 it keeps other jobs out of the directory.
            tag: The checkpoint.
            nonce: What tells this save from others of the same tag; the same on all ranks.
            given: The values.
            memory: Where the copies are.
            pause: Seconds between looks for what another rank tells.
        """
        self.tag = tag
        self._rank, self._world = runtime.place.rank, runtime.place.launch.world_size
        self._patience: float = runtime.place.cfg.stall_timeout_seconds
        self._writer = writer
        self._pause = pause
        self._reports = f"report-{nonce}-"
        self._part = copy_part(self._writer, f"part-{self._rank:05}.safetensors", given, memory)
        self._commit: Callable[[list[str]], object] | None = None
        self._told = threading.Event()
        self._others_told = threading.Event()
        self._errors: list[Exception] = []
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)

    def start(self, description: dict[str, Any] | None, keep: int | None) -> None:
        """Start the thread; on rank 0 with what the manifest says besides tensors."""
        if description is not None:
            text = json.dumps(description)
            self._commit = lambda reports: self._writer.commit(text, reports, keep=keep)
        self._thread.start()

    def give_up(self) -> None:
        """Wait for a part that will not be completed, before another save writes that file."""
        with contextlib.suppress(ShardwrightError):  # the error is told that came first
            self._part.wait()

    def _run(self) -> None:
        try:
            try:
                self._tell(json.dumps({"report": self._part.wait()}))
            except Exception as error:
                with contextlib.suppress(ShardwrightError):  # a full disk may not take this either
                    self._tell(json.dumps({"error": str(error)}))
                raise
            finally:
                self._told.set()
            if self._commit is not None:
                self._commit([self._report_of(rank) for rank in range(self._world)])
        except Exception as error:
            self._errors.append(error)

    def _tell(self, text: str) -> None:
        self._writer.leave_note(f"{self._reports}{self._rank}", text)

    def _report_of(self, rank: int) -> str:
        """Wait for what a rank tells of its part."""
        deadline = time.monotonic() + self._patience
        while True:
            all_told = self._others_told.is_set()
            text = self._writer.note(f"{self._reports}{rank}")
            if text is not None:
                told = json.loads(text)
                if "error" in told:
                    raise ShardwrightError(f"rank {rank} could not write its part: {told['error']}")
                return str(told["report"])
            if all_told:
                raise ShardwrightError(f"the part of rank {rank} is not in this directory: all ranks need the same one")
            if time.monotonic() > deadline:
                raise ShardwrightError(f"rank {rank} did not write its part within {self._patience} s")
            time.sleep(self._pause)

    def finish(self, operation: str) -> None:
        """Wait for the end; all ranks call this.

        Raises:
            CheckpointError: It failed on a rank.
        """
        name = f"{operation}: the save of {self.tag!r} in the background"

        def written() -> None:
            self._told.wait()
            if self._commit is None:
                self._thread.join()
                self._raise()

        try:
            on_all_ranks(name, written)
        finally:
            self._others_told.set()
            self._end()
        on_all_ranks(name, self._raise)

    def _end(self) -> None:
        """Wait for the thread; remove what is of no use when no other rank writes any more."""
        self._thread.join()
        if self._errors and self._rank == 0:
            with contextlib.suppress(ShardwrightError):  # the error is told that came first
                self._writer.abandon()
        self._writer.unlock()

    def _raise(self) -> None:
        if self._errors:
            raise self._errors[0]

    def close(self, runtime: Runtime) -> None:
        """Wait for the end without other ranks, when the job ends; say if it failed."""
        self._end()
        if self._errors:
            runtime.logger.error("the checkpoint %r was not saved: %s", self.tag, self._errors[0])


class Background:
    """The save that a rank has in the background, if it has one."""

    def __init__(self, runtime: Runtime) -> None:
        """Begin without one."""
        self._runtime = runtime
        self._save: BackgroundSave | None = None
        self._memory = CheckpointMemory()
        runtime.installed.callback(self._close)

    def save(
        self,
        operation: str,
        path: str,
        tag: str,
        nonce: str,
        given: Callable[[], Sequence[Given]],
        description: dict[str, Any] | None,
        keep: int | None,
    ) -> None:
        """Copy values, and write them in the background; all ranks call this.

        Args:
            operation: What is said in errors.
            path: The directory of checkpoints.
            tag: The checkpoint.
            nonce: What tells this save from others of the same tag; the same on all ranks.
            given: Returns the values.
            description: On rank 0, what the manifest says besides tensors.
            keep: How many checkpoints to leave; None for all.

        Raises:
            CheckpointError: Values could not be copied on a rank.
        """
        begun: list[BackgroundSave] = []
        writer = CheckpointWriter(path, tag)
        keep_others_out(operation, writer, self._runtime.place.rank)
        pause = _POLL_SECONDS[is_in_store(path)]

        def begin() -> None:
            begun.append(BackgroundSave(self._runtime, writer, tag, nonce, given(), self._memory, pause))

        try:
            on_all_ranks(operation, begin)
        except CheckpointError:
            for save in begun:
                save.give_up()
            writer.unlock()
            raise
        self._save = begun[0]
        self._save.start(description, keep)

    def finish(self, operation: str) -> None:
        """Wait for the end of the save; all ranks call this. Raises what it raised."""
        save, self._save = self._save, None
        if save is not None:
            save.finish(operation)

    def _close(self) -> None:
        if self._save is not None:
            self._save.close(self._runtime)
            self._save = None


def background(runtime: Runtime) -> Background:
    """Return what a rank has in the background."""
    found = runtime.find(Background)
    return runtime.add(Background(runtime)) if found is None else found
