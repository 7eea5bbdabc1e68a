"""Jobs that cannot start end on every rank, with the reason, and leave nothing behind."""

from __future__ import annotations

import base64
import json
import os
import re
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import shardwright as smp
from shardwright import _core, rendezvous
from shardwright.errors import ConfigError, JobStartError
from shardwright.job.runtime import current_runtime
from torch.distributed import TCPStore

from tests.jobs.door import address_of, ask, name_of
from tests.jobs.job import END_SECONDS, Job, torchrun_environment
from tests.jobs.listeners import any_listener_outside
from tests.jobs.patience import slowdown
from tests.jobs.ports import next_port

SECRET = {"environment": {"SHARDWRIGHT_SECRET": "a secret of the test"}}
#: Each of several attempts to start, in order: what differs between the ranks. Rank 0's own comes first.
ATTEMPTS: dict[str, list[dict[str, Any]]] = {
    "configuration": [{"keys": {"microbatches": 4}}, {"keys": {"microbatches": 2}}],
    "version": [{"version": "7.0.0"}, {"version": "7.0.1"}],
    "secret": [
        {"environment": {"SHARDWRIGHT_SECRET": f"the secret of rank {rank}"}, "keys": {"connect_timeout_seconds": 3}}
        for rank in (0, 1)
    ],
    "threads": [{**SECRET, "threads": False}, SECRET],
    "agreement": [SECRET] * 2,
}


@pytest.fixture(scope="module")
def attempts() -> dict[str, list[dict[str, Any]]]:
    """What every rank said of each attempt."""
    told = [json.dumps([{"name": name, **attempt[rank]} for name, attempt in ATTEMPTS.items()]) for rank in (0, 1)]
    with Job("starting", environment=lambda rank: {"ATTEMPTS": told[rank]}) as job:
        said = {}
        for number, name in enumerate(ATTEMPTS):
            job.events("ready", number=number)
            for process in job.ranks:
                process.tell()
            said[name] = job.events("tried", number=number)
        job.all_end_with([0, 0])
    return said


@pytest.mark.parametrize("name", ["configuration", "version", "secret"])
def test_every_rank_learns_that_the_job_does_not_start(attempts: dict[str, list[dict[str, Any]]], name: str) -> None:
    for said in attempts[name]:
        assert said["failure"]["type"] == "JobStartError"
        assert said["seconds"] < END_SECONDS * slowdown()


def test_ranks_with_different_configurations(attempts: dict[str, list[dict[str, Any]]]) -> None:
    for said in attempts["configuration"]:
        assert said["failure"]["text"] == (
            "rank 0 and rank 1 differ in configuration: rank 0 has microbatches=4; rank 1 has microbatches=2"
        )


def test_ranks_with_different_versions(attempts: dict[str, list[dict[str, Any]]]) -> None:
    for said in attempts["version"]:
        assert "library version: rank 0 has 7.0.0, rank 1 has 7.0.1" in said["failure"]["text"]


def test_a_rank_of_the_job_with_the_wrong_secret(attempts: dict[str, list[dict[str, Any]]]) -> None:
    first, second = (said["failure"]["text"] for said in attempts["secret"])
    assert first.startswith("rank 1 did not join the job within 3")
    assert first.endswith("a connection was dropped: it presented a wrong secret as rank 1")
    assert "rank 0 did not prove the job's secret to rank 1" in second


def test_a_rank_that_may_start_no_thread_says_so(attempts: dict[str, list[dict[str, Any]]]) -> None:
    failure = attempts["threads"][0]["failure"]
    assert (failure["type"], failure["text"]) == ("RuntimeError", "can't start new thread")


def test_the_next_attempt_of_the_same_processes_succeeds(attempts: dict[str, list[dict[str, Any]]]) -> None:
    assert [said["failure"] for said in attempts["agreement"]] == [None, None]


def test_ranks_with_different_models() -> None:
    with Job("training", arguments=["another model"]) as job:
        codes = job.all_end(90)
        texts = [process.err for process in job.ranks]
    assert codes == [1, 1]
    for text in texts:
        assert "rank 1" in text
        assert "first.linear.weight" in text


