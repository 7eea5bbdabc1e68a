"""Calls that need the values of the whole model, and what to write instead for a divided model."""

from __future__ import annotations

import sys
from types import FrameType

_SAVE = (
    "call model.save_pretrained(folder) of the smp.DistributedModel on every rank; or gather them with state = "
    "model.state_dict() on every rank of the pipeline, and on one of them call model.module.save_pretrained(folder, "
    "state_dict=state)"
)
_MERGE = (
    "build the model in a process that does not divide it, load what model.state_dict() gave on every rank of the "
    "pipeline into it, and merge there"
)
_COPY = (
    "save model.state_dict(), which every rank of the pipeline calls, or model.local_state_dict(), and load it into a "
    "model that is built anew"
)

#: What to write instead, by the name of the function.
HINTS = {
    "save_pretrained": _SAVE,
    "push_to_hub": _SAVE,
    "merge_and_unload": _MERGE,
    "pickling": _COPY,
}
#: The functions that write to one weight after another, so that they must fail before the first write.
MERGES = tuple(name for name, hint in HINTS.items() if hint is _MERGE)


def whole_call(operation: str) -> str | None:
    """Return the function of `HINTS` that runs, or is the operation itself; None for any other use of a weight."""
    if operation in HINTS:
        return operation
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in HINTS:
            return frame.f_code.co_name
        frame = frame.f_back
    return None
