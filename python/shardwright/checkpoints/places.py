"""Where checkpoints are: in a folder, or in an object store."""

from __future__ import annotations

import os

from shardwright._core import CheckpointWriter, is_in_store
from shardwright.errors import CheckpointError, ShardwrightError


def place_of(path: str | os.PathLike[str]) -> str:
    """Return the directory of checkpoints whatever the current folder is later; addresses in a store as they are."""
    return os.fspath(path) if is_in_store(path) else os.path.abspath(path)


def check_tag(path: str | os.PathLike[str], tag: object) -> str:
    """Return a tag; refuse one that no checkpoint at a path can have, of either kind.

    Raises:
        ShardwrightError: Names it, and what is allowed.
    """
    if not isinstance(tag, str):
        raise ShardwrightError(f"tag is a {type(tag).__name__}; allowed: a str")
    try:
        CheckpointWriter(path, tag)  # which writes nothing yet
    except UnicodeEncodeError:  # of an argument of the command line that was not UTF-8
        raise ShardwrightError(f"tag is {tag!r}; allowed: text that can be encoded as UTF-8") from None
    return tag


def check_on_disk(operation: str, path: str | os.PathLike[str]) -> None:
    """Refuse an address in a store for what is not a checkpoint in parts.

    Raises:
        CheckpointError: It is one, or it is an address of another kind, or empty.
    """
    try:
        is_of_store = is_in_store(path)
    except ShardwrightError as error:
        raise CheckpointError(f"{operation}: {error}") from None
    if is_of_store:
        raise CheckpointError(
            f"{operation}: {os.fspath(path)!r} is in an object store, where only checkpoints in parts are; this one is "
            "on a disk. `shardwright checkpoint reshard` copies checkpoints in parts between disks and stores, and "
            "`shardwright checkpoint export --full` writes the whole model out of a store"
        )