def refused(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], **keys: Any) -> str:
    """The message with which ``smp.init`` refuses, before it has talked to anybody."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises((JobStartError, ConfigError)) as caught:
        smp.init(keys)
    assert not smp.is_initialized()
    return str(caught.value)


def ranks_of(world: int, **environment: str) -> dict[str, str]:
    """The environment of rank 0 of a job on one host."""
    own = {"RANK": "0", "WORLD_SIZE": str(world), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(world)}
    return {**own, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", **environment}


def test_a_job_without_a_rendezvous(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = ranks_of(2)
    del environment["MASTER_PORT"]
    assert "MASTER_PORT" in refused(monkeypatch, environment, pipeline_parallel_degree=2)


def test_a_job_on_several_hosts_without_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = ranks_of(2, LOCAL_WORLD_SIZE="1")
    del environment["MASTER_ADDR"]
    assert "set MASTER_ADDR" in refused(monkeypatch, environment, pipeline_parallel_degree=2)


def test_a_job_on_several_hosts_without_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    text = refused(monkeypatch, ranks_of(2, LOCAL_WORLD_SIZE="1"), pipeline_parallel_degree=2)
    assert "SHARDWRIGHT_SECRET" in text
    assert "allow_insecure_hosts" in text


def test_the_port_of_the_rendezvous_over_several_hosts_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        environment = ranks_of(2, MASTER_PORT=str(port), LOCAL_WORLD_SIZE="1", SHARDWRIGHT_SECRET="of all these ranks")
        text = refused(monkeypatch, environment, pipeline_parallel_degree=2)
    assert f"127.0.0.1:{port}" in text
    assert "in use" in text


def test_another_job_of_this_host_meets_in_the_same_place(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = ranks_of(2, MASTER_PORT=str(next_port()))
    port = environment["MASTER_PORT"]
    # The first start of a process that is yet to come has the number that this process's next one has.
    number = next(rendezvous._starts)
    monkeypatch.setattr(rendezvous, "_starts", iter([number]))
    with socket.socket(socket.AF_UNIX) as another_job:
        another_job.bind(address_of(name_of(int(port), number)))
        another_job.listen()
        text = refused(monkeypatch, environment, pipeline_parallel_degree=2)
    assert f"process {os.getpid()} of user {os.geteuid()} waits already" in text
    assert "MASTER_PORT" in text


def test_rank_0_never_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = ranks_of(2, RANK="1", LOCAL_RANK="1", MASTER_PORT=str(next_port()))
    text = refused(monkeypatch, environment, pipeline_parallel_degree=2, connect_timeout_seconds=1)
    assert re.fullmatch(r"rank 1: waited 1\.\d s for rank 0, which did not start", text)


def files_of(pid: int) -> Iterator[bytes]:
    """What is written in the files that a process holds open, which may have no name, without their holes."""
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # closed meanwhile, or nothing that can be read
            if not path.is_file():
                continue
            with path.open("rb") as file:
                at = 0
                while True:
                    at = os.lseek(file.fileno(), at, os.SEEK_DATA)  # an OSError behind the last
                    end = os.lseek(file.fileno(), at, os.SEEK_HOLE)
                    file.seek(at)
                    yield file.read(end - at)
                    at = end


@pytest.mark.skipif(not hasattr(TCPStore, "list_keys"), reason="this torch does not list the keys of a store")
@pytest.mark.parametrize("hosts", [1, 2])
def test_the_secret_of_a_job_lies_in_no_store_and_no_file(hosts: int, tmp_path: Path) -> None:
    """On one host rank 0 tells it through a socket without a file, and to processes of its own user only."""
    launchers = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    launchers.set("the launcher's", "own")
    given = {"SHARDWRIGHT_SECRET": "what only these ranks know"} if hosts > 1 else {}

    def launch(rank: int, world: int, port: int) -> dict[str, str]:
        own = torchrun_environment(rank, world, launchers.port) | {"TORCHELASTIC_USE_AGENT_STORE": "True"}
        return {**own, "TMPDIR": str(tmp_path), **({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"} if given else {})}

    with Job("training", 2, ["train for ever", '{"ddp": true}'], lambda rank: given, launch=launch) as job:
        job.events("step")
        stores = [launchers]
        if hosts == 1:
            told = ask(name_of(launchers.port), 10.0)
            secret = told.secret
            assert len(secret) == 32
            stores.append(TCPStore("127.0.0.1", told.store, is_master=False))
        else:
            secret = given["SHARDWRIGHT_SECRET"].encode()
        read = [(key.encode(), store.get(key)) for store in stores for key in store.list_keys()]
        files = [one for process in job.ranks for one in files_of(process.pid)]
        unix = Path(f"/proc/{job[0].pid}/net/unix").read_text()
        if hosts == 1:
            assert not any(any_listener_outside(process.pid) for process in job.ranks)
            assert re.search(r"@shardwright/[0-9a-f]{64}$", unix, re.MULTILINE)
        command_lines = [Path(f"/proc/{process.pid}/cmdline").read_bytes() for process in job.ranks]
    assert (b"the launcher's", b"own") in read
    assert len(read) > 2
    assert max(map(len, files)) > 1000  # buffers for tensors
    files += [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    for form in (secret, secret.hex().encode(), base64.b64encode(secret)):
        assert not [one for pair in read for one in pair if form in one]
        assert not [one for one in (*files, *command_lines) if form in one]


def test_a_job_that_encrypts_trains_exactly() -> None:
    with Job("training", arguments=["train", '{"encrypt": true, "transport": "tcp"}']) as job:
        job.all_end_with([0, 0], 60)
        for process in job.ranks:
            assert max(step["error"] for step in process.events("step")) < 1e-10


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"encrypt": "yes"}, "allowed: true or false"),
        ({"encrypt": True, "transport": "ucx"}, '"encrypt" is true, but "transport" is "ucx"'),
        ({"encrypt": True, "allow_insecure_hosts": True}, "no secret from which its keys could come"),
    ],
)
def test_encryption_that_cannot_be(monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any], expected: str) -> None:
    environment = ranks_of(2, LOCAL_WORLD_SIZE="1")
    assert expected in refused(monkeypatch, environment, pipeline_parallel_degree=2, **keys)


def test_another_user_is_told_nothing() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may become another user")
    name = f"a job of process {os.getpid()}"
    place = _core.Rendezvous.open(name, "127.0.0.1", None)
    child = os.fork()
    if child == 0:
        os.setuid(65534)
        with socket.socket(socket.AF_UNIX) as unknown:
            unknown.connect(address_of(name))
            told = unknown.recv(100)
        os._exit(0 if told == b"" else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    told = ask(name, 10.0)
    assert (told.port, len(told.secret)) == (place.port, 32)


def test_a_door_of_another_user_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may become another user")
    name = f"a job that another user waits for, of process {os.getpid()}"
    ready, over = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.setuid(65534)
        with socket.socket(socket.AF_UNIX) as impostor:
            impostor.bind(address_of(name))
            impostor.listen()
            os.write(ready[1], b"x")
            os.read(over[0], 1)
        os._exit(0)
    os.read(ready[0], 1)
    try:
        with pytest.raises(JobStartError, match="a process of user 65534 waits where the ranks of this job of user 0"):
            _core.Rendezvous.find(name, "127.0.0.1", None, 10.0)
    finally:
        os.write(over[1], b"x")
        os.waitpid(child, 0)


def test_the_other_ranks_never_come(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = ranks_of(3, MASTER_PORT=str(next_port()))
    text = refused(monkeypatch, environment, pipeline_parallel_degree=3, connect_timeout_seconds=1)
    assert text.startswith("ranks 1, 2 did not join the job within 1")


def test_a_world_that_the_degrees_do_not_divide(monkeypatch: pytest.MonkeyPatch) -> None:
    text = refused(monkeypatch, ranks_of(3), pipeline_parallel_degree=2, ddp=True)
    assert "3" in text
    assert "2" in text


def test_several_replicas_without_ddp(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "ddp" in refused(monkeypatch, ranks_of(4), pipeline_parallel_degree=2)


def test_a_second_start_with_the_same_configuration_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    smp.init({"microbatches": 2})
    try:
        runtime = current_runtime()
        smp.init(microbatches=2, pipeline="interleaved")
        monkeypatch.setenv("SM_HP_MP_PARAMETERS", '{"microbatches": 2}')
        smp.init()
        assert current_runtime() is runtime
        monkeypatch.delenv("SM_HP_MP_PARAMETERS")
        with pytest.raises(smp.ShardwrightError, match=r"microbatches is 4 and was 2, .*seed is 1 .*shutdown"):
            smp.init(seed=1, microbatches=4)
        with pytest.raises(ConfigError, match="microbatch"):
            smp.init(microbatch=2)
        assert current_runtime() is runtime
        child = os.fork()
        if child == 0:
            try:
                smp.init(microbatches=2)
            except smp.ShardwrightError as error:
                os._exit(0 if "fork" in str(error) else 2)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        smp.shutdown()


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_process_group_of_the_script_meets_at_the_same_port(when: str) -> None:
    """Started by hand: no launcher serves ``MASTER_PORT``."""
    with Job("own_group", arguments=[when]) as job:
        job.all_end_with([0, 0], 60)
        for process in job.ranks:
            done = process.event("done")
            assert done["total"] == [2, 2, 2]
            assert done["error"] < 1e-10


@pytest.mark.parametrize("width", [16, 20_000])
def test_results_can_be_read_when_the_root_has_come_to_its_end(width: int) -> None:
    with Job("late_reader", arguments=["reads", str(width)]) as job:
        job.all_end_with([0, 0], 60)
        assert job[1].event("read")["same"]
        assert ("has finished and waits for ranks [1]" in job[0].err) == (width == 20_000)


@pytest.mark.parametrize(("how", "codes"), [("drops", [0, 0]), ("raises", [1, 0]), ("waits for the other", [0, 1])])
def test_nobody_waits_for_ever_for_a_reader(how: str, codes: list[int]) -> None:
    with Job("late_reader", arguments=[how, "20000"]) as job:
        job.all_end_with(codes, 60)
        assert "Exception ignored" not in job[1].err


def test_a_rank_that_leaves_puts_back_what_it_replaced() -> None:
    with Job("leaving") as job:
        job.all_end_with([0, 0], 60)
        for process in job.ranks:
            left = process.event("left")
            assert left["same"]
            assert left["chained"] == 2
            assert process.err.count("ValueError: after the end") == 2
