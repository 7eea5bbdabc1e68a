"""Shows a decision to people."""

from __future__ import annotations

import logging
import math
import re
from typing import TYPE_CHECKING, Any

from shardwright import logs
from shardwright.partition.decision import Decision, JoinReason
from shardwright.tables import error_console

if TYPE_CHECKING:
    from rich.console import Console

_LOGGER = logging.getLogger("shardwright")
_MAX_JOINS = 12
#: The path of a module with the name of an attribute.
_PATH = re.compile(r"(?:\w+\.)+(\w+)")
#: Logged once when a model is divided without a trace.
_NOT_TRACED = (
    "skip_tracing: modules that share lists, dicts, other objects, global variables, or tensors that are no "
    "parameters and buffers are not found, and each rank has its own of them; nor are buffers that a divided "
    "module changes, which microbatches would overwrite. Leave it off unless the model has none"
)
_COMPUTATION = {"measured_time": "measured time", "number_of_modules": "number of modules"}


def announce(decision: Decision) -> None:
    """Print a decision to the standard error stream, and log it."""
    render(decision, error_console())
    _LOGGER.info("Partition assignments: %s", assignments(decision))


def warn_not_traced() -> None:
    """Log once what a decision without a trace does not know."""
    logs.warn_once(_NOT_TRACED)


def render(decision: Decision, console: Console) -> None:
    """Print a decision as a table: what each rank holds, and where the modules are."""
    from rich.table import Table

    name = decision.classes.get("", "the model")
    table = Table(
        title=f"Partition assignments: {name} over {decision.num_devices} pipeline ranks", title_justify="left"
    )
    for heading in ("pp_rank", "cost", "parameters", "parameter bytes", "buffer bytes"):
        table.add_column(heading, justify="right")
    table.add_column("modules", overflow="fold")
    costs = {load["pp_rank"]: load["cost"] for load in decision.report.get("devices", ())}
    placed = assignments(decision)
    for rank in range(decision.num_devices):
        numel = sum(math.prod(row.shape) for row in decision.parameters if rank in row.ranks)
        table.add_row(
            str(rank),
            f"{costs[rank]:.1%}" if rank in costs else "",
            f"{numel:,}",
            f"{decision.parameter_bytes(rank):,}",
            f"{decision.buffer_bytes(rank):,}",
            ", ".join(path or name for path in _runs(placed.get(rank, []))) or "none",
        )
    console.print(table)
    for line in _notes(decision):
        console.print(line, highlight=False)


def assignments(decision: Decision) -> dict[int, list[str]]:
    """Return, for each pp_rank, its topmost modules. Submodules are on the same rank unless they are listed."""
    placed: dict[int, list[str]] = {rank: [] for rank in range(decision.num_devices)}
    for path, rank in decision.modules.items():
        if path in decision.follows:
            continue
        parent = path.rpartition(".")[0]
        if not path or decision.modules.get(parent) != rank:
            placed[rank].append(path)
    return placed


def _runs(paths: list[str]) -> list[str]:
    """Return the paths with consecutive numbered siblings merged: ``h.2``, ``h.3`` become ``h.2-3``."""
    runs: list[tuple[str, int | None, int]] = []
    for path in paths:
        parent, _, name = path.rpartition(".")
        if not name.isdecimal():
            runs.append((path, None, 0))
        elif runs and runs[-1][1] is not None and runs[-1][0] == parent and runs[-1][2] + 1 == int(name):
            runs[-1] = (parent, runs[-1][1], int(name))
        else:
            runs.append((parent, int(name), int(name)))
    shown = []
    for path, first, last in runs:
        numbers = f"{first}-{last}" if first != last else str(first)
        shown.append(path if first is None else f"{path}.{numbers}" if path else numbers)
    return shown


def _notes(decision: Decision) -> list[str]:
    report: dict[str, Any] = dict(decision.report)
    notes = []
    crossings = report.get("boundary_crossings_per_microbatch")
    if crossings is not None:
        notes.append(f"requests to other ranks per microbatch: {crossings} forward, as many backward")
    if report.get("auto"):
        computation = str(report.get("computation", ""))
        notes.append(
            f"placed by cost: memory_weight {report.get('alpha')}, computation by "
            f"{_COMPUTATION.get(computation, computation)}"
        )
    refinement = report.get("refinement")
    if refinement is not None:
        before, after = (refinement[key] * 1000 for key in ("seconds_before", "seconds_after"))
        moved = refinement["moved_nodes"]
        notes.append(
            f"refined by measured times: {moved} moved, the simulated step takes {after:.1f} ms instead of {before:.1f}"
            if moved
            else f"refined by measured times: nothing moved, the simulated step takes {before:.1f} ms"
        )
    if decision.one_at_a_time:
        notes.append(
            "microbatches run one after another, since another one could overwrite what modules keep meanwhile: "
            + "; ".join(decision.one_at_a_time[:_MAX_JOINS])
        )
    unused = report.get("unused_devices") or []
    if unused:
        notes.append(f"without a module, since the model has too few parts: pp_rank {', '.join(map(str, unused))}")
    return notes + _joins(decision)


def _joins(decision: Decision) -> list[str]:
    """Say why modules are kept together, once for all pairs of the same classes and the same reason."""
    groups: dict[tuple[str, ...], list[JoinReason]] = {}
    for join in decision.joins:
        first, second = (decision.classes.get(path, "") for path in join.modules)
        # Paths in a reason differ from layer to layer in all but the name of the attribute.
        groups.setdefault((first, second, _PATH.sub(r"\1", join.reason)), []).append(join)
    lines = []
    for (first, second, _), joins in list(groups.items())[:_MAX_JOINS]:
        example, others = joins[0], len(joins) - 1
        line = (
            f"kept together: {_shown(example.modules[0])} and {_shown(example.modules[1])}: the first {example.reason}"
        )
        more = f"; so are {others} more pairs of {first} and {second}, for the same reason" if others else ""
        lines.append(line + more)
    left_out = sum(len(joins) for joins in list(groups.values())[_MAX_JOINS:])
    return lines + [f"kept together: {left_out} more pairs of modules"] * (left_out > 0)


def _shown(path: str) -> str:
    return path or "the model itself"
