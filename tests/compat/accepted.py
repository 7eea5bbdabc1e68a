"""What of the table's configuration keys the library takes."""

from __future__ import annotations

from shardwright.config import load_config
from shardwright.errors import ConfigError

from tests.compat.interface import KEYS, Key
from tests.compat.interface.rows import InWords


def refused() -> list[Key]:
    """Return the keys that take no value but their default, for a reason."""
    return [key for key in KEYS if key.refused]


def problems(key: Key) -> list[str]:
    """Return what is wrong with a key: a value that is not taken, or is taken and should not, or another default."""
    found = []
    for value in key.values:
        try:
            kept = getattr(load_config({**key.beside, key.name: value}, {}, {}), key.name)
        except ConfigError as error:
            found.append(f"{key.name}: {value!r} is refused: {error}")
            continue
        if kept != value or type(kept) is not type(value):
            found.append(f"{key.name}: {value!r} becomes {kept!r}")
    if key.values and not isinstance(key.default, InWords):
        default = getattr(load_config({}, {}, {}), key.name)
        if default != key.default:
            found.append(f"{key.name} is {default!r} by default, and was {key.default!r}")
    for value in key.refused_values:
        try:
            load_config({**key.beside, key.name: value}, {}, {})
        except ConfigError as error:
            if key.name not in str(error) or key.refused not in str(error):
                found.append(f"{key.name}: {value!r} is refused without a reason: {error}")
        else:
            found.append(f"{key.name}: {value!r} is not refused")
    return found
