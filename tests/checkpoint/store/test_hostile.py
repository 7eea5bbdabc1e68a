"""A store that is not to be trusted: it redirects, and its answers do not end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import torch
from shardwright._core import CheckpointReader, CheckpointWriter, newest_checkpoint
from shardwright.errors import ShardwrightError

from tests.checkpoint.test_bindings import whole

KEYS = {
    "AWS_ACCESS_KEY_ID": "somebody",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_SESSION_TOKEN": "the token of a session",
    "AWS_REGION": "us-east-1",
    "NO_PROXY": "127.0.0.1",
    "no_proxy": "127.0.0.1",
}
MB = 1 << 20


@contextmanager
def server(answers: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[str]:
    """A server of this process, in threads; its address."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Say nothing."""

        def handle_one(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            answers(self)

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = handle_one

    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.daemon_threads = True
    thread = threading.Thread(target=made.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{made.server_port}"
    finally:
        made.shutdown()
        thread.join()
        made.server_close()


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key with a token, as temporary ones have it."""
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)


def asks() -> list[Callable[[], Any]]:
    """Requests of every method."""
    small, large = torch.zeros(10), torch.zeros(12 * MB, dtype=torch.uint8)

    def write(given: torch.Tensor) -> None:
        writer = CheckpointWriter("s3://b/x", "t")
        writer.write_part("part-0.safetensors", [("model/a", given, list(given.shape), whole(given))])

    return [
        lambda: newest_checkpoint("s3://b/x"),
        lambda: CheckpointReader("s3://b/x"),
        lambda: CheckpointReader("s3://b/x", "t"),
        CheckpointWriter("s3://b/x", "t").check,
        lambda: write(small),
        lambda: write(large),
    ]


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_no_request_follows_a_redirection(monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    """Neither the key's signature nor the token of its session reaches the host that an answer names."""
    reached: list[tuple[str, dict[str, str]]] = []
    asked: set[str] = set()

    def elsewhere(handler: BaseHTTPRequestHandler) -> None:
        reached.append((handler.command, dict(handler.headers)))
        handler.send_response(200)
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    with server(elsewhere) as other:

        def redirects(handler: BaseHTTPRequestHandler) -> None:
            asked.add(handler.command)
            assert "x-amz-security-token" in handler.headers
            handler.send_response(status)
            handler.send_header("Location", other + handler.path)
            handler.send_header("Content-Length", "0")
            handler.end_headers()

        with server(redirects) as store:
            monkeypatch.setenv("AWS_ENDPOINT_URL", store)
            for ask in asks():
                with pytest.raises(ShardwrightError) as caught:
                    ask()
                told = str(caught.value)
                assert f"it redirects to {(other + '/b')!r}"[:-1].replace("'", '"') in told
                assert "\n" not in told
    assert {"GET", "PUT", "POST"} <= asked
    assert reached == []


def endless(status: int, counted: list[int], piece: bytes) -> Callable[[BaseHTTPRequestHandler], None]:
    """Answers whose bodies do not end; counts the bytes that were taken."""

    def answers(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        handler.send_header("Content-Length", str(1 << 40))
        handler.end_headers()
        for _ in range(200):  # 200 MB, if anybody takes them
            try:
                handler.wfile.write(piece)
            except OSError:
                return
            counted[0] += len(piece)

    return answers


@pytest.mark.parametrize("piece", [b"x" * MB, b"\xff\n" * (MB // 2), b"\x1b[2J" * (MB // 4)])
def test_of_an_error_without_end_little_is_kept_and_told(monkeypatch: pytest.MonkeyPatch, piece: bytes) -> None:
    for status in (400, 403, 404):
        counted = [0]
        with server(endless(status, counted, piece)) as store:
            monkeypatch.setenv("AWS_ENDPOINT_URL", store)
            with pytest.raises(ShardwrightError) as caught:
                CheckpointWriter("s3://b/x", "t").check()
        told = str(caught.value)
        assert str(status) in told
        assert len(told) < 1500
        assert told.isprintable()
        assert counted[0] < 32 * MB  # what the sockets hold


def test_a_list_without_end_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = [0]
    with server(endless(200, counted, b" " * MB)) as store:
        monkeypatch.setenv("AWS_ENDPOINT_URL", store)
        with pytest.raises(ShardwrightError, match="its answer has more than 16777216 bytes"):
            CheckpointWriter("s3://b/x", "t").check()
    assert counted[0] < 64 * MB


def page(token: str, prefixes: int, number: int) -> bytes:
    """A page of a list, of which there are more."""
    names = b"".join(
        b"<CommonPrefixes><Prefix>x/c%d-%d_partial/</Prefix></CommonPrefixes>" % (number, one)
        for one in range(prefixes)
    )
    return (
        b"<ListBucketResult><IsTruncated>true</IsTruncated><NextContinuationToken>%s</NextContinuationToken>"
        b"%s</ListBucketResult>"
    ) % (token.encode(), names)


@pytest.mark.parametrize(
    ("prefixes", "is_same", "problem", "most"),
    [
        (0, True, "the same page again", 3),
        (1000, True, "the same page again", 3),
        (1000, False, "more than 100000", 120),
    ],
)
def test_a_list_whose_pages_do_not_end_is_an_error(
    monkeypatch: pytest.MonkeyPatch, prefixes: int, is_same: bool, problem: str, most: int
) -> None:
    pages = [0]

    def answers(handler: BaseHTTPRequestHandler) -> None:
        pages[0] += 1
        body = page("same" if is_same else str(pages[0]), prefixes, pages[0])
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    with server(answers) as store:
        monkeypatch.setenv("AWS_ENDPOINT_URL", store)
        with pytest.raises(ShardwrightError, match=problem):
            CheckpointWriter("s3://b/x", "t").check()
    assert pages[0] <= most


def test_a_manifest_without_end_is_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = [0]
    objects = (
        b"<ListBucketResult><IsTruncated>false</IsTruncated><Contents><Key>x/t_partial/manifest.json</Key>"
        b"<LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>e</ETag><Size>9</Size></Contents></ListBucketResult>"
    )

    def answers(handler: BaseHTTPRequestHandler) -> None:
        if "list-type" in handler.path:
            handler.send_response(200)
            handler.send_header("Content-Length", str(len(objects)))
            handler.end_headers()
            handler.wfile.write(objects)
            return
        handler.send_response(200)
        handler.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        handler.send_header("ETag", '"e"')
        handler.send_header("Content-Length", str(1 << 40))
        handler.end_headers()
        for _ in range(600):
            try:
                handler.wfile.write(b"A" * MB)
            except OSError:
                return
            counted[0] += MB

    with server(answers) as store:
        monkeypatch.setenv("AWS_ENDPOINT_URL", store)
        with pytest.raises(ShardwrightError, match="more than the 268435456 bytes that are allowed"):
            CheckpointReader("s3://b/x", "t")
    assert counted[0] < 64 * MB
