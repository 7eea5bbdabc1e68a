"""Who sits at the port of rank 0 without the secret: what a rank that calls takes from it, and gives it."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from collections.abc import Iterator

from shardwright import _core
from shardwright.communication import comm_options
from shardwright.config import load_config
from shardwright.errors import JobStartError

from .protocol import (
    ALREADY_STARTED,
    ANSWER_BYTES,
    CHALLENGE_BYTES,
    FINE,
    HELLO_BYTES,
    MAGIC,
    VERDICT_BYTES,
    VERSION,
    WAIT,
    WRONG_PROOF,
    read,
)

SECRET = b"the secret of the attack"
#: What the handshake of a caller has at most; what comes after it would be a registration.
MOST_BYTES = HELLO_BYTES + ANSWER_BYTES


def _challenge(draw: random.Random, first: bytes) -> bytes:
    nonce = first[20:] if draw.random() < 0.5 else draw.randbytes(32)  # the caller's own, given back
    return MAGIC + VERSION.to_bytes(2, "little") + bytes(6) + nonce


def _verdicts(draw: random.Random, proof: bytes) -> list[bytes]:
    code = bytes([draw.choice((FINE, WRONG_PROOF, ALREADY_STARTED, 4, draw.randrange(256)))])
    return [code + proof, code + bytes(VERDICT_BYTES - 1), code + draw.randbytes(200), code, draw.randbytes(4096), b""]


def impostors(count: int, seed: int) -> Iterator[bool]:
    """Each of so many acceptors: whether a rank took it for rank 0, or said more to it than its own proof."""
    draw = random.Random(seed)
    options = comm_options(load_config({"transport": "tcp"}, {}, {}), {}, 1, one_host=True)
    for _ in range(count):
        with socket.create_server(("127.0.0.1", 0)) as door:
            heard = bytearray()

            def accepts(door: socket.socket = door, heard: bytearray = heard, draw: random.Random = draw) -> None:
                stream, _ = door.accept()
                with stream:
                    stream.settimeout(WAIT)
                    heard += read(stream, HELLO_BYTES)
                    challenge = _challenge(draw, bytes(heard))
                    assert len(challenge) == CHALLENGE_BYTES
                    stream.sendall(challenge)
                    proof = read(stream, ANSWER_BYTES)
                    heard += proof
                    with contextlib.suppress(OSError):  # the rank has hung up
                        stream.sendall(draw.choice(_verdicts(draw, proof)))
                        stream.shutdown(socket.SHUT_WR)
                    heard.extend(read(stream, 4096))

            thread = threading.Thread(target=accepts)
            thread.start()
            place = _core.Rendezvous.at("127.0.0.1", door.getsockname()[1], SECRET)
            try:
                node = _core.Node.connect(
                    rank=1,
                    world=2,
                    place=place,
                    fingerprint="",
                    version="1",
                    connect_timeout=0.2,
                    liveness_timeout=WAIT,
                    bind_address="127.0.0.1",
                    host_name="host",
                    options=options,
                )
            except JobStartError:
                believed = False
            else:
                node.close()
                believed = True
            thread.join()
        yield believed or len(heard) > MOST_BYTES or SECRET in heard
