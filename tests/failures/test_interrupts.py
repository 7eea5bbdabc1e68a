"""Signals in a step: held back where ranks could come apart, handled at once elsewhere, and never lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from shardwright import interrupts
from shardwright.interrupts import DeferSignals, DeliverSignals, InterruptibleStep


def interrupt() -> None:
    """Ctrl-C."""
    os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture
def noticed() -> Iterator[list[str]]:
    """The handler in place; an entry for each signal that counts."""
    found: list[str] = []
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupts.install(lambda: found.append("signal"))
    yield found
    interrupts.uninstall()
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


def test_a_signal_outside_of_steps_is_handled_at_once_and_noticed(noticed: list[str]) -> None:
    with pytest.raises(KeyboardInterrupt):
        interrupt()
    assert noticed == ["signal"]


def interrupted_step(done: list[str]) -> None:
    with InterruptibleStep():
        interrupt()
        done.append("the rest of the step")


def test_a_signal_in_a_step_waits_for_its_end(noticed: list[str]) -> None:
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        interrupted_step(done)
    assert done == ["the rest of the step"]
    assert noticed == ["signal"]


def interrupted_in_a_block(done: list[str]) -> None:
    with DeliverSignals():
        interrupt()
        done.append("never")


def test_a_signal_is_let_through_where_the_step_can_be_undone(noticed: list[str]) -> None:
    done: list[str] = []
    with InterruptibleStep():
        with pytest.raises(KeyboardInterrupt):
            interrupted_in_a_block(done)
        with DeferSignals():
            done.append("undone")
    assert done == ["undone"]


def test_a_signal_before_such_a_block_keeps_it_from_beginning(noticed: list[str]) -> None:
    done: list[str] = []
    with InterruptibleStep():
        interrupt()
        with pytest.raises(KeyboardInterrupt):
            interrupted_in_a_block(done)
        interrupt()  # still held back
        done.append("undone")
        with pytest.raises(KeyboardInterrupt):
            interrupts.deliver_pending()
    assert done == ["undone"]


def test_a_second_signal_does_not_wait(noticed: list[str]) -> None:
    with InterruptibleStep():
        interrupt()
        with pytest.raises(KeyboardInterrupt):
            interrupt()
    assert noticed == ["signal"]


def test_a_handler_that_a_script_sets_later_is_taken_over_by_the_next_step(noticed: list[str]) -> None:
    heard: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    with InterruptibleStep():
        interrupt()
        assert heard == []
    assert heard == [signal.SIGINT]
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_a_handler_is_given_back(noticed: list[str]) -> None:
    assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
