"""Random tokens of a part of a batch, drawn with the numbers that this part has of the whole batch's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from shardwright.patches import original_of


@dataclass
class Rows:
    """The sequences of a microbatch.

    Attributes:
        first: The number of the first in the batch.
        count: How many there are.
        total: How many the batch has.
        draws: How often tokens were drawn for them.
    """

    first: int
    count: int
    total: int
    draws: int = 0


_rows: ContextVar[Rows | None] = ContextVar("shardwright_rows", default=None)


@contextmanager
def drawing(rows: Rows) -> Iterator[None]:
    """Draw tokens in the block as one process does for the whole batch, of which these are some sequences."""
    token = _rows.set(rows)
    try:
        yield
    finally:
        _rows.reset(token)


def multinomial(input: torch.Tensor, num_samples: int, *args: Any, **kwargs: Any) -> Any:
    """Replace ``torch.multinomial``, which draws as many numbers for a row whatever its probabilities are."""
    rows = _rows.get()
    plain = original_of(multinomial)
    if rows is None or kwargs.get("generator") is not None or input.dim() != 2 or input.shape[0] % rows.count:
        return plain(input, num_samples, *args, **kwargs)
    rows.draws += 1
    each = input.shape[0] // rows.count  # sequences that begin alike
    whole = input.new_ones(rows.total * each, input.shape[1])
    own = slice(rows.first * each, (rows.first + rows.count) * each)
    whole[own] = input
    return plain(whole, num_samples, *args, **kwargs)[own]
