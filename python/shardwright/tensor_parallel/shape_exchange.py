"""What the ranks of a tensor-parallel group tell each other before collectives, and know from earlier calls."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace

from shardwright.errors import ConfigError
from shardwright.tensor_parallel.agreement import Agreement, Rule, Signature, check
from shardwright.tensor_parallel.pending import Pending

#: What a rank tells goes in one message of so many bytes; a longer text takes a second one.
MESSAGE_BYTES = 512
_LENGTH_BYTES = 4
_FIRST = MESSAGE_BYTES - _LENGTH_BYTES
#: Begins the text of a rank that goes on with what it brought before.
_AS_BEFORE = b"="
#: So many answers may be left unread; older ones have come long ago.
_MAX_UNREAD = 64

#: Begins to give all ranks a block of bytes of one size, and to get theirs; says as what it is counted.
Exchange = Callable[[str, bytes], Pending[list[bytes]]]


class ShapeExchange:
    """The agreements of a group.

    Where shapes have to be the same on all ranks, a call of a module that brings what its last one did waits for
    nobody: a rank tells the others that it goes on as before, and reads what they told later, when it waits for them
    the next time. A rank whose tensors have changed tells all of it, and waits. If the others have changed alike, all
    agree anew; otherwise it finds that they went on, they find that it did not, and all refuse the call.
    """

    def __init__(self, exchange: Exchange, size: int, rank: int, *, remembers: bool) -> None:
        """For a group of several ranks.

        Args:
            exchange: Carries blocks between them.
            size: Their number.
            rank: The calling one.
            remembers: Whether calls go on as before. What carries blocks then must not be what carries tensors to
                devices, which would be waited for.
        """
        self._exchange = exchange
        self._size, self._rank = size, rank
        self._remembers = remembers
        self._last: dict[str, Agreement] = {}
        self._unread: deque[tuple[Rule, Pending[list[bytes]]]] = deque()

    def agree(self, rule: Rule, own: Signature) -> Agreement:
        """What all ranks bring: exchanged now, or known from the last call.

        Raises:
            ConfigError: It does not fit together; all ranks raise it.
        """
        last = self._last.get(rule.operation)
        if last is None or last.signatures[self._rank] != own:
            return self.exchange(rule, own)
        self._unread.append((rule, self._exchange("as_before", _message(_as_before(rule)))))
        if len(self._unread) > _MAX_UNREAD:
            self._read_oldest()
        check(rule, last, self._size)
        return last

    def exchange(self, rule: Rule, own: Signature) -> Agreement:
        """Exchange signatures with all ranks, after reading what they sent for earlier calls.

        Raises:
            ConfigError: As for :meth:`agree`.
        """
        self.catch_up()
        text = own.encode()
        lengths, texts = _read(self._exchange("agree", _message(text)).result())
        if max(lengths) > _FIRST and not any(map(_goes_on, texts)):
            block = text[_FIRST:].ljust(max(lengths) - _FIRST, b"\0")
            rest = self._exchange("agree", block).result()
            texts = [(begin + end)[:length] for begin, end, length in zip(texts, rest, lengths, strict=True)]
        agreement = self._agreement(rule, texts, own)
        if self._remembers and rule.site and rule.free_dim is None and not own.seed:
            self._last[rule.operation] = agreement
        return agreement

    def catch_up(self) -> None:
        """Read what ranks told that was not waited for.

        Raises:
            ConfigError: A rank did not go on as before where this one did; it raises the same.
        """
        while self._unread:
            self._read_oldest()

    def forget(self) -> None:
        """Ask anew for everything: a step has failed, in which ranks may have been told different things."""
        self._last.clear()
        self._unread.clear()

    def _read_oldest(self) -> None:
        rule, pending = self._unread.popleft()
        _, texts = _read(pending.result())
        if any(text != _as_before(rule) for text in texts):
            self._agreement(rule, texts, self._last[rule.operation].signatures[self._rank])

    def _agreement(self, rule: Rule, texts: list[bytes], own: Signature) -> Agreement:
        """What all ranks bring, where none goes on as before and others do not."""
        last, brought = self._last.get(rule.operation), []
        for rank, text in enumerate(texts):
            if text == _as_before(rule) and last is not None:
                brought.append(last.signatures[rank])
            elif _goes_on(text):
                brought.append(replace(own, operation=text[1:].decode(errors="ignore")))
            elif rank == self._rank:
                brought.append(own)
            elif len(text) < _FIRST or not any(map(_goes_on, texts)):
                brought.append(Signature.decode(text))
            else:  # the rest of it is not told
                brought.append(replace(own, shapes=()))
        agreement = Agreement(tuple(brought))
        check(rule, agreement, self._size)
        if any(map(_goes_on, texts)):
            others = [rank for rank, text in enumerate(texts) if not _goes_on(text)]
            raise ConfigError(
                f"{rule.operation}: tp ranks {others} bring something else than in the last call, and the others do "
                "not; a change has to be one of all tp ranks"
            )
        return agreement


def _as_before(rule: Rule) -> bytes:
    return (_AS_BEFORE + rule.operation.encode())[:_FIRST]


def _goes_on(text: bytes) -> bool:
    return text.startswith(_AS_BEFORE)


def _message(text: bytes) -> bytes:
    """A text's length and its beginning."""
    return (len(text).to_bytes(_LENGTH_BYTES, "little") + text[:_FIRST]).ljust(MESSAGE_BYTES, b"\0")


def _read(blocks: list[bytes]) -> tuple[list[int], list[bytes]]:
    """The lengths of texts, and their beginnings."""
    lengths = [int.from_bytes(block[:_LENGTH_BYTES], "little") for block in blocks]
    return lengths, [block[_LENGTH_BYTES:][:length] for block, length in zip(blocks, lengths, strict=True)]
