"""How tensors move between ranks: what the configuration and the environment ask for."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping

from shardwright import _core


def comm_options(
    cfg: _core.Config, environ: Mapping[str, str], local_size: int, *, one_host: bool
) -> _core.CommOptions:
    """What the configuration and the environment say, for the core, with some or all of the ranks on this host."""
    return _core.CommOptions(cfg, environ, local_size, ucx_packages(), one_host=one_host)


def ucx_packages() -> list[str]:
    """Directories with the UCX libraries of installed Python packages (``libucx-cu12``, ``libucx-cu13``)."""
    found = importlib.util.find_spec("libucx")
    places = (found.submodule_search_locations or []) if found is not None else []
    return [os.path.join(place, "lib") for place in places]
