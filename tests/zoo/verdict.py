"""What came of an entry: exact, refused, wrong or hung."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tests.parity.table import Outcome

from .entry import Entry

#: No rank may hold more of the parameters' bytes.
MAX_SHARE = 0.75
#: A cut lies inside the body if no rank holds more of the body's bytes.
MAX_BODY_SHARE = 0.9
#: The most refusals that the zoo may have, and the fewest entries.
MAX_REFUSED = 5
MIN_MODELS = 65


@dataclass(frozen=True)
class Verdict:
    """What came of an entry on one grid.

    Attributes:
        word: ``"exact"``, ``"refused"``, ``"wrong"`` or ``"hung"``.
        outcome: What was measured.
        why: What was refused and why, or what is wrong.
    """

    word: str
    outcome: Outcome
    why: tuple[str, ...] = ()


def verdict_on(entry: Entry, outcome: Outcome) -> Verdict:
    """Judge an outcome by what its entry promises."""
    if outcome.missing:
        return Verdict("hung", outcome, tuple(outcome.failures))
    if entry.refused is not None:
        return _refusal(entry.refused, outcome)
    why = list(outcome.failures)
    if not why and outcome.share > MAX_SHARE:
        why.append(f"one rank holds {outcome.share:.0%} of the parameters; allowed is {MAX_SHARE:.0%}")
    if not why and outcome.body_share > MAX_BODY_SHARE:
        why.append(f"one rank holds {outcome.body_share:.0%} of the body; allowed is {MAX_BODY_SHARE:.0%}")
    return Verdict("wrong" if why else "exact", outcome, tuple(why))


def _refusal(text: str, outcome: Outcome) -> Verdict:
    if not outcome.errors:
        return Verdict("wrong", outcome, ("it was to be refused, and was not",))
    if not outcome.typed:
        return Verdict("wrong", outcome, (*outcome.failures, "not every rank raised one of the library's errors"))
    silent = [rank for rank, error in outcome.errors.items() if text not in error]
    if silent:
        return Verdict("wrong", outcome, (*outcome.failures, f"the error of rank {silent[0]} does not say {text!r}"))
    return Verdict("refused", outcome, (outcome.errors[0],))


def summary(verdicts: Iterable[Verdict]) -> dict[str, int]:
    """How many entries are exact, refused, wrong and hung; an entry counts by its worst verdict."""
    order = ("exact", "refused", "wrong", "hung")
    worst: dict[str, str] = {}
    for verdict in verdicts:
        name = verdict.outcome.case.problem
        worst[name] = max(worst.get(name, "exact"), verdict.word, key=order.index)
    words = list(worst.values())
    return {"models": len(words), **{word: words.count(word) for word in order}}


def passes(counts: dict[str, int]) -> bool:
    """Whether the whole zoo is as it must be."""
    return (
        counts["models"] >= MIN_MODELS
        and not counts["wrong"]
        and not counts["hung"]
        and counts["refused"] <= MAX_REFUSED
    )
