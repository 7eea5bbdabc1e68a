"""All exceptions of the library, where launchers look for them; ``ShardwrightError`` is the base of all."""

from shardwright import (
    CheckpointError,
    ConfigError,
    DepartureError,
    FrameError,
    JobStartError,
    LeftOutError,
    NotOwnedError,
    PartialUpdateError,
    PartitionError,
    PeerLostError,
    RemoteError,
    ShardwrightError,
    StallError,
    StepMismatchError,
    UnsupportedValueError,
    VerificationError,
)

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DepartureError",
    "FrameError",
    "JobStartError",
    "LeftOutError",
    "NotOwnedError",
    "PartialUpdateError",
    "PartitionError",
    "PeerLostError",
    "RemoteError",
    "ShardwrightError",
    "StallError",
    "StepMismatchError",
    "UnsupportedValueError",
    "VerificationError",
]
