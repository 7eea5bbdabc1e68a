"""What every test may rely on."""

import faulthandler
import signal
import sys
from collections.abc import Iterator

import pytest
import torch

from tests.covering import mark_slow

# Shells start background jobs with SIGINT ignored, which children inherit; tests need it as a terminal leaves it.
signal.signal(signal.SIGINT, signal.default_int_handler)

#: How long the process may take to end once everything is told.
_ENDING_SECONDS = 60.0


@pytest.hookimpl(tryfirst=True)  # before those that are marked slow are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Choose the cases of tests that have too many for `make test`, and let those begin that take longest.

    Otherwise one worker would be left alone with them, because they are few.
    """
    mark_slow(items)
    items.sort(key=lambda item: "trainers" not in item.path.parts)


@pytest.fixture(autouse=True)
def _default_dtype_is_given_back() -> Iterator[None]:
    """See to it that no test computes in the default dtype that another left."""
    before = torch.get_default_dtype()
    yield
    left = torch.get_default_dtype()
    torch.set_default_dtype(before)
    assert left == before, f"the test leaves {left} as the default dtype, which was {before}"


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """See to it that a thread that hangs does not keep the process: then all stacks are shown, and it fails."""
    if hasattr(config, "workerinput"):
        return  # a worker of xdist stays until the last one has nothing to do, and is ended then
    faulthandler.dump_traceback_later(_ENDING_SECONDS, exit=True, file=sys.__stderr__)
