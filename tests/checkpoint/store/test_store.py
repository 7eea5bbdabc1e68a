"""Checkpoints of one process in an object store: damage, requests that fail, and the command."""

from __future__ import annotations

import json
import random
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from shardwright._core import CheckpointReader, CheckpointWriter, newest_checkpoint
from shardwright.command import main
from shardwright.errors import ShardwrightError

from tests.checkpoint.store.between import Between
from tests.checkpoint.store.server import Bucket, Server
from tests.checkpoint.test_bindings import description, whole
from tests.jobs.patience import slowdown

CHUNK = 4 << 20


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A server for all tests of the module."""
    started = Server()
    yield started
    started.stop()


@pytest.fixture
def bucket(server: Server, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """A bucket of its own for the test, which this process reaches."""
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    return Bucket(server, f"b-{uuid.uuid4()}")


def noise(count: int) -> torch.Tensor:
    """Bytes that no two chunks have in common."""
    return torch.randint(0, 256, (count,), dtype=torch.uint8)


def save(path: str, tag: str = "t", **tensors: torch.Tensor) -> list[str]:
    """Save tensors, each in a part of its own, and return the parts' names."""
    writer = CheckpointWriter(path, tag)
    reports = [
        writer.write_part(f"part-{number}.safetensors", [(f"model/{name}", one, list(one.shape), whole(one))])
        for number, (name, one) in enumerate(tensors.items())
    ]
    writer.commit(description(), reports)
    return [json.loads(report)["file"]["name"] for report in reports]


def read(path: str, name: str, like: torch.Tensor) -> torch.Tensor:
    """Read a whole tensor."""
    into = torch.empty_like(like)
    CheckpointReader(path).read([(f"model/{name}", into, whole(into))])
    return into


