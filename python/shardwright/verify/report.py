"""The result of a verification, as a value and as a table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardwright.tables import load_rich

if TYPE_CHECKING:
    from rich.table import Table

_SHOWN = 12
_WIDTH = 120


def first_of(names: Sequence[str]) -> str:
    """Return the first few of some names, and the number of the others."""
    return ", ".join(map(repr, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One tensor, or one property, that was compared.

    Attributes:
        kind: ``"loss"``, ``"output"``, ``"buffer"``, ``"gradient"`` or ``"tie"``.
        name: Its name: a parameter, a buffer, or a position in the step function's result.
        rank: The global rank that has it.
        error: The largest difference relative to the largest element in one process; infinite if they cannot be
            compared.
        detail: Why the two cannot be compared; empty otherwise.
    """

    kind: str
    name: str
    rank: int
    error: float
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class Departure:
    """The first module whose result differs from that in one process.

    Attributes:
        module: Its path in the model; empty for the whole model.
        phase: ``"forward"``, or ``"backward"`` if all outputs agree.
        what: A description of what differs.
        error: The difference relative to the size in one process.
        replica: The data-parallel rank.
        microbatch: The microbatch; None for the sum over all of them.
        call: The index of the module's call in the microbatch, counted from 0.
        rank: The global rank that ran the module; None if it is not known.
    """

    module: str
    phase: str
    what: str
    error: float
    replica: int = 0
    microbatch: int | None = None
    call: int = 0
    rank: int | None = None

    def __str__(self) -> str:
        """Return a description in one sentence."""
        where = f"replica {self.replica}"
        if self.microbatch is not None:
            where += f", microbatch {self.microbatch}, call {self.call}"
        if self.rank is not None:
            where += f", rank {self.rank}"
        return f"{self.phase} of module {self.module!r} ({where}): {self.what}; by {self.error:.1e}"


@dataclass(frozen=True, kw_only=True)
class Report:
    """The result of :func:`shardwright.verify`, the same on every rank.

    Attributes:
        rows: All comparisons, worst first.
        first_departure: The first module that departs, in execution order; None if none does.
        notes: Further information that is not a failure.
        dtype: The coarsest dtype that the step computed with.
        tolerance: The largest error allowed.
        num_module_calls: The number of compared module calls.
        requests: Forward and backward requests that crossed ranks in the verified step.
        holding: The global ranks that hold parameters.
    """

    rows: tuple[Row, ...]
    first_departure: Departure | None
    notes: tuple[str, ...]
    dtype: str
    tolerance: float
    num_module_calls: int
    requests: tuple[int, int]
    holding: tuple[int, ...]

    @property
    def exact(self) -> bool:
        """Whether nothing departs by more than the tolerance."""
        return self.first_departure is None and not self.failed

    @property
    def failed(self) -> tuple[Row, ...]:
        """The rows above the tolerance."""
        return tuple(row for row in self.rows if not row.error <= self.tolerance)

    @property
    def worst(self) -> float:
        """The largest error. Rows are sorted, worst first."""
        return self.rows[0].error if self.rows else 0.0

    def __str__(self) -> str:
        """Return the table, the first departure and the notes."""
        load_rich()
        from rich.console import Console

        console = Console(width=_WIDTH, no_color=True, force_terminal=False)
        with console.capture() as capture:
            console.print(self.__rich__())
            console.print(self.conclusion(), markup=False, highlight=False)
            for note in self.notes:
                console.print(f"note: {note}", markup=False, highlight=False)
        return capture.get().rstrip()

    def __rich__(self) -> Table:
        """Return a table with one line for each kind, and the worst rows of each."""
        load_rich()
        from rich import box
        from rich.table import Table

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for header in ("compared", "tensors", "worst error", "where", "rank", ""):
            table.add_column(header, justify="right" if header in ("tensors", "worst error", "rank") else "left")
        for kind in ("loss", "output", "buffer", "gradient", "tie"):
            rows = [row for row in self.rows if row.kind == kind]
            if not rows:
                continue
            bad = [row for row in rows if not row.error <= self.tolerance]
            for index, row in enumerate(bad[:_SHOWN] or rows[:1]):
                label, count = (kind, str(len(rows))) if index == 0 else ("", "")
                verdict = ("DEPARTS " + row.detail).strip() if bad else "exact"
                table.add_row(label, count, f"{row.error:.1e}", row.name, str(row.rank), verdict)
            if len(bad) > _SHOWN:
                table.add_row("", "", "", f"and {len(bad) - _SHOWN} more", "", "")
        return table

    def conclusion(self) -> str:
        """Return the conclusion in one or two sentences."""
        checked = (
            f"{self.num_module_calls} module calls compared; {self.requests[0]} forward and {self.requests[1]} "
            f"backward requests crossed ranks; parameters on ranks {', '.join(map(str, self.holding))}; tolerance "
            f"{self.tolerance:.0e} ({self.dtype})"
        )
        if self.exact:
            return f"exact: the distributed step equals one process. {checked}"
        if self.first_departure is None:
            return f"NOT exact, but no module departs: look at the step function's own code. {checked}"
        return f"NOT exact. First departure: {self.first_departure}. {checked}"

    def summary(self) -> dict[str, Any]:
        """Return the outcome as a few plain values, for tools."""
        departure = self.first_departure
        return {
            "exact": self.exact,
            "worst": self.worst if math.isfinite(self.worst) else "infinite",
            "tolerance": self.tolerance,
            "dtype": self.dtype,
            "first_departure": None if departure is None else departure.module,
            "phase": None if departure is None else departure.phase,
            "failed": len(self.failed),
            "compared": len(self.rows),
            "module_calls": self.num_module_calls,
            "requests": list(self.requests),
            "ranks_with_parameters": list(self.holding),
            "notes": list(self.notes),
        }
