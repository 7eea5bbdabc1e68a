"""What of the table's configuration keys the library takes, as the old import path reads them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from shardwright import _core
from shardwright.config import check_world, load_config
from shardwright.errors import ConfigError

from tests.compat.interface import KEYS, Key
from tests.compat.interface.rows import InWords


def refused() -> list[Key]:
    """Return the keys that take no value but such as switch nothing on, for a reason."""
    return [key for key in KEYS if key.refused]


def read(config: Mapping[str, Any], ranks: int | None = None) -> tuple[Any, list[str]]:
    """Read a configuration as ``smp.init`` of the old import path does, for a job of so many ranks.

    Returns:
        What came of it, and why each key that switches nothing on does not.

    Raises:
        ConfigError: It is refused.
    """
    idle = _core.Config.without_effect(json.dumps(config))
    names = {name for name, _, _ in idle}
    kept = {name: value for name, value in config.items() if name not in names}
    cfg = load_config(kept, {}, {})
    if ranks is not None:
        check_world(cfg, ranks, kept, {}, {})
    return cfg, [f"{name}: {why}" for name, _, why in idle]


def problems(key: Key) -> list[str]:
    """Return what is wrong with a key: a value that is not taken, or is taken and should not, or another default."""
    found = []
    for value in key.values:
        try:
            cfg, idle = read({**key.beside, key.name: value})
        except ConfigError as error:
            found.append(f"{key.name}: {value!r} is refused: {error}")
            continue
        kept = value if any(one.startswith(f"{key.name}: ") for one in idle) else getattr(cfg, key.name)
        if kept != value or type(kept) is not type(value):
            found.append(f"{key.name}: {value!r} becomes {kept!r}")
    known = {row[0] for row in _core.Config.keys_table()}
    if key.name in known and not isinstance(key.default, InWords):
        default = getattr(load_config({}, {}, {}), key.name)
        if default != key.default:
            found.append(f"{key.name} is {default!r} by default, and was {key.default!r}")
    for value in key.refused_values:
        try:
            read({**key.beside, key.name: value})
        except ConfigError as error:
            if key.name not in str(error) or key.refused not in str(error):
                found.append(f"{key.name}: {value!r} is refused without a reason: {error}")
        else:
            found.append(f"{key.name}: {value!r} is not refused")
    return found
