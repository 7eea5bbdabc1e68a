"""What half precision does not allow is refused by name."""

from __future__ import annotations

import pytest

from tests.half_precision.running import run


@pytest.mark.parametrize("kind", ["fp16", "bf16"])
@pytest.mark.parametrize("layout", ["one rank", "pp 2"])
def test_it_is_refused_by_name(kind: str, layout: str) -> None:
    run("refusals", layout, kind)


def test_gradients_that_are_not_scaled_are_refused() -> None:
    run("unscaled_gradients_are_refused", "one rank", "fp16")
