"""Which of the folders that other libraries name has a checkpoint that is complete: one rule for all of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from shardwright._core import CheckpointReader
from shardwright.checkpoints.together import on_all_ranks
from shardwright.errors import ShardwrightError
from shardwright.job.ranks import rank
from shardwright.logs import logger


def is_complete(folder: str, tag: str, besides: Sequence[str] = ()) -> bool:
    """Return whether a checkpoint can be opened, as it is when it is loaded, and files that belong to it are there."""
    try:
        CheckpointReader(folder, tag)
    except ShardwrightError:
        return False
    return all(os.path.isfile(os.path.join(folder, name)) for name in besides)


def newest_complete(
    what: str, list_folders: Callable[[], Sequence[str]], tag: str, besides: Sequence[str] = ()
) -> str | None:
    """Return the newest folder that has a complete checkpoint, as rank 0 sees it, and say which are passed over.

    All ranks call this.

    Args:
        what: What asks, for errors and warnings.
        list_folders: Returns the folders, the newest first; called on rank 0 alone, since other ranks may see others.
        tag: The tag of the checkpoint in each.
        besides: Names of files that a complete folder has besides.

    Raises:
        CheckpointError: Rank 0 cannot list the folders; on all ranks.
    """

    def choose() -> str | None:
        if rank() != 0:
            return None
        folders = list_folders()
        found = next((index for index, folder in enumerate(folders) if is_complete(folder, tag, besides)), None)
        if found:
            logger.warning(
                "%s: %s was not completed, since the job ended while it was saved; going on from %s",
                what,
                ", ".join(folders[:found]),
                folders[found],
            )
        return None if found is None else folders[found]

    found: str | None = on_all_ranks(what, choose)[0]
    return found
