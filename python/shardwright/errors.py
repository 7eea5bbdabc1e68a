"""All exceptions of the library."""

from __future__ import annotations

from shardwright.safe_repr import bounded


class ShardwrightError(RuntimeError):
    """Base class of all errors of the library. Of a line that is too long to be read, the middle is left out."""

    def __init__(self, *args: object) -> None:
        """Create the error, whose message may quote files, stores and arguments of any length."""
        super().__init__(*(bounded(each) if isinstance(each, str) else each for each in args))


class ConfigError(ShardwrightError, ValueError):
    """A configuration key or an argument has a value that is not allowed."""


class JobStartError(ShardwrightError):
    """The ranks could not find or authenticate each other at the start, or their versions or configurations differ."""


class PartitionError(ShardwrightError, ValueError):
    """A model cannot be partitioned over ranks as specified."""


class UnsupportedValueError(ShardwrightError, TypeError):
    """An argument or result contains a value of a type that cannot be sent between ranks.

    Attributes:
        kind: The full name of the type; for tensors, a description.
    """

    def __init__(self, text: str = "", kind: str = "value of an unknown type") -> None:
        """Create the error with a message and the type."""
        super().__init__(text)
        self.kind = kind


class FrameError(ShardwrightError):
    """An operation in a step would make the results of the partitioned model differ from those of the whole model."""


class NotOwnedError(ShardwrightError):
    """A parameter, buffer, gradient or attribute whose values are on another rank was used."""


class OffloadError(ShardwrightError):
    """Activations or an optimizer's state could not be offloaded, or not be read back: a disk is full, or broken."""


class StallError(ShardwrightError):
    """All ranks wait for each other, or no rank has made progress for ``stall_timeout_seconds``."""


class StepMismatchError(ShardwrightError):
    """Ranks called different step functions in the same step."""


class PartialUpdateError(ShardwrightError):
    """Weights may have been updated on some ranks only, so no step can run."""


class CheckpointError(ShardwrightError):
    """A checkpoint could not be saved or loaded, on at least one rank; all ranks raise it, with the rank and the cause.

    What was saved before is as it was.
    """


class LeftOutError(ShardwrightError):
    """Something was asked for that was left out when a file or a checkpoint was saved, since it was not data.

    Also a ``KeyError`` where an entry of a dict is asked for, and an ``AttributeError`` for an attribute.
    """


class CheckpointGoneError(CheckpointError):
    """A checkpoint was removed or replaced by another job while it was read; those that are there are whole."""


class VerificationError(ShardwrightError):
    """A distributed step computed a different result than one process; see ``raise_on_difference`` of ``smp.verify``.

    The message is the report. Its first departure names the module that computed something else, and by how much.
    """


class RemoteError(ShardwrightError):
    """Another rank has failed.

    Attributes:
        rank: The global rank that failed.
        host: Its host name.
        module: The module that was running, or None.
        microbatch: The microbatch that was running, or None.
        phase: ``"forward"`` or ``"backward"``, or None outside a task.
        kind: The type of the original exception.
        message: The text of the original exception.
        traceback: The original traceback as text.
    """

    def __init__(
        self,
        rank: int,
        host: str,
        module: str | None,
        microbatch: int | None,
        phase: str | None,
        kind: str,
        message: str,
        traceback: str = "",
    ) -> None:
        """Create the error; the message is composed of the attributes."""
        self.rank = rank
        self.host = host
        self.module = module
        self.microbatch = microbatch
        self.phase = phase
        self.kind = kind
        self.message = message
        self.traceback = traceback
        places = [f"rank {rank} on host {host!r}"]
        if phase is not None:
            places.append(phase)
        if module is not None:
            places.append(f"of module {module!r}")
        if microbatch is not None:
            places.append(f"in microbatch {microbatch}")
        self._text = bounded(f"{', '.join(places)}: {kind}: {message}")
        if traceback:
            self._text += f"\n\nThe traceback on rank {rank}:\n{traceback.rstrip()}"
        super().__init__(rank, host, module, microbatch, phase, kind, message, traceback)

    def __str__(self) -> str:
        """Where it failed, with what, and the traceback."""
        return self._text


class PeerLostError(RemoteError):
    """Another rank has died, does not respond, or has left the job while it was needed."""


class DepartureError(RemoteError):
    """In static mode, a module returned a different result than in earlier steps.

    Raised only with ``on_departure="error"``; otherwise the step is run again as in dynamic mode.
    """


class StateOrderError(RemoteError):
    """Microbatches accessed the state of a module in another order than in one process.

    The step is undone and run again in a stricter order, so scripts do not see this error.
    """


class StateWriteError(StateOrderError):
    """A module changed its state in a way that is exact only if microbatches run one after another.

    The step is undone, and it and all later steps run in this way, so scripts do not see this error.
    """


class StepAborted(BaseException):
    """Unwinds the suspended tasks of a failed step; not an ``Exception``, so scripts do not catch it by accident."""
