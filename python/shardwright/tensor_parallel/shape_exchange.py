"""The exchange of signatures between the ranks of a tensor-parallel group before collectives, with a cache."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace

from shardwright.errors import ConfigError
from shardwright.tensor_parallel.agreement import Agreement, Rule, Signature, check
from shardwright.tensor_parallel.packing import Pending

#: The number of bytes of a message; a longer text needs a second message.
MESSAGE_BYTES = 512
_LENGTH_BYTES = 4
_FIRST = MESSAGE_BYTES - _LENGTH_BYTES
#: The first byte of the text of a rank whose signature is unchanged.
_AS_BEFORE = b"="
#: The maximum number of unread answers; by then the oldest have long arrived.
_MAX_UNREAD = 64

#: Starts to exchange a block of bytes, of the same size on all ranks; takes the kind under which it is counted.
Exchange = Callable[[str, bytes], Pending[list[bytes]]]


class ShapeExchange:
    """The agreements of a group.

    If shapes must be the same on all ranks, a call of a module with the same signature as its last call does not wait:
    the rank sends a message that its signature is unchanged, and reads the messages of the others when it waits for
    them the next time. A rank whose signature has changed sends all of it, and waits. If the signatures of the others
    have changed too, all ranks agree anew. Otherwise it finds that the others continued, they find that it did not,
    and all ranks raise an error.
    """

    def __init__(self, exchange: Exchange, size: int, rank: int, *, remembers: bool) -> None:
        """Create the exchange for a group of several ranks, by blocks between them.

        If it remembers, calls with an unchanged signature do not wait. Blocks must then not be exchanged by the backend
        that moves tensors of devices, because that would wait for the device.
        """
        self._exchange = exchange
        self._size, self._rank = size, rank
        self._remembers = remembers
        self._last: dict[str, Agreement] = {}
        self._unread: deque[tuple[Rule, Pending[list[bytes]]]] = deque()

    def agree(self, rule: Rule, own: Signature) -> Agreement:
        """Return the signatures of all ranks, exchanged or known from the last call; all raise if they do not match."""
        last = self._last.get(rule.operation)
        if last is None or last.signatures[self._rank] != own:
            return self.exchange(rule, own)
        self._unread.append((rule, self._exchange("as_before", _message(_as_before(rule)))))
        if len(self._unread) > _MAX_UNREAD:
            self._read_oldest()
        check(rule, last, self._size)
        return last

    def exchange(self, rule: Rule, own: Signature) -> Agreement:
        """Exchange signatures with all ranks, after reading what they sent before; raises as :meth:`agree`."""
        self.catch_up()
        text = own.encode()
        lengths, texts = _read(self._exchange("agree", _message(text))())
        if max(lengths) > _FIRST and not any(map(_goes_on, texts)):
            block = text[_FIRST:].ljust(max(lengths) - _FIRST, b"\0")
            rest = self._exchange("agree", block)()
            texts = [(begin + end)[:length] for begin, end, length in zip(texts, rest, lengths, strict=True)]
        agreement = self._agreement(rule, texts, own)
        if self._remembers and rule.site and rule.free_dim is None and not own.seed:
            self._last[rule.operation] = agreement
        return agreement

    def catch_up(self) -> None:
        """Read the messages of calls that did not wait.

        Ranks whose signature had changed in a call where others' had not raise :class:`ConfigError`, as do those.
        """
        while self._unread:
            self._read_oldest()

    def forget(self) -> None:
        """Discard known signatures, because a step has failed in which ranks may have received different messages."""
        self._last.clear()
        self._unread.clear()

    def _read_oldest(self) -> None:
        rule, pending = self._unread.popleft()
        _, texts = _read(pending())
        if any(text != _as_before(rule) for text in texts):
            self._agreement(rule, texts, self._last[rule.operation].signatures[self._rank])

    def _agreement(self, rule: Rule, texts: list[bytes], own: Signature) -> Agreement:
        """Return the signatures of all ranks; raise an error if some are unchanged and others are not."""
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
            else:  # the rest is not in the message
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
    """Return a message with the length of a text and its beginning."""
    return (len(text).to_bytes(_LENGTH_BYTES, "little") + text[:_FIRST]).ljust(MESSAGE_BYTES, b"\0")


def _read(blocks: list[bytes]) -> tuple[list[int], list[bytes]]:
    """Return the lengths of texts, and their beginnings."""
    lengths = [int.from_bytes(block[:_LENGTH_BYTES], "little") for block in blocks]
    return lengths, [block[_LENGTH_BYTES:][:length] for block, length in zip(blocks, lengths, strict=True)]
