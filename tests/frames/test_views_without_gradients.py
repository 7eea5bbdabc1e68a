"""Views that modules return of what they were given, and write to later, where no gradient is recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.frames.comparing import Part, assert_exact, data
from tests.frames.job import job_fixture

job = job_fixture(2)

VIEWS: list[Callable[[torch.Tensor], torch.Tensor]] = [lambda x: x.view(x.shape), lambda x: x, lambda x: x[:1]]


@pytest.mark.parametrize("size", [(2, 3), (40, 160)])
@pytest.mark.parametrize("is_remote", [False, True], ids=["of a tensor here", "of a result"])
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_a_write_to_a_view_of_an_argument_is_one_to_the_argument(
    mode: Callable[[], Any], view: Callable[[torch.Tensor], torch.Tensor], is_remote: bool, size: tuple[int, int]
) -> None:
    def body(root: Part, x: torch.Tensor) -> Any:
        x = x * root.weight.sum()
        with mode():
            given = root.third(x) if is_remote else x * 2
            root.child(given)
            seen = root.child(given)
            root.other(seen)
            factor = float(given.detach().sum()) + float(seen.detach().sum())
        return x * factor

    def writing(m: Part, x: torch.Tensor) -> torch.Tensor:
        x.mul_(3.0)
        return x.sum()

    parts = {
        "third": Part(lambda m, x: x * m.weight.sum()),
        "child": Part(lambda m, x: view(x)),
        "other": Part(writing),
    }
    assert_exact(Part(body, **parts), data(*size))
