"""The zoo's table, as text and as a page of the documentation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .entry import Entry
from .verdict import MAX_BODY_SHARE, MAX_SHARE, Verdict

HEADER = (
    "model", "kind", "ranks", "partition", "verdict", "worst error", "ranks with parameters", "largest share",
    "requests forward", "requests backward",
)  # fmt: skip
_NUMBERS = {2, 5, 7, 8, 9}
_PAGE = f"""# Model zoo

Written by `make zoo`. Each model is tiny, has random weights, and is trained three steps in float64 over several ranks
and four microbatches; every gradient, output, buffer and final weight is compared with one process
([how](design/parity.md)). A model counts only if no rank holds more than {MAX_SHARE:.0%} of the parameters, no rank
more than {MAX_BODY_SHARE:.0%} of its layers, and requests crossed between ranks both ways. The worst error is
relative; 0 means every bit. A partition with a number is a random one, drawn by that seed.
"""


def rows(entries: Mapping[str, Entry], verdicts: Sequence[Verdict]) -> list[tuple[str, ...]]:
    """The cells of the table, without its header."""
    return [_row(entries[verdict.outcome.case.problem], verdict) for verdict in verdicts]


def _row(entry: Entry, verdict: Verdict) -> tuple[str, ...]:
    outcome = verdict.outcome
    measured = not outcome.errors and not outcome.missing
    return (
        outcome.case.problem,
        entry.kind,
        str(outcome.case.pp),
        "automatic" if outcome.case.partition is None else f"seed {outcome.case.partition}",
        verdict.word,
        f"{outcome.worst:.0e}" if measured and outcome.worst else "0" if measured else "",
        ", ".join(map(str, outcome.holding)),
        f"{outcome.share:.0%}" if measured else "",
        str(outcome.forward) if measured else "",
        str(outcome.backward) if measured else "",
    )


def text(entries: Mapping[str, Entry], verdicts: Sequence[Verdict]) -> str:
    """The table for a terminal, with what is to be said about some rows below it."""
    lines = [HEADER, *rows(entries, verdicts)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADER))]
    table = [
        "  ".join(
            cell.rjust(width) if column in _NUMBERS else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    notes = [
        "\n  ".join((f"\n{verdict.outcome.case.name}, {verdict.word}:", *verdict.why))
        for verdict in verdicts
        if verdict.why
    ]
    return "\n".join([*table, *notes])


def page(entries: Mapping[str, Entry], verdicts: Sequence[Verdict], counts: Mapping[str, int]) -> str:
    """The page ``docs/zoo.md``."""
    parts = [_PAGE, ", ".join(f"{number} {word}" for word, number in counts.items()) + "."]
    parts.append(_markdown(HEADER, rows(entries, verdicts)))
    refused = {v.outcome.case.problem: v for v in verdicts if v.word == "refused"}
    parts.append("## What is refused")
    parts.append(
        _markdown(
            ("model", "why", "what the error says"),
            [(name, entries[name].reason, verdict.why[0]) for name, verdict in refused.items()],
        )
        if refused
        else "Nothing."
    )
    parts.append("## Why each model is here")
    parts.append(_markdown(("model", "what is hard about it"), [(n, e.reason) for n, e in entries.items()]))
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _markdown(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    cells = [header, ["---"] * len(header), *lines]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) + " |" for row in cells
    )
