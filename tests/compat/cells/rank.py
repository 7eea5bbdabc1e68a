"""A rank that goes through cells, a job for each: ``python -m tests.compat.cells.rank FILE``."""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import sys
import traceback
from pathlib import Path

import smdistributed.modelparallel.torch as smp
from shardwright.logs import warn_once

from tests.compat.cells.cell import REFUSED, SAID, Cell
from tests.compat.cells.script import Script
from tests.jobs.patience import HANG_SECONDS

_SAYS = ("has no effect here", "without effect here")


class _Heard(logging.Handler):
    """Keeps what the library says of what has no effect."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if any(one in text for one in _SAYS):
            self.texts.append(text)


def problem(cell: Cell, rank: int) -> str | None:
    """Run a cell; return what is wrong with what came of it."""
    heard, script, refused = _Heard(), None, None
    logger = logging.getLogger("shardwright")
    logger.addHandler(heard)
    warn_once.cache_clear()
    try:
        smp.init(dict(cell.config))
        script = Script(cell)
        script.run()
    except smp.ShardwrightError as error:
        if cell.outcome != REFUSED:
            return "".join(traceback.format_exception(error))
        refused = str(error)
    except Exception as error:
        return "".join(traceback.format_exception(error))
    finally:
        logger.removeHandler(heard)
    if cell.outcome == REFUSED:
        if refused is None:
            return "it is not refused"
        if script is not None:
            return f"it is refused after training has begun: {refused}"
        return None if cell.words in refused else f"it is refused without {cell.words!r}: {refused}"
    said = [text for text in heard.texts if cell.words in text] if cell.outcome == SAID else heard.texts
    expected = 1 if cell.outcome == SAID and rank == 0 else 0
    return None if len(said) == expected else f"it is said {len(said)} times on rank {rank}: {heard.texts}"


def main() -> int:
    """Go through the cells of a file; after one that fails the ranks may be apart, and this ends."""
    rank = int(os.environ["RANK"])
    for given in json.loads(Path(sys.argv[1]).read_text()):
        cell = Cell(**given)
        faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
        found = problem(cell, rank)
        print(json.dumps({"cell": str(cell), "problem": found}), flush=True)
        if found is not None:
            return 0
        if smp.is_initialized():
            smp.shutdown()
        faulthandler.cancel_dump_traceback_later()
    return 0


if __name__ == "__main__":
    sys.exit(main())
