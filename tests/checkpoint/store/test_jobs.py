"""Jobs that save into an object store and resume from it."""

from __future__ import annotations

import json
import os
import signal
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from shardwright._core import CheckpointReader, CheckpointWriter

from tests.checkpoint.running import PIPELINE, SHARDED, case, run
from tests.checkpoint.store.server import Bucket, Server
from tests.checkpoint.test_bindings import description, whole
from tests.jobs.patience import HANG_SECONDS
from tests.jobs.ranks import forked_ranks

#: In pipelines with several microbatches, sums depend on when messages arrive.
IN_ORDER = {**PIPELINE, "microbatches": 1}
#: Elements of float32 that are more than an upload sends at once.
BIG = 6_000_000


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A server for all tests of the module."""
    started = Server()
    yield started
    started.stop()


@pytest.fixture
def bucket(server: Server, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """A bucket of its own for the test, which this process and those that it starts reach."""
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    return Bucket(server, f"b-{uuid.uuid4()}")


def named_by_manifests(bucket: Bucket, *tags: str) -> set[str]:
    """The objects that should be there, and no others."""
    names = {"newest"}
    for tag in tags:
        files = json.loads(CheckpointReader(bucket.path, tag).manifest)["files"]
        names |= {f"{tag}_partial/{file['name']}" for file in files} | {f"{tag}_partial/manifest.json"}
    return names


def test_resuming_is_bit_identical(bucket: Bucket, tmp_path: Path) -> None:
    """With dropout, and batches from every kind of generator; before the first step and after one."""
    folder, path = str(tmp_path), bucket.path
    run(2, case("save_and_go_on", IN_ORDER, folder=folder, path=path))
    run(2, *(case("resume", IN_ORDER, folder=folder, path=path, late=late) for late in (False, True)))
    assert bucket.objects().keys() == named_by_manifests(bucket, "a")


def test_any_layout_loads_what_was_saved(bucket: Bucket, tmp_path: Path) -> None:
    """Of small parts, and of parts that are uploaded in several."""
    beside, path = str(tmp_path), bucket.path
    run(2, case("save_there", PIPELINE, path=path, beside=beside, number=1, big=BIG))
    sizes = sorted(size for name, size in bucket.objects().items() if name.endswith(".safetensors"))
    assert len(sizes) == 2
    assert sizes[0] < 1 << 20 < 20 << 20 < sizes[1]
    assert bucket.uploads() == []
    found = {"path": path, "beside": beside, "number": 1}
    run(3, case("found_there", SHARDED, **found))
    run(1, case("found_there", **found), case("only_in_parts", path=path))


def test_an_overwritten_tag_has_nothing_of_the_earlier_one(bucket: Bucket, tmp_path: Path) -> None:
    """By another number of ranks, and in the background."""
    saved = {"path": bucket.path, "beside": str(tmp_path)}
    run(2, case("save_there", PIPELINE, **saved, number=1, big=10))
    first = bucket.objects()
    run(1, case("save_there", **saved, number=2), case("found_there", **saved, number=2))
    assert bucket.objects().keys() == named_by_manifests(bucket, "a")
    assert not first.keys() & bucket.objects().keys() - {"newest", "a_partial/manifest.json"}
    run(
        2,
        case("save_there", PIPELINE, **saved, number=3, background=True),
        case("found_there", PIPELINE, **saved, number=3),
    )
    assert bucket.objects().keys() == named_by_manifests(bucket, "a")


def test_only_so_many_are_kept(bucket: Bucket, tmp_path: Path) -> None:
    saved = {"path": bucket.path, "beside": str(tmp_path)}
    tags = ["a", "b", "c"]
    run(2, *(case("save_there", **saved, number=number, tag=tag, keep=2) for number, tag in enumerate(tags)))
    assert bucket.objects().keys() == named_by_manifests(bucket, "b", "c")
    run(2, case("found_there", **saved, number=2), case("found_there", **saved, number=1, tag="b"))


def test_a_save_that_is_killed_midway_leaves_the_newest_as_it_was(bucket: Bucket, tmp_path: Path) -> None:
    ranks = forked_ranks(["-m", "tests.checkpoint.store.killed", bucket.path, str(200 << 20)], 2)
    try:
        deadline = time.monotonic() + HANG_SECONDS
        while not bucket.uploads():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert [name.partition("/")[0] for name in bucket.uploads()] == ["after_partial"]
    finally:
        for rank in ranks:
            rank.kill()
    for rank in ranks:
        out, _ = rank.communicate(timeout=HANG_SECONDS)
        assert "saved" not in out
        assert rank.returncode == -signal.SIGKILL
    left = bucket.objects().keys() - named_by_manifests(bucket, "before")
    assert all(name.startswith("after_partial/part-") for name in left)
    reader = CheckpointReader(bucket.path)
    assert json.loads(reader.manifest)["tag"] == "before"
    assert reader.verify() == []
    run(2, case("newest_is", folder=bucket.path, expected="before"))
    # What was left goes with the next save of the tag.
    bucket.put("after_partial/part-00001.0123456789abcdef.safetensors", b"left by a rank")
    run(2, case("save_there", path=bucket.path, beside=str(tmp_path), number=1, tag="after"))
    assert bucket.objects().keys() == named_by_manifests(bucket, "before", "after")


def test_a_bucket_that_is_not_there_is_refused(server: Server, bucket: Bucket) -> None:
    run(2, case("refused", path="s3://nowhere/x", why="NoSuchBucket"))
    assert bucket.objects() == {}


def test_a_wrong_key_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a server that looks at keys, once the bucket is created."""
    server = Server({"INITIAL_NO_AUTH_ACTION_COUNT": "1"})
    try:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        run(2, case("refused", path=Bucket(server, "bucket").path, why="403 Forbidden.*InvalidAccessKeyId"))
    finally:
        server.stop()


def test_a_server_that_ends_midway_is_told_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server()
    try:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        path = Bucket(server, "bucket").path
        run(2, case("gone", PIPELINE, path=path, server=server.process.pid))
    finally:
        server.stop()


def test_little_memory_is_needed_for_what_is_written(bucket: Bucket) -> None:
    """Parts that are on their way, and not the whole file."""
    tensor = torch.zeros(256 << 20, dtype=torch.uint8)
    writer = CheckpointWriter(bucket.path, "t")
    writer.check()
    Path("/proc/self/clear_refs").write_text("5")  # the peak from now on
    before = resident()
    report = writer.write_part("part-0.safetensors", [("weight", tensor, list(tensor.shape), whole(tensor))])
    grown = resident("VmHWM") - before
    assert grown < 100 << 20, grown
    assert writer.commit(description(), [report]) == []
    bucket.client.delete_object(
        Bucket=bucket.name, Key=f"{bucket.PREFIX}/t_partial/{json.loads(report)['file']['name']}"
    )


def resident(field: str = "VmRSS") -> int:
    """The bytes of this process that are in memory."""
    status = Path(f"/proc/{os.getpid()}/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith(f"{field}:"))
