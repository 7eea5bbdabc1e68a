"""``smp.save`` and ``smp.load`` with the arguments of the original library."""

from __future__ import annotations

import os
import pickle
from typing import Any

import shardwright
from shardwright import ConfigError


def save(
    obj: Any,
    f: str,
    partial: bool = True,
    pickle_module: Any = pickle,
    pickle_protocol: int = 2,
    v3: bool = False,
) -> None:
    """Save a value in a file, without pickle; see ``shardwright.save``.

    Args:
        obj: The value.
        f: The path.
        partial: Add the rank's place, ``_{pp_rank}_{tp_rank}``, to the path.
        pickle_module: Nothing but ``pickle``, which is not used.
        pickle_protocol: Without effect.
        v3: With ``partial``, add the rank's place in RDP_GROUP too.

    Raises:
        ConfigError: ``pickle_module`` is another one.
    """
    shardwright.save(obj, f, partial, pickle_module, pickle_protocol, v3=v3)


def load(
    f: str,
    map_location: Any = None,
    pickle_module: Any = pickle,
    pickle_load_args: Any = None,
    partial: bool = True,
    back_compat: bool = False,
) -> Any:
    """Load what :func:`save` saved, or ``torch.save``; see ``shardwright.load``.

    Args:
        f: The path, as it was given to :func:`save`.
        map_location: The device of tensors; by default the CPU.
        pickle_module: Nothing but ``pickle``, which is not used.
        pickle_load_args: Nothing but None or {}.
        partial: Load the file of this rank's place, whether it was saved with ``v3`` or not.
        back_compat: With ``partial``, the file has the name that versions before 1.6 gave it, ``_{mp_rank}``.

    Raises:
        ConfigError: ``pickle_module`` or ``pickle_load_args`` is another one.
    """
    if pickle_load_args:
        raise ConfigError(
            f"smp.load: pickle_load_args is {pickle_load_args!r}, but nothing is unpickled; allowed: None"
        )
    of_shards = False
    if partial and not back_compat and isinstance(f, str):
        place = f"{f}_{shardwright.pp_rank()}_{shardwright.tp_rank()}"
        of_shards = not os.path.exists(place) and os.path.exists(f"{place}_{shardwright.rdp_rank()}")
    return shardwright.load(
        f, map_location, partial, pickle_module=pickle_module, back_compat=back_compat, v3=of_shards
    )
