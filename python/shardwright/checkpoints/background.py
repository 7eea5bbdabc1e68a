"""Saves that go on while training does: each rank writes in a thread, and that of rank 0 completes the checkpoint."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from shardwright._core import CheckpointMemory, CheckpointWriter
from shardwright.checkpoints.streamed import Given, copy_part
from shardwright.checkpoints.together import keep_others_out, on_all_ranks
from shardwright.errors import CheckpointError, PeerLostError, RemoteError, ShardwrightError
from shardwright.job.received import decode_from
from shardwright.job.runtime import Runtime
from shardwright.values import encode

#: Between looks for what another rank tells; a look takes no time, and wakes nobody.
_POLL_SECONDS = 0.02


class BackgroundSave:
    """A save that goes on in the background.

    The threads tell that of rank 0 what they have written, on a channel of this save: a rank that is lost, in order or
    not, is known there as soon as to anybody, after what it has told. Whatever happens, the thread of rank 0 ends the
    save, and gives the directory's lock back.
    """

    def __init__(
        self,
        runtime: Runtime,
        writer: CheckpointWriter,
        tag: str,
        nonce: str,
        given: Sequence[Given],
        memory: CheckpointMemory,
    ) -> None:
        """Copy values, and begin to write them.

        Args:
            runtime: The rank.
            writer: Writes this rank's part; on rank 0 it keeps other jobs out of the directory.
            tag: The checkpoint.
            nonce: What tells this save from others of the same tag; the same on all ranks.
            given: The values.
            memory: Where the copies are.
        """
        self.tag = tag
        self._runtime = runtime
        self._rank, self._world = runtime.place.rank, runtime.place.launch.world_size
        self._patience: float = runtime.place.cfg.stall_timeout_seconds
        self._writer = writer
        self._channel = f"checkpoint {nonce}"
        self._part = copy_part(self._writer, f"part-{self._rank:05}.safetensors", given, memory)
        self._commit: Callable[[list[str]], object] | None = None
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
            if self._commit is None:
                self._write_and_tell()
            else:
                self._write_and_complete(self._commit)
        except Exception as error:
            self._errors.append(error)
        finally:
            self._writer.unlock()

    def _write_and_tell(self) -> None:
        try:
            told = {"report": self._part.wait()}
        except Exception as error:
            told = {"error": str(error)}
            raise
        finally:
            self._runtime.node.send_object(0, self._channel, *encode(json.dumps(told)))

    def _write_and_complete(self, commit: Callable[[list[str]], object]) -> None:
        deadline = time.monotonic() + self._patience
        reports: list[str] = []
        errors: list[Exception] = []
        # Also after a failure, each is waited for: no rank writes into the folder any more when it goes.
        for rank in range(self._world):
            try:
                reports.append(self._report_of(rank, deadline) if rank != self._rank else self._part.wait())
            except Exception as error:
                errors.append(error)
        try:
            if errors:
                raise errors[0]
            commit(reports)
        except Exception:
            with contextlib.suppress(ShardwrightError):  # the error is told that came first
                self._writer.abandon()
            raise

    def _report_of(self, rank: int, deadline: float) -> str:
        """Wait for what a rank tells of its part."""
        while True:
            try:
                received = self._runtime.node.recv_object(rank, self._channel, 0.0)
            except PeerLostError as error:
                raise ShardwrightError(f"rank {rank} was lost before it had written its part: {error}") from error
            if received is not None:
                told = json.loads(decode_from(self._runtime, rank, *received))
                if "error" in told:
                    raise ShardwrightError(f"rank {rank} could not write its part: {told['error']}")
                return str(told["report"])
            if time.monotonic() > deadline:
                raise ShardwrightError(f"rank {rank} did not write its part within {self._patience} s")
            time.sleep(_POLL_SECONDS)

    def finish(self, operation: str) -> None:
        """Wait for the end; all ranks call this.

        Raises:
            CheckpointError: It failed on a rank.
            PeerLostError: A rank is gone.
        """

        def ended() -> None:
            self._thread.join()
            if self._errors:
                raise self._errors[0]

        name = f"{operation}: the save of {self.tag!r} in the background"
        try:
            on_all_ranks(name, ended)
        except RemoteError as error:
            for own in self._errors[:1]:
                error.add_note(f"the checkpoint {self.tag!r} was not saved: {own}")
            raise

    def close(self) -> None:
        """Wait for the end without other ranks, when the job ends; say if it failed."""
        self._thread.join()
        if self._errors:
            self._runtime.logger.error("the checkpoint %r was not saved: %s", self.tag, self._errors[0])


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
        is_first = self._runtime.place.rank == 0

        def begin() -> None:
            begun.append(BackgroundSave(self._runtime, writer, tag, nonce, given(), self._memory))

        def give_up() -> None:
            for save in begun:
                save.give_up()

        try:
            keep_others_out(operation, writer, self._runtime.place.rank)
            try:
                on_all_ranks(operation, begin)
            except CheckpointError:
                on_all_ranks(operation, give_up)
                if is_first:
                    with contextlib.suppress(ShardwrightError):  # the error is told that came first
                        writer.abandon()
                raise
        except BaseException:
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
            self._save.close()
            self._save = None


def background(runtime: Runtime) -> Background:
    """Return what a rank has in the background."""
    found = runtime.find(Background)
    return runtime.add(Background(runtime)) if found is None else found
