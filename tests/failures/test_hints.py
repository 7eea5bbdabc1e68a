"""What errors say to do is said only where it is the reason."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import shardwright as smp
from shardwright.job import objects
from shardwright.job.ranks import WORLD
from shardwright.job.waiting import GroupCall
from shardwright.launcher import command
from shardwright.stalls.reporter import StallReporter, _EndlessWait

ADVICE = "write it outside of"


def lost(message: str) -> smp.PeerLostError:
    return smp.PeerLostError(1, "host", None, None, None, "PeerLost", message)


@pytest.mark.parametrize(
    ("error", "is_the_reason"),
    [
        (lost("has left the job"), True),
        (lost("was killed by signal 9"), False),
        (lost("does not respond"), False),
        (smp.StallError("nothing in the job has made progress for 1800.0 s; rank 0 waits"), False),
        (smp.StallError("rank 0 is in smp.barrier, and rank 1 is in step 3: ranks 0, 1 have to call it"), False),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_rank_that_is_gone_is_not_told_to_call_something(
    error: Exception, is_the_reason: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(objects, "_objects_of", fail)
    monkeypatch.setattr(objects, "send_on", lambda *_: None)
    monkeypatch.setattr(objects, "group_ranks", lambda _: [0, 1])
    smp.init({})
    try:
        with pytest.raises(type(error)) as caught:
            objects.gathered("smp.save_checkpoint", None, WORLD)
    finally:
        smp.shutdown()
    assert any(ADVICE in note for note in getattr(caught.value, "__notes__", ())) == is_the_reason


@pytest.mark.parametrize("is_in_text", [False, True])
@pytest.mark.parametrize("has_call", [False, True])
def test_a_deadlock_says_once_what_to_write_and_only_of_calls_of_a_group(is_in_text: bool, has_call: bool) -> None:
    call = GroupCall("smp.barrier", "channel", (0, 1), [0, 1])
    reporter = StallReporter.__new__(StallReporter)
    waits = [SimpleNamespace(number=7, call=call if has_call else None)]
    reporter.__dict__["_runtime"] = SimpleNamespace(waits=waits)
    text = f"deadlock: {call.advice}" if is_in_text else "deadlock"
    reporter.__dict__["_deadlock"] = _EndlessWait(7, text, time.monotonic() - 60)
    with pytest.raises(smp.StallError) as caught:
        reporter.check(7)
    told = [str(caught.value), *getattr(caught.value, "__notes__", ())]
    assert sum(part.count(ADVICE) for part in told) == int(is_in_text or has_call)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("The server socket has failed to listen: EADDRINUSE", "; leave --master-port out, or give a free port"),
        ("The client socket has timed out after 60000ms", "; is its host there?"),
        ("The IPv4 network addresses of (nowhere, 29500) cannot be resolved", "; is its host there?"),
        ("The server socket has failed to bind to 0.0.0.0:80 (errno: 13 - Permission denied)", ""),
    ],
)
def test_whether_the_host_is_there_is_asked_where_nobody_answers(
    text: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given: Any = SimpleNamespace(rdzv_endpoint="host:1")
    assert command._not_met(RuntimeError(f"{text}\nmore"), given) == 1
    assert capsys.readouterr().err == f"shardwright run: the ranks cannot meet at host:1: {text}{told}\n"
