"""Whatever an error does when it is asked, other ranks are told of it, and the report never raises."""

from __future__ import annotations

from typing import Any

import pytest
from shardwright import failure_text
from shardwright.errors import PeerLostError, RemoteError
from shardwright.failure_text import MAX_BYTES, FailureText, sendable


class Silent(Exception):
    """Has no text."""

    def __str__(self) -> str:
        raise SystemExit

    __repr__ = __str__


class Noteless(Exception):
    """Takes no notes."""

    def add_note(self, note: str) -> None:
        raise MemoryError


class Server:
    """Keeps what it is told; refuses the first reports."""

    def __init__(self, refusals: int = 0) -> None:
        self.refusals = refusals
        self.told: list[dict[str, Any]] = []

    def fail(self, **report: Any) -> None:
        if self.refusals:
            self.refusals -= 1
            raise MemoryError
        self.told.append(report)


def caught(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as raised:
        return raised


def test_an_error_is_told_with_its_class_text_and_traceback() -> None:
    text = FailureText.of(caught(ValueError("not a number")))
    assert text[:2] == ("ValueError", "not a number")
    assert text.traceback.startswith("Traceback (most recent call last):")
    assert text.traceback.endswith("ValueError: not a number\n")


def test_a_lone_surrogate_is_told_as_its_code() -> None:
    text = FailureText.of(caught(ValueError("\ud800 and \N{GREEK SMALL LETTER ALPHA}")))
    assert text.message == "\\ud800 and \N{GREEK SMALL LETTER ALPHA}"
    text.traceback.encode()


def test_an_error_whose_text_raises_is_told_with_what_it_raised() -> None:
    text = FailureText.of(caught(Silent()))
    assert text.kind == "Silent"
    assert text.message == "(the error's text cannot be told: asking for it raised SystemExit)"


@pytest.mark.parametrize("letter", ["x", "\N{GREEK SMALL LETTER ALPHA}", "\ud800"])
def test_a_long_text_is_cut_in_its_middle_and_says_how_much(letter: str) -> None:
    text = sendable("begin" + letter * 1_000_000 + "end")
    assert len(text.encode()) <= MAX_BYTES + 100
    assert text.startswith("begin")
    assert text.endswith("end")
    assert "of 1,000,008 characters are left out here" in text


def test_a_text_of_the_largest_size_is_whole() -> None:
    assert sendable("x" * MAX_BYTES) == "x" * MAX_BYTES


def test_a_note_that_an_error_does_not_take_is_left_out() -> None:
    failure_text.add_note(Noteless(), "a note")


def test_what_another_rank_failed_with_stays_its_failure() -> None:
    server = Server(refusals=0)
    lost = PeerLostError(3, "node-1", None, None, None, "PeerLostError", "rank 3 died", "")
    failure_text.report(server, lost, module="layers.2", microbatch=1, phase="forward")
    failed = RemoteError(2, "node-2", "head", 0, "backward", "ValueError", "no\udc80", "Traceback of rank 2")
    failure_text.report(server, failed, module="layers.2", microbatch=1, phase="forward")
    assert server.told == [
        {
            "origin": (3, "node-1"),
            "module": "layers.2",
            "microbatch": 1,
            "phase": "forward",
            "kind": "PeerLostError",
            "message": "rank 3 died",
            "traceback": "",
        },
        {
            "origin": (2, "node-2"),
            "module": "head",
            "microbatch": 0,
            "phase": "backward",
            "kind": "ValueError",
            "message": "no\\udc80",
            "traceback": "Traceback of rank 2",
        },
    ]


def test_a_report_that_fails_is_made_with_words_that_were_there_before() -> None:
    server = Server(refusals=1)
    failure_text.report(server, ValueError("not a number"), microbatch=3)
    (told,) = server.told
    assert (told["kind"], told["message"]) == ("Exception", "an error that could not be told")
    assert told["microbatch"] == 3


def test_a_report_that_cannot_be_made_at_all_raises_nothing() -> None:
    failure_text.report(Server(refusals=2), ValueError("not a number"))
