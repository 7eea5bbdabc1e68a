"""The handshake as an attacker writes it: genuine, replayed, cut short, or false."""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import struct
from dataclasses import dataclass

MAGIC = b"SHARDWRT"
VERSION = 3
HELLO_BYTES, CHALLENGE_BYTES, ANSWER_BYTES, VERDICT_BYTES = 52, 48, 32, 33
REGISTER, MESH = 0, 1
FINE, WRONG_PROOF, ALREADY_STARTED = 0, 1, 3
WAIT = 20.0


def hello(
    rank: int = 1, world: int = 2, purpose: int = MESH, version: int = VERSION, *, encrypt: int = 0, nonce: bytes = b""
) -> bytes:
    """The first bytes of a caller."""
    return MAGIC + struct.pack("<HBBII", version, purpose, encrypt, rank, world) + (nonce or os.urandom(32))


def answer(secret: bytes, first: bytes, challenge: bytes) -> bytes:
    """The proof of the secret."""
    return hmac.digest(secret, b"shardwright client" + first + challenge, hashlib.sha256)


@dataclass
class Heard:
    """What a door said to a visitor, and what the visitor had said."""

    challenge: bytes
    verdict: bytes
    said: bytes


def read(stream: socket.socket, count: int) -> bytes:
    """So many bytes, or fewer if the other side ends the connection."""
    got = b""
    while len(got) < count:
        try:
            piece = stream.recv(count - len(got))
        except OSError:
            break
        if not piece:
            break
        got += piece
    return got


def visit(address: tuple[str, int], secret: bytes, first: bytes) -> Heard:
    """A whole handshake with a door."""
    with socket.create_connection(address, WAIT) as stream:
        stream.sendall(first)
        challenge = read(stream, CHALLENGE_BYTES)
        if len(challenge) < CHALLENGE_BYTES:
            return Heard(challenge, b"", first)
        last = answer(secret, first, challenge)
        stream.sendall(last)
        return Heard(challenge, read(stream, 1), first + last)
