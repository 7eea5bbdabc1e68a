"""Outputs that ``transformers`` collects: hidden states, attentions, router logits.

Since version 5 it collects them by forward hooks and a context variable, which does not reach another rank. So a
request carries the collector's keys and how much each has collected; the executing rank collects into lists of its
own, padded to those lengths, because the hooks treat the first entry in a special way; the response brings what was
added.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import nn

Collected = dict[str, list[Any]]


def _variable() -> Any:
    module = sys.modules.get("transformers.utils.output_capturing")
    return None if module is None else module._active_collector


def collects(hook: Callable[..., Any]) -> bool:
    """Whether a hook is one of those by which ``transformers`` collects."""
    return (getattr(hook, "__module__", None) or "").partition(".")[0] == "transformers"


def outgoing() -> dict[str, Any] | None:
    """What a request carries: the length of each list and the other entries; None when nothing is collected."""
    variable = _variable()
    active = None if variable is None else variable.get()
    if not active:
        return None
    return {key: len(value) if isinstance(value, list) else (value,) for key, value in active.items()}


_NOTHING: AbstractContextManager[Callable[[], None]] = nullcontext(lambda: None)


def executing(wanted: dict[str, Any] | None) -> AbstractContextManager[Callable[[], Collected | None]]:
    """Collect around the execution of a request; the function given tells what was added."""
    return _NOTHING if wanted is None else _executing(wanted)


@contextmanager
def _executing(wanted: dict[str, Any]) -> Iterator[Callable[[], Collected]]:
    variable = _variable()
    if variable is None:
        import transformers.utils.output_capturing  # noqa: F401

        variable = _variable()
    lengths = {key: value for key, value in wanted.items() if isinstance(value, int)}
    own: dict[str, Any] = {key: [None] * value if isinstance(value, int) else value[0] for key, value in wanted.items()}
    token = variable.set(own)
    try:
        yield lambda: {key: own[key][length:] for key, length in lengths.items()}
    finally:
        variable.reset(token)


def incoming(additions: Collected) -> None:
    """Take over what the executing rank has collected."""
    active = _variable().get()
    for key, values in additions.items():
        active[key].extend(values)


def install(module: nn.Module) -> None:
    """Install the hooks that collect, which ``transformers`` would do on the rank of the outermost model only."""
    capturing = sys.modules.get("transformers.utils.output_capturing")
    models = sys.modules.get("transformers.modeling_utils")
    if capturing is None or models is None:
        return
    for part in module.modules():
        if isinstance(part, models.PreTrainedModel):
            capturing.maybe_install_capturing_hooks(part)
