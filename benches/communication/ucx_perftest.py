"""UCX's own test between two processes, and ours of the layer above it in Rust: runs them, reads what they print."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from benches.communication.figures import KIB, MIB
from benches.ranks import free_port

#: Which transports it may use; its own choice copies large messages across processes, which is slow on some machines.
TRANSPORTS = {"posix": "posix,self,tcp", "its own choice": "all"}
#: Its two ways to move messages. A round trip gives the latency, a stream with 32 sends in flight the bandwidth.
TESTS = {"tag": ("tag_lat", "tag_bw"), "am": ("ucp_am_lat", "ucp_am_bw")}
#: Iterations of a round trip and of a stream, about a tenth of a second each.
_ITERATIONS = {64: (100_000, 400_000), 4 * KIB: (50_000, 200_000), 256 * KIB: (4_000, 8_000), 4 * MIB: (300, 600)}
_ITERATIONS[64 * MIB] = (10, 20)
_START_SECONDS = 5.0
#: So often it is started: another program may take the port that was free a moment before.
_STARTS = 3


@dataclass(frozen=True)
class Line:
    """What it says about one test: the median one-way time, and the bandwidth of the whole test."""

    microseconds: float
    gigabytes_per_second: float


def parse(text: str) -> dict[str, Line]:
    """The lines of a batch, by the name of the test."""
    found = {}
    for line in text.splitlines():
        name, *columns = line.split() or [""]
        try:
            numbers = [float(column) for column in columns]
        except ValueError:
            continue  # a heading, or a warning
        if len(numbers) == 8:
            # Iterations; median, mean and overall latency; mean and overall bandwidth, in MB of 2^20 bytes; two rates.
            found[name] = Line(numbers[1], numbers[5] * MIB / 1e9)
    return found


def batch(size: int, scale: float) -> str:
    """A batch file: every way as round trip and as stream."""
    lines = []
    for way, tests in TESTS.items():
        for what, test, iterations in zip(("latency", "stream"), tests, _ITERATIONS[size], strict=True):
            number = max(4, int(iterations * scale))
            lines.append(f"{way}_{what} -t {test} -s {size} -n {number} -w {max(2, number // 10)}")
    return "\n".join(lines) + "\n"


def run(libucx: Path, folder: Path, transports: str, size: int, scale: float, seconds: float) -> dict[str, Line]:
    """Run one batch between two processes; the tests that did not end in time are missing."""
    for _ in range(_STARTS - 1):
        with contextlib.suppress(TimeoutError):
            return _run_once(libucx, folder, transports, size, scale, seconds)
    return _run_once(libucx, folder, transports, size, scale, seconds)


def _run_once(libucx: Path, folder: Path, transports: str, size: int, scale: float, seconds: float) -> dict[str, Line]:
    port = free_port()
    file = folder / "ucx_perftest.batch"
    file.write_text(batch(size, scale))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")}
    environment |= {"UCX_TLS": transports, "LD_LIBRARY_PATH": f"{libucx / 'lib'}:{libucx / 'lib' / 'ucx'}"}
    environment["UCX_WARN_UNUSED_ENV_VARS"] = "n"
    command = [str(libucx / "bin" / "ucx_perftest"), "-p", str(port), "-f", "-b", str(file)]
    deadline = time.monotonic() + seconds
    output = folder / "ucx_perftest.out"
    with output.open("w") as out, (folder / "ucx_perftest.server").open("w") as server_out:
        server = subprocess.Popen(command, env=environment, stdout=server_out, stderr=server_out)
        client: subprocess.Popen[bytes] | None = None
        try:
            _wait_for_listener(server, port, time.monotonic() + _START_SECONDS)
            client = subprocess.Popen([*command, "127.0.0.1", "-t", "tag_lat"], env=environment, stdout=out, stderr=out)
            for started in (client, server):
                started.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            pass
        finally:
            for process in (client, server):
                if process is not None:
                    process.kill()
                    process.wait()
    return parse(output.read_text())


def parse_ping_pong(text: str, size: int) -> float | None:
    """The median one-way microseconds of messages of ``size`` bytes while both sides spin."""
    found = re.search(rf"^ *spinning +{size} B one way .*median +([0-9.]+) us", text, re.MULTILINE)
    return float(found[1]) if found else None


def spinning_in_rust(example: Path, libucx: Path, size: int) -> float | None:
    """Run the ping-pong of ``crates/ucx``; None, and its reason on standard error, when it gave no figure."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")}
    environment |= {"ONLY": "latency", "LD_LIBRARY_PATH": f"{libucx / 'lib'}:{libucx / 'lib' / 'ucx'}"}
    command = [str(example), str(libucx / "lib")]
    try:
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=20)
    except subprocess.TimeoutExpired:
        print(f"\n{example.name} did not end within 20 s", file=sys.stderr)
        return None
    figure = parse_ping_pong(ended.stdout, size)
    if figure is None:
        print(
            f"\n{example.name} gave no figure for {size} bytes: {(ended.stdout + ended.stderr)[-500:]}", file=sys.stderr
        )
    return figure


def _wait_for_listener(server: subprocess.Popen[bytes], port: int, deadline: float) -> None:
    """Look for the listening socket in the kernel's table: to connect would use up the only connection it takes."""
    wanted = f":{port:04X}"
    while time.monotonic() < deadline and server.poll() is None:
        for name in ("tcp", "tcp6"):
            for line in Path("/proc/net", name).read_text().splitlines()[1:]:
                columns = line.split()
                if columns[1].endswith(wanted) and columns[3] == "0A":
                    return
        time.sleep(0.002)
    ended = "" if server.poll() is None else f": it ended with status {server.returncode}"
    raise TimeoutError(f"ucx_perftest did not listen on port {port} within {_START_SECONDS:g} s{ended}")
