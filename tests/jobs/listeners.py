"""On which addresses a process listens, as the system tells it."""

from __future__ import annotations

import os
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

_LISTENING = "0A"


def listeners(pid: int) -> list[tuple[IPv4Address | IPv6Address, int]]:
    """Addresses and ports of TCP on which a process listens."""
    own = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            own.add(os.readlink(entry))
        except OSError:  # closed meanwhile
            continue
    found = []
    for table in ("tcp", "tcp6"):
        path = Path(f"/proc/{pid}/net/{table}")
        for line in path.read_text().splitlines()[1:] if path.exists() else []:
            fields = line.split()
            if fields[3] == _LISTENING and f"socket:[{fields[9]}]" in own:
                address, _, port = fields[1].partition(":")
                found.append((_address(address), int(port, 16)))
    return found


def any_listener_outside(pid: int) -> list[tuple[IPv4Address | IPv6Address, int]]:
    """Those that processes of other hosts could reach."""
    return [(address, port) for address, port in listeners(pid) if not address.is_loopback]


def _address(text: str) -> IPv4Address | IPv6Address:
    """From words of 32 bits in the machine's order."""
    words = [bytes.fromhex(text[at : at + 8])[::-1] for at in range(0, len(text), 8)]
    return ip_address(b"".join(words))
