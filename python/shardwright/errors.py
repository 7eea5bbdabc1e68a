"""Every exception that Shardwright raises, on one page."""

from __future__ import annotations


class ShardwrightError(RuntimeError):
    """Base of all errors raised by this library."""


class ConfigError(ShardwrightError, ValueError):
    """A configuration key or argument has a value that is not allowed."""


class JobStartError(ShardwrightError):
    """The ranks of a job could not find, trust or agree with each other at the start."""


class PartitionError(ShardwrightError, ValueError):
    """A model cannot be divided over ranks as asked."""


class UnsupportedValueError(ShardwrightError, TypeError):
    """A value of a type that cannot cross ranks stands in arguments or results.

    Attributes:
        kind: The type's full name; for tensors, what they are.
    """

    def __init__(self, text: str = "", kind: str = "value of an unknown type") -> None:
        """Keep both; only the text is shown."""
        super().__init__(text)
        self.kind = kind


class FrameError(ShardwrightError):
    """Something was done in a step that would make backward over a split model inexact."""


class NotOwnedError(ShardwrightError):
    """Something was computed with a parameter or buffer whose values live on another rank."""


class StallError(ShardwrightError):
    """Nothing in the whole job has made progress for longer than allowed."""


class StepMismatchError(ShardwrightError):
    """Ranks disagree about which step they are in: different functions, or one has left the loop."""


class PartialUpdateError(ShardwrightError):
    """Weights may have been updated on some ranks and not on others, so no step runs."""


class VerificationError(ShardwrightError):
    """A distributed step computed something else than one process; raised by ``smp.verify`` only when asked to.

    The text is the report. Cause and cure stand in its first departure: the module that computed something else, and by
    how much.
    """


class RemoteError(ShardwrightError):
    """Another rank failed; carries what failed there and where.

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
        """Keep the fields, and make one text of them."""
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
        self._text = f"{', '.join(places)}: {kind}: {message}"
        if traceback:
            self._text += f"\n\nThe traceback on rank {rank}:\n{traceback.rstrip()}"
        super().__init__(rank, host, module, microbatch, phase, kind, message, traceback)

    def __str__(self) -> str:
        """Where it failed, with what, and the traceback."""
        return self._text


class PeerLostError(RemoteError):
    """Another rank died, was frozen, or left the job while it was needed."""


class DepartureError(RemoteError):
    """In static mode, a module gave another result than in the steps that were recorded.

    Raised only with ``on_departure="error"``; else the step is run again as in dynamic mode.
    """


class StateOrderError(RemoteError):
    """Microbatches came to what a module keeps in another order than in one process.

    The step is taken back and run again in a stricter order, so a script does not see it.
    """


class StateWriteError(StateOrderError):
    """What a module keeps was changed where only microbatches that run one after another find it as in one process.

    The step is taken back and run again so, and so are the following ones; a script does not see it.
    """


class StepAborted(BaseException):
    """Unwinds the stacks of a failed step's suspended tasks; never reaches user code's ``except Exception``."""
