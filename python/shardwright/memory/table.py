"""Shows accounts of memory to people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from shardwright.memory.account import CATEGORIES, RankAccount
from shardwright.tables import load_rich

if TYPE_CHECKING:
    from rich.console import Console

_MAX_ADVICE = 4
_LOG_WIDTH = 120
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def announce(accounts: Sequence[RankAccount]) -> None:
    """Print the accounts of all ranks to the standard error stream."""
    load_rich()
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        console.width = _LOG_WIDTH
    render(accounts, console)


def render(accounts: Sequence[RankAccount], console: Console) -> None:
    """Print accounts as a table: by rank and category, what was predicted, and what was measured.

    Args:
        accounts: The account of each rank.
        console: The console to print to.
    """
    from rich.table import Table

    table = Table(title="Memory of each rank", title_justify="left")
    table.add_column("rank", justify="right")
    table.add_column("")
    for category in CATEGORIES:
        table.add_column(category.replace("_", " "), justify="right")
    table.add_column("peak of the process", justify="right")
    for account in accounts:
        limit = "" if account.limit is None else f" of {amount(account.limit)}"
        for name, categories, peak in (
            ("predicted", account.predicted, ""),
            ("measured", account.measured, amount(account.peak) + limit),
        ):
            rank = str(account.rank) if name == "predicted" else ""
            table.add_row(rank, name, *(amount(categories[category]) for category in CATEGORIES), peak)
    console.print(table)


def account_text(account: RankAccount) -> str:
    """Return the account of one rank as text, with the settings that would save memory.

    Args:
        account: The account.
    """
    rows = [
        f"  {category.replace('_', ' '):<16}{amount(account.predicted[category]):>12}"
        f"{amount(account.measured[category]):>12}"
        for category in CATEGORIES
    ]
    limit = "" if account.limit is None else f", and may use {amount(account.limit)}"
    lines = [
        f"Memory of rank {account.rank} on host {account.host!r} ({account.device}):",
        f"  {'':<16}{'predicted':>12}{'measured':>12}",
        *rows,
        f"  The process has {amount(account.resident)} of host memory, had {amount(account.peak)} at most{limit}.",
    ]
    if account.device_memory is not None:
        device = {name: amount(nbytes) for name, nbytes in account.device_memory.items()}
        lines.append(
            f"  PyTorch has allocated {device['allocated']} on the device, had {device['peak']} at most, and reserves "
            f"{device['reserved']}; the buffer for transfers between ranks has {device['transfers']} more."
        )
    if account.locked:
        lines.append(f"  Of host memory, {amount(account.locked)} are locked for the device.")
    if account.offloaded:
        lines.append(f"  {amount(account.offloaded)} of activations were offloaded at most, and are not among these.")
    if account.offloaded_optimizer_state:
        lines.append(f"  {amount(account.offloaded_optimizer_state)} of optimizer state are offloaded.")
    if account.advice:
        lines.append("Settings that would save memory on this rank, with their estimated saving:")
        lines += [f"  {setting}: {amount(saves)}; {price}" for setting, saves, price in account.advice[:_MAX_ADVICE]]
    return "\n".join(lines)


def amount(nbytes: int | None) -> str:
    """Return a number of bytes as text, such as ``1.5 GiB``; ``unknown`` for None.

    Args:
        nbytes: The number of bytes.
    """
    if nbytes is None:
        return "unknown"
    power = min((max(nbytes, 1).bit_length() - 1) // 10, len(_UNITS) - 1)
    number = nbytes / (1 << (10 * power))
    return f"{number:.0f} {_UNITS[power]}" if power == 0 or number >= 100 else f"{number:.1f} {_UNITS[power]}"