def command(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    """Run ``shardwright checkpoint``: its status, and what it writes."""
    status = main(["checkpoint", *map(str, words)])
    told = capsys.readouterr()
    return status, told.out, told.err


@pytest.mark.parametrize("size", [0, 1, 4096, 8 << 20, (8 << 20) + 1, 21_000_000])
def test_what_was_written_is_read(bucket: Bucket, size: int) -> None:
    """Objects that are sent whole, and around the size from which they are not."""
    tensors = {"a": noise(size), "b": noise(5000)}
    save(bucket.path, **tensors)
    reader = CheckpointReader(bucket.path)
    assert all(torch.equal(read(bucket.path, name, one), one) for name, one in tensors.items())
    assert reader.verify() == []
    assert newest_checkpoint(bucket.path) == "t"
    assert CheckpointReader(f"{bucket.path}/t_partial/").manifest == reader.manifest


def test_the_bucket_itself_is_a_directory(bucket: Bucket) -> None:
    given = noise(10)
    for tag in ("a tag with ü, #, % and +", "b"):
        save(f"s3://{bucket.name}", tag, a=given)
        assert newest_checkpoint(f"s3://{bucket.name}/") == tag
        assert torch.equal(read(f"s3://{bucket.name}", "a", given), given)


def test_only_the_chunks_that_are_wanted_are_asked_for(server: Server, bucket: Bucket, monkeypatch: Any) -> None:
    """Neighbours by one request."""
    given = noise(9 * CHUNK)
    save(bucket.path, a=given)
    between = Between(server.port, lambda *_: None)
    try:
        monkeypatch.setenv("AWS_ENDPOINT_URL", between.url)
        reader = CheckpointReader(bucket.path)
        before = len(between.asked)
        into = torch.empty(CHUNK + 300, dtype=torch.uint8)
        begin = 5 * CHUNK - 200
        # The header's chunk, and three others in stretches of two.
        assert reader.read([("model/a", into, ([begin], [len(into)], None))])[1] == 4
        assert torch.equal(into, given[begin : begin + len(into)])
        assert len(between.asked) - before == 3
    finally:
        between.stop()


@pytest.mark.parametrize("size", [1000, 21_000_000])
def test_damage_is_named_and_refused(bucket: Bucket, size: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Objects of which a bit is another, that are cut, that are exchanged, that are missing, or that nobody wrote."""
    choose = random.Random(size)
    given = {"a": noise(size), "b": noise(size)}
    names = save(bucket.path, **given)
    whole_objects = [bucket.get(f"t_partial/{name}") for name in names]

    def refused(why: str) -> None:
        with pytest.raises(ShardwrightError, match=f"(?s){bucket.path}/t_partial is damaged: {why}"):
            read(bucket.path, "a", given["a"])
        status, out, _ = command(capsys, "verify", bucket.path)
        assert status == 1
        assert names[0] in out

    path, content = f"t_partial/{names[0]}", whole_objects[0]
    for _ in range(4):
        place = choose.randrange(len(content))
        bucket.put(path, content[:place] + bytes([content[place] ^ 1 << choose.randrange(8)]) + content[place + 1 :])
        refused(rf"bytes \d+ to \d+ of {names[0]} have changed$")
    for length in (0, 1, len(content) - 1):
        bucket.put(path, content[:length])
        refused(f"{names[0]} has {length} bytes and was written with {len(content)}")
    bucket.put(path, whole_objects[1])
    refused(f"bytes 0 to .* of {names[0]} have changed: they are those of {names[1]}")
    bucket.delete(path)
    refused(f"{names[0]} is missing")
    bucket.put(path, content)
    bucket.put("t_partial/more.safetensors", b"")
    with pytest.raises(ShardwrightError, match=r"more\.safetensors does not belong to it"):
        CheckpointReader(bucket.path)
    bucket.delete("t_partial/more.safetensors")
    # What a save that goes on has written of the same tag is no damage.
    bucket.put(f"t_partial/{names[0].replace(names[0].split('.')[1], '0' * 16)}", b"")
    assert torch.equal(read(bucket.path, "a", given["a"]), given["a"])
    for name in ("newest", "t_partial/manifest.json"):
        content = bucket.get(name)
        bucket.put(name, content[:5] + bytes([content[5] ^ 1]) + content[6:])
        with pytest.raises(ShardwrightError, match=f"{bucket.path}/{name}.* is not as it was written"):
            CheckpointReader(bucket.path)
        bucket.put(name, content)


def test_an_object_that_is_cut_after_it_was_opened_is_named(bucket: Bucket) -> None:
    given = noise(3 * CHUNK)
    (name,) = save(bucket.path, a=given)
    reader = CheckpointReader(bucket.path)
    bucket.put(f"t_partial/{name}", b"x" * 100)
    with pytest.raises(ShardwrightError, match=rf"{name} has 100 bytes and was written with \d+"):
        reader.read([("model/a", torch.empty_like(given), whole(given))])
    bucket.delete(f"t_partial/{name}")
    with pytest.raises(ShardwrightError, match=f"{name} is missing"):
        reader.read([("model/a", torch.empty_like(given), whole(given))])


def test_an_upload_that_fails_is_given_up(server: Server, bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """The third part is refused: nothing is left, the store's answer is told, and what was complete stays."""
    small, big = noise(10), noise(40 << 20)
    save(bucket.path, "before", a=small)
    there = bucket.objects()
    between = Between(server.port, lambda method, path: 403 if method == "PUT" and "partNumber=3" in path else None)
    try:
        monkeypatch.setenv("AWS_ENDPOINT_URL", between.url)
        with pytest.raises(ShardwrightError) as raised:
            save(bucket.path, "after", a=big)
        assert any(method == "DELETE" and "uploadId=" in path for method, path in between.asked)
    finally:
        between.stop()
    told = str(raised.value)
    assert f"cannot write {bucket.path}/after_partial/part-0." in told
    assert "403 Forbidden" in told
    assert "refused by the test" in told
    assert bucket.uploads() == []
    assert bucket.objects() == there


def test_a_manifest_that_may_have_been_written_keeps_its_parts(
    server: Server, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store has it, and the answer is lost: what is given up then must not be torn."""
    before = noise(10)
    save(bucket.path, "t", a=before)

    def refuses(method: str, path: str) -> int | None:
        return 504 if method == "PUT" and "manifest.json" in path else None  # of a gateway, whatever is behind it

    given = noise(100)
    between = Between(server.port, refuses)
    try:
        monkeypatch.setenv("AWS_ENDPOINT_URL", between.url)
        writer = CheckpointWriter(bucket.path, "t")
        report = writer.write_part("part-0.safetensors", [("model/a", given, [100], whole(given))])
        with pytest.raises(ShardwrightError, match=r"cannot write .*manifest\.json.* stays: the next save of this tag"):
            writer.commit(description(), [report])
        writer.abandon()
    finally:
        between.stop()
    assert f"t_partial/{json.loads(report)['file']['name']}" in bucket.objects()
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    assert torch.equal(read(bucket.path, "a", before), before)
    # One that was given up before that leaves nothing.
    writer = CheckpointWriter(bucket.path, "t")
    writer.write_part("part-0.safetensors", [("model/a", given, [100], whole(given))])
    writer.abandon()
    assert len(bucket.objects()) == 3
    assert torch.equal(read(bucket.path, "a", before), before)


@pytest.mark.parametrize("refuses_removal", [False, True])
def test_a_manifest_that_is_refused_leaves_nothing_or_is_told(
    server: Server, bucket: Bucket, monkeypatch: pytest.MonkeyPatch, refuses_removal: bool
) -> None:
    save(bucket.path, "before", a=noise(10))
    there = bucket.objects()

    def refuses(method: str, path: str) -> int | None:
        is_removal = method == "DELETE" or "delete" in path
        refused = (method == "PUT" and "t_partial/manifest.json" in path) or (is_removal and refuses_removal)
        return 403 if refused else None

    given = noise(100)
    between = Between(server.port, refuses)
    try:
        monkeypatch.setenv("AWS_ENDPOINT_URL", between.url)
        writer = CheckpointWriter(bucket.path, "t")
        report = writer.write_part("part-0.safetensors", [("model/a", given, [100], whole(given))])
        with pytest.raises(ShardwrightError, match=r"cannot write .*manifest\.json") as raised:
            writer.commit(description(), [report])
    finally:
        between.stop()
    assert (bucket.objects() == there) == (not refuses_removal)
    assert ("t_partial stays, and the next save of this tag removes it" in str(raised.value)) == refuses_removal


def test_requests_that_fail_for_a_while_are_made_again(
    server: Server, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each one twice."""
    failed: dict[tuple[str, str], int] = {}

    def refuses(method: str, path: str) -> int | None:
        failed[method, path] = failed.get((method, path), 0) + 1
        return 503 if failed[method, path] <= 2 else None

    given = noise(9 << 20)
    between = Between(server.port, refuses)
    try:
        monkeypatch.setenv("AWS_ENDPOINT_URL", between.url)
        save(bucket.path, a=given)
        assert torch.equal(read(bucket.path, "a", given), given)
    finally:
        between.stop()
    assert max(failed.values()) > 2
    assert bucket.uploads() == []


def test_a_server_that_never_answers_is_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other threads run meanwhile."""
    ended, count = threading.Event(), [0]

    def counts() -> None:
        while not ended.wait(0.01):
            count[0] += 1

    with socket.create_server(("127.0.0.1", 0)) as silent:
        environment = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{silent.getsockname()[1]}",
            "AWS_ACCESS_KEY_ID": "a",
            "AWS_SECRET_ACCESS_KEY": "b",
            "AWS_TIMEOUT": "500ms",
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        }
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        writer = CheckpointWriter("s3://b/x", "t")
        thread = threading.Thread(target=counts)
        thread.start()
        begin = time.monotonic()
        try:
            with pytest.raises(ShardwrightError, match=r"(?s)cannot list s3://b/x: .*127\.0\.0\.1.*retries"):
                writer.check()
        finally:
            ended.set()
            thread.join()
    seconds = time.monotonic() - begin
    assert 0.5 < seconds < 60 * slowdown()
    assert count[0] > 10


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("s3:/b/x", "it has one slash, as after pathlib.Path"),
        ("s3://", "it names no bucket"),
        ("s3://b/../x", "a part of its path is empty, or dots"),
    ],
)
def test_addresses_that_cannot_be_are_refused(path: str, why: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    for call in (CheckpointWriter(path, "t").check, lambda: CheckpointReader(path), lambda: save(path, a=noise(3))):
        with pytest.raises(ShardwrightError, match=f"addresses of object stores are s3://BUCKET/PREFIX: {why}"):
            call()
    assert list(tmp_path.iterdir()) == []


def test_the_command_works_on_a_store(bucket: Bucket, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = {"a": noise(10_000).reshape(100, 100), "b": noise(9 << 20)}
    save(bucket.path, "first", **given)
    save(bucket.path, "second", a=given["a"], b=given["b"] ^ 1)
    bucket.put("third_partial/part-0.0123456789abcdef.safetensors", b"of a save that was ended")
    status, out, _ = command(capsys, "ls", bucket.path)
    words = [line.split() for line in out.splitlines()[1:]]
    assert status == 0
    assert [row[: 3 if row[0] == "*" else 2] for row in words] == [
        ["first", "complete"],
        ["*", "second", "complete"],
        ["third", "incomplete"],
    ]
    status, out, _ = command(capsys, "show", bucket.path, "first")
    assert status == 0
    assert "model/a" in out
    status, out, _ = command(capsys, "verify", f"{bucket.path}/first_partial")
    assert status == 0
    assert "are as they were written" in out
    status, out, _ = command(capsys, "diff", f"{bucket.path}/first_partial", f"{bucket.path}/second_partial")
    assert status == 1
    assert f"elements: {9 << 20} of {9 << 20} of model/b differ" in out
    status, _, err = command(capsys, "export", bucket.path, "--tag", "first", "--full", tmp_path / "full")
    assert status == 0, err
    exported = load_file(tmp_path / "full" / "model.safetensors")
    assert all(torch.equal(exported[name], one) for name, one in given.items())
    status, _, err = command(capsys, "export", bucket.path, "--full", f"{bucket.path}/full")
    assert status == 2
    assert "this is written to a folder on a disk only" in err
    for source, target in (
        (bucket.path, f"{bucket.path}/other"),
        (f"{bucket.path}/other", str(tmp_path / "local")),
        (str(tmp_path / "local"), f"{bucket.path}/again"),
    ):
        words_of = ("reshard", "--tag", "first", source, target, "--ranks", "3")
        status, _, err = command(capsys, *words_of)
        assert status == 0, err
        status, _, err = command(capsys, *words_of)
        assert status == 2
        assert "exists already" in err
        assert command(capsys, *words_of, "--force")[0] == 0
        assert all(torch.equal(read(target, name, one), one) for name, one in given.items())
        assert len(json.loads(CheckpointReader(target).manifest)["files"]) == 3
    status, _, err = command(capsys, "reshard", bucket.path, bucket.path, "--ranks", "3")
    assert status == 2
    assert "is the directory of the checkpoint itself" in err
    status, _, err = command(capsys, "ls", "s3://nowhere/x")
    assert status == 2
    assert "cannot list s3://nowhere/x" in err
    assert "NoSuchBucket" in err
