"""What a rank knows about an error, added to it before other ranks are told."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from shardwright.job.runtime import Runtime


class ErrorExplainer(Protocol):
    """Adds notes to errors; found by this type in a runtime."""

    def explain(self, error: BaseException) -> None:
        """Add a note to an error, if there is something to say; never raises."""


def explain(runtime: Runtime, error: BaseException) -> None:
    """Let the rank's explainer add a note to an error; never raises.

    Args:
        runtime: The rank.
        error: The error.
    """
    explainer = runtime.find(ErrorExplainer)  # type: ignore[type-abstract]
    if explainer is not None:
        explainer.explain(error)
