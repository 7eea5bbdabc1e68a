"""Hosts that are network namespaces of this machine, each with a link to a router that delays what it forwards."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import uuid
from pathlib import Path

from tests.jobs.patience import HANG_SECONDS

RELAY = Path(__file__).with_name("relay.py")
#: What the hosts call their link.
LINK = "eth0"


def missing() -> str | None:
    """Why this machine cannot rehearse several hosts, if it cannot."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for program in ("ip", "tc", "unshare"):
        if shutil.which(program) is None:
            return f"{program} is missing (packages iproute2, util-linux)"
    if not Path("/dev/net/tun").exists():
        return "there is no /dev/net/tun"
    return None


def run(*command: str) -> None:
    """A command that has to succeed."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")


class Network:
    """Hosts ``node-0``, ``node-1`` and so on, and the router between them; leaving it removes all of it.

    A packet from one host to another goes over the sender's link, which ``tbf`` slows down, into the router; there, a
    rule sends it through a TUN device, whose relay hands it back after the delay, and then over the receiver's link.
    """

    def __init__(self, hosts: int, rate: str = "1gbit", delay_milliseconds: float = 20.0) -> None:
        self.hosts = hosts
        self._rate = rate
        self._delay = delay_milliseconds
        self._name = f"sw{uuid.uuid4().hex[:6]}"
        self._relay: subprocess.Popen[str] | None = None
        self._made: list[str] = []

    def __enter__(self) -> Network:
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def address(self, host: int) -> str:
        """A host's address."""
        return f"10.99.{host}.2"

    def prefix(self, host: int) -> list[str]:
        """What to put before a command to run it on a host."""
        rename = f'hostname node-{host} && exec "$@"'
        return ["ip", "netns", "exec", self._host(host), "unshare", "--uts", "--ipc", "sh", "-c", rename, "sh"]

    def cut(self, host: int) -> None:
        """Cut a host's link; what is on its way is lost, and nobody is told."""
        run("ip", "-n", self._router, "link", "set", f"link{host}", "down")

    def restore(self, host: int) -> None:
        """Join a cut link again."""
        run("ip", "-n", self._router, "link", "set", f"link{host}", "up")

    @property
    def _router(self) -> str:
        return f"{self._name}-router"

    def _host(self, host: int) -> str:
        return f"{self._name}-{host}"

    def _add(self, name: str) -> None:
        run("ip", "netns", "add", name)
        self._made.append(name)
        run("ip", "-n", name, "link", "set", "lo", "up")

    def _make(self) -> None:
        self._add(self._router)
        # Packets come back from the relay by another device than they came by at first.
        settings = "set -e; cd /proc/sys/net/ipv4; echo 1 > ip_forward; echo 0 | tee conf/*/rp_filter"
        run("ip", "netns", "exec", self._router, "sh", "-c", settings)
        inside = ["ip", "netns", "exec", self._router]
        command = [*inside, sys.executable, str(RELAY), "delay", str(self._delay)]
        self._relay = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._relay.stdout is not None
        if self._relay.stdout.readline() != "ready\n":
            raise RuntimeError("the relay did not start")
        run("ip", "-n", self._router, "link", "set", "delay", "up", "mtu", "1500", "txqueuelen", "10000")
        run("ip", "-n", self._router, "route", "add", "default", "dev", "delay", "table", "100")
        for host in range(self.hosts):
            self._connect(host)

    def _connect(self, host: int) -> None:
        name, link, router = self._host(host), f"link{host}", self._router
        self._add(name)
        run("ip", "-n", router, "link", "add", link, "type", "veth", "peer", "name", LINK, "netns", name)
        run("ip", "-n", router, "address", "add", f"10.99.{host}.1/24", "dev", link)
        run("ip", "-n", router, "link", "set", link, "up")
        run("ip", "-n", router, "rule", "add", "iif", link, "lookup", "100")
        run("ip", "-n", name, "address", "add", f"{self.address(host)}/24", "dev", LINK)
        run("ip", "-n", name, "link", "set", LINK, "up")
        run("ip", "-n", name, "route", "add", "default", "via", f"10.99.{host}.1")
        shape = ["tbf", "rate", self._rate, "burst", "256kb", "latency", "100ms"]
        run("tc", "-n", name, "qdisc", "add", "dev", LINK, "root", *shape)

    def _remove(self) -> None:
        if self._relay is not None:
            self._relay.kill()
            self._relay.communicate(timeout=HANG_SECONDS)
        for name in reversed(self._made):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=HANG_SECONDS)
        self._made.clear()
