"""The outcome of the random programs, at the end of what pytest prints."""

import pytest

#: Where the test of the random programs leaves its table.
SUMMARY = pytest.StashKey[str]()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print features and outcomes with their shares, and the seeds."""
    table = config.stash.get(SUMMARY, None)
    if table is not None:
        terminalreporter.section("random programs")
        terminalreporter.write_line(table)
