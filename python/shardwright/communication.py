"""How tensors move between ranks: what is asked for, and ``smp.comm_stats``, what was done."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardwright import _core
from shardwright.errors import ConfigError

#: Switches copies from device to device off.
DISABLE_VARIABLE = "SMP_DISABLE_D2D"
#: The size of the device buffer out of which a rank's tensors are copied.
BUFFER_VARIABLE = "SMP_D2D_GPU_BUFFER_SIZE_BYTES"

_DEFAULT_BUFFER_BYTES = 256 << 20
#: How long a waiting thread looks for a message before it sleeps, and where ranks share processors.
_SPIN_MICROSECONDS, _SHARED_SPIN_MICROSECONDS = 300, 50
#: What a signed size can hold; no device has as much.
_MAX_BUFFER_BYTES = (1 << 63) - 1


@dataclass(frozen=True, kw_only=True)
class DeviceToDevice:
    """What the environment says about copies from device to device.

    Attributes:
        enabled: Whether there may be any.
        buffer_bytes: The size of a rank's persistent device buffer; tensors that find no room in it go through host
            memory.
    """

    enabled: bool = True
    buffer_bytes: int = _DEFAULT_BUFFER_BYTES


def read_device_to_device(environ: Mapping[str, str]) -> DeviceToDevice:
    """Read ``SMP_DISABLE_D2D`` and ``SMP_D2D_GPU_BUFFER_SIZE_BYTES``; a variable that is empty counts as not set.

    Raises:
        ConfigError: Names the variable, its value, and what is allowed.
    """
    disabled = environ.get(DISABLE_VARIABLE, "").strip()
    if disabled not in ("", "0", "1"):
        raise ConfigError(f"the environment variable {DISABLE_VARIABLE} is {disabled!r}; allowed: 0 or 1")
    size = environ.get(BUFFER_VARIABLE, "").strip()
    if size and (not re.fullmatch(r"[0-9]{1,19}", size) or int(size) > _MAX_BUFFER_BYTES):
        raise ConfigError(
            f"the environment variable {BUFFER_VARIABLE} is {size!r}; allowed: an integer from 0 to "
            f"{_MAX_BUFFER_BYTES} (bytes)"
        )
    return DeviceToDevice(
        enabled=disabled != "1",
        buffer_bytes=int(size) if size else _DEFAULT_BUFFER_BYTES,
    )


def spin_microseconds(cfg: Any, local_size: int) -> int:
    """How long a waiting thread looks for a message before it sleeps.

    To fall asleep and be woken takes longer than a short call of another rank's module, and all that runs afterwards
    finds cold caches. Where ranks share processors, looking would take them from each other.
    """
    if cfg.comm_spin_microseconds is not None:
        return int(cfg.comm_spin_microseconds)
    return _SPIN_MICROSECONDS if local_size <= len(os.sched_getaffinity(0)) else _SHARED_SPIN_MICROSECONDS


def comm_options(cfg: Any, environ: Mapping[str, str], local_size: int, *, one_host: bool) -> _core.CommOptions:
    """What the configuration and the environment say, for the core, with so many ranks on this host, or all of them."""
    device_to_device = read_device_to_device(environ)
    return _core.CommOptions(
        transport=cfg.transport,
        one_host=one_host,
        encrypt=cfg.encrypt,
        spin_microseconds=spin_microseconds(cfg, local_size),
        ucx_library=cfg.ucx_library,
        ucx_packages=ucx_packages(),
        device_to_device=device_to_device.enabled,
        device_buffer_bytes=device_to_device.buffer_bytes,
    )


def ucx_packages() -> list[str]:
    """Directories with the UCX libraries of installed Python packages (``libucx-cu12``, ``libucx-cu13``)."""
    found = importlib.util.find_spec("libucx")
    places = (found.submodule_search_locations or []) if found is not None else []
    return [os.path.join(place, "lib") for place in places]
