"""What is done to a door from outside. Each visit is one attack; none may be let in.

Run by itself in another network namespace: ``python -m tests.attack.strangers ADDRESS PORT SEED COUNT [SECRET]``, which
prints how many visits there were and how many were let in.
"""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator

from .protocol import (
    ANSWER_BYTES,
    CHALLENGE_BYTES,
    FINE,
    HELLO_BYTES,
    MAGIC,
    MESH,
    REGISTER,
    VERDICT_BYTES,
    VERSION,
    WAIT,
    WRONG_PROOF,
    Heard,
    hello,
    read,
    visit,
)

Address = tuple[str, int]
GREETING_SECONDS = 3.0
#: The beginnings of other protocols that come by a port now and then, those of this library's back ends among them.
FOREIGN = (
    b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"SSH-2.0-OpenSSH_9.2\r\n",
    struct.pack("<QBI", 0xCAFEBABE12345678, 10, 0),  # a message of UCX over TCP
    struct.pack("<BI", 0, 0x3C85F7CE),  # torch's store
    b"SHWD\x06\x00\x00\x00" + b"\xff" * 16,  # a frame of this library, before any handshake
    b"\x30\x00" + b"\x42" * 48,  # a record of the Noise protocol
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
)


def said(address: Address, payload: bytes, *, ends: bool = True) -> bytes:
    """Say something and read until the door hangs up; all that it said."""
    with socket.create_connection(address, WAIT) as stream:
        with contextlib.suppress(OSError):
            stream.sendall(payload)
            if ends:
                stream.shutdown(socket.SHUT_WR)
        return read(stream, 4096)


def is_let_in(spoken: bytes) -> bool:
    """Whether a door took its visitor for a rank: a challenge, and a verdict that is fine."""
    is_challenge = (
        len(spoken) > CHALLENGE_BYTES and spoken[10] == FINE
    )  # and no word of another version, which is longer
    return is_challenge and spoken[CHALLENGE_BYTES] == FINE


def greets(address: Address) -> bool:
    """Whether this is a door of the library, which answers at once."""
    with socket.create_connection(address, GREETING_SECONDS) as stream:
        stream.sendall(hello())
        return len(read(stream, CHALLENGE_BYTES)) == CHALLENGE_BYTES


def random_bytes(address: Address, draw: random.Random) -> bool:
    return is_let_in(said(address, draw.randbytes(draw.choice((1, 7, 8, 51, 52, 53, 85, 200, 4096, 65536)))))


def other_protocols(address: Address, draw: random.Random) -> bool:
    return is_let_in(said(address, draw.choice(FOREIGN) + draw.randbytes(draw.randrange(64))))


def magic_and_garbage(address: Address, draw: random.Random) -> bool:
    return is_let_in(said(address, MAGIC + draw.randbytes(draw.randrange(400))))


def false_proofs(address: Address, draw: random.Random) -> bool:
    version = draw.choice((VERSION, VERSION, VERSION, 0, 1, 2, 65535))
    purpose, encrypt = draw.choice((REGISTER, MESH, 7, 255)), draw.choice((0, 1, 2, 255))
    rank, world = draw.choice((0, 1, 2, 3, 4, 2**31, 2**32 - 1)), draw.choice((0, 1, 2, 4, 2**32 - 1))
    first = hello(rank, world, purpose, version, encrypt=encrypt, nonce=draw.randbytes(32))
    proof = draw.randbytes(ANSWER_BYTES + 48)
    return is_let_in(said(address, first + proof))


def reflected_words(address: Address, draw: random.Random) -> bool:
    """The door's own bytes are given back to it, and its refusals are taken for what they are."""
    first = hello(nonce=draw.randbytes(32))
    with socket.create_connection(address, WAIT) as stream:
        stream.sendall(first)
        challenge = read(stream, CHALLENGE_BYTES)
        stream.sendall(challenge[-ANSWER_BYTES:])
        verdict = read(stream, VERDICT_BYTES)
    return verdict[:1] == bytes([FINE])


def words_to_guess_by(address: Address, draw: random.Random) -> bool:
    """Whether a door gives who has proved nothing anything that depends on the secret, which could then be guessed."""
    first, nonces = hello(nonce=draw.randbytes(32)), set()
    for _ in range(2):
        spoken = said(address, first + draw.randbytes(ANSWER_BYTES))
        challenge, verdict = spoken[:CHALLENGE_BYTES], spoken[CHALLENGE_BYTES:]
        nonces.add(challenge[16:])
        if challenge[:8] != MAGIC or verdict != bytes([WRONG_PROOF]) + bytes(VERDICT_BYTES - 1):
            return True
    return len(nonces) < 2


def cut_short(address: Address, draw: random.Random) -> bool:
    first = hello(nonce=draw.randbytes(32))
    return is_let_in(said(address, first[: draw.randrange(HELLO_BYTES)]))


def reset(address: Address, draw: random.Random) -> bool:
    """Ends the connection in the middle, with an error at the other side."""
    stream = socket.create_connection(address, WAIT)
    with contextlib.suppress(OSError):
        stream.sendall(hello()[: draw.randrange(HELLO_BYTES + 1)])
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    stream.close()
    return False


KINDS: dict[str, Callable[[Address, random.Random], bool]] = {
    "random bytes": random_bytes,
    "other protocols": other_protocols,
    "the magic, then garbage": magic_and_garbage,
    "false proofs": false_proofs,
    "the door's own words": reflected_words,
    "words to guess by": words_to_guess_by,
    "handshakes cut short": cut_short,
    "connections reset": reset,
}


def replays(address: Address, heard: Heard, count: int) -> Iterator[bool]:
    """What a rank once said to a door, said again."""
    for _ in range(count):
        yield is_let_in(said(address, heard.said, ends=False))


def late_members(address: Address, secret: bytes, count: int, draw: random.Random) -> Iterator[bool]:
    """Who holds the secret and comes when all ranks are there already, as any rank and for anything."""
    for _ in range(count):
        rank, world = draw.choice((0, 1, 2, 3, 77, 2**32 - 1)), draw.choice((1, 2, 4, 2**32 - 1))
        heard = visit(address, secret, hello(rank, world, draw.choice((REGISTER, MESH))))
        yield heard.verdict == bytes([FINE])


def idle_and_slow(address: Address, count: int, seconds: float) -> Iterator[bool]:
    """Connections that say nothing, and others that say a hello a byte at a time; all are hung up on."""
    with contextlib.ExitStack() as stack:
        streams = [stack.enter_context(socket.create_connection(address, WAIT)) for _ in range(count)]
        first = hello()
        began = time.monotonic()
        for place in range(HELLO_BYTES - 1):
            for stream in streams[::2]:
                with contextlib.suppress(OSError):
                    stream.send(first[place : place + 1])
            time.sleep(max(0.0, began + seconds * place / HELLO_BYTES - time.monotonic()))
        for stream in streams:
            yield read(stream, 1) != b""


def main() -> None:
    address, port, seed, count, *secret = sys.argv[1:]
    place, draw = (address, int(port)), random.Random(int(seed))
    if not greets(place):  # torch's own
        print(0, 0)
        return
    let_in = [kind(place, draw) for kind in KINDS.values() for _ in range(int(count))]
    if secret:
        held = bytes.fromhex(secret[0])
        let_in += late_members(place, held, int(count), draw)
        let_in += replays(place, visit(place, held, hello()), int(count))
    let_in += idle_and_slow(place, 4 * int(count), 2.0)
    print(len(let_in), sum(let_in))


if __name__ == "__main__":
    main()
