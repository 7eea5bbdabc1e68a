"""Folders of checkpoints that somebody else has written, and stores that answer what they like."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import shardwright as smp
from shardwright._core import CheckpointReader

from tests.jobs.patience import HANG_SECONDS
from tests.torn.damages import KINDS
from tests.torn.states import commit, write


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _link(to: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(to)


def _large(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


_IN_PLACE: tuple[Callable[[Path], None], ...] = (
    *(_pipe, Path.mkdir, _large),
    *map(_link, ("/dev/zero", "/dev/full", "/dev/tty", "/etc/passwd", "/proc/self/mem", "..", "newest", "nowhere")),
)


def succeeds(work: Callable[[], object]) -> bool:
    """Whether it does anything but end with an error of the library."""
    outcome: list[bool] = []

    def run() -> None:
        try:
            work()
        except smp.ShardwrightError:
            outcome.append(True)
        except BaseException:
            outcome.append(False)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(HANG_SECONDS)
    return outcome != [True]


def read_all(folder: str | Path) -> None:
    """Open, and verify; what it complains of is raised."""
    said = CheckpointReader(folder).verify()
    if said:
        raise smp.CheckpointError("; ".join(said))


def crafted(count: int, seed: int) -> Iterator[bool]:
    """Other things in the place of each file, and files damaged at random; whether any is not refused."""
    with tempfile.TemporaryDirectory(prefix="shardwright-attack-") as scratch:
        good, folder = Path(scratch) / "good", Path(scratch) / "crafted"
        commit(good, "one", 0, [write(good, "one", rank, 0) for rank in range(2)])
        names = ("newest", "one_partial", "one_partial/manifest.json", "one_partial/part-0.safetensors")

        def changed(change: Callable[[], object]) -> bool:
            shutil.copytree(good, folder)
            try:
                change()
                return succeeds(lambda: read_all(folder))
            finally:
                shutil.rmtree(folder)

        def put(name: str, thing: Callable[[Path], None]) -> None:
            path = folder / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()
            thing(path)

        for name in names:
            for thing in _IN_PLACE:
                yield changed(lambda name=name, thing=thing: put(name, thing))  # type: ignore[misc]
        files = [path.relative_to(good) for path in sorted(good.rglob("*")) if path.is_file()]
        for number in range(count):
            chance = random.Random(f"{seed}/{number}")
            path, kind = chance.choice(files), chance.choice(KINDS[:4])
            yield changed(lambda path=path, kind=kind, chance=chance: kind(folder / path, chance))  # type: ignore[misc]


def written_through() -> Iterator[bool]:
    """Links where a save writes; whether anything outside of the folder changes."""
    names = (".one_partial.writing", "one_partial", ".newest.writing", "newest", ".one_partial.removing")
    inside = ("part-0.safetensors", "manifest.json")
    for name in (*names, *(f".one_partial.writing/{one}" for one in inside)):
        for is_folder in (False, True):
            with tempfile.TemporaryDirectory(prefix="shardwright-attack-") as scratch:
                outside, folder = Path(scratch) / "outside", Path(scratch) / "checkpoints"
                outside.mkdir()
                (outside / "precious").write_bytes(b"precious")
                link = folder / name
                link.parent.mkdir(parents=True)
                link.symlink_to(outside if is_folder else outside / "precious")
                with contextlib.suppress(smp.ShardwrightError):  # refusing is as good
                    commit(folder, "one", 0, [write(folder, "one", rank, 0) for rank in range(2)])
                found = {path.name: path.read_bytes() for path in outside.iterdir()}
                yield found != {"precious": b"precious"}


class _Answers(BaseHTTPRequestHandler):
    """Answers every request with what the server was told."""

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def answer(self) -> None:
        status, headers, body = self.server.said  # type: ignore[attr-defined]
        try:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)
        except OSError:
            pass
        self.close_connection = True

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = answer


_BODIES = (
    b"",
    b"\x00" * 100_000,
    b"<ListBucketResult>",
    b"<?xml version='1.0'?><ListBucketResult><Contents><Key>../../x</Key><Size>-1</Size></Contents></ListBucketResult>",
    b"<!DOCTYPE x [<!ENTITY a 'aaaaaaaa'>]><ListBucketResult>&a;</ListBucketResult>",
    b"x" * 20_000_000,
    b'{"blake3":"' + b"0" * 64 + b'",\n',
    "\ud7ff".encode() * 1000,
)


def stores() -> Iterator[bool]:
    """Stores with every body under several codes and lengths; whether any is not refused."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Answers)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    keys = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}",
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
        "AWS_REGION": "us-east-1",
        "AWS_TIMEOUT": "5s",
    }
    before = dict(os.environ)
    os.environ.update(keys)
    try:
        for body in _BODIES:
            for status in (200, 206, 301, 403, 404):
                for length in (len(body), len(body) + 10, 1 << 60):
                    server.said = (status, {"Content-Length": str(length), "ETag": "x"}, body)  # type: ignore[attr-defined]
                    yield succeeds(lambda: read_all("s3://bucket/run"))
    finally:
        os.environ.clear()
        os.environ.update(before)
        server.shutdown()
        server.server_close()
