"""Values as configuration files have them: numbers in quotes, ``yes`` and ``no``, ``auto``."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from shardwright.errors import ConfigError

_ON = ("true", "yes", "y", "t", "on", "1")
_OFF = ("false", "no", "n", "f", "off", "0", "none", "")
_MOST_SHOWN = 80


def shown(value: object) -> str:
    """Return a value in one line, as JSON where it is of JSON's kinds."""
    return json.dumps(value, ensure_ascii=False, default=str)


def shortened(value: object) -> str:
    """Return a value in one line that is not long."""
    text = shown(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def is_given(value: object) -> bool:
    """Return whether a key says something: neither nothing, nor that another is to say it."""
    return value is not None and value != "auto"


def is_off(value: object) -> bool:
    """Return whether a value switches off what its key stands for."""
    if isinstance(value, str):
        return value.lower() in _OFF
    return not value


class Section:
    """The keys of a mapping in a file; whose values may be missing, but not of another kind.

    Args:
        name: The mapping's name in the file, empty for the file itself.
        entries: Its keys and values.
        prefix: What may stand before the name of a key, and need not.
    """

    def __init__(self, name: str, entries: object, prefix: str = "") -> None:
        """Keep the keys and values."""
        if not isinstance(entries, Mapping | None):
            raise ConfigError(f"the key {name} is {shortened(entries)}; allowed: keys and values")
        self.name, self.prefix = name, prefix
        #: The keys as the file has them.
        self.entries: dict[str, Any] = {str(key): value for key, value in (entries or {}).items()}
        self._values = {self.known_as(key): value for key, value in self.entries.items()}

    def known_as(self, key: str) -> str:
        """Return the name of a key without its prefix."""
        return key.removeprefix(self.prefix)

    def path(self, key: str) -> str:
        """Return the name of a key with those of the mappings that it is in."""
        return f"{self.name}.{key}" if self.name else key

    def get(self, key: str) -> Any:
        """Return what a key is given as; None where it is not, and where it is left to others (``auto``)."""
        value = self._values.get(key)
        return value if is_given(value) else None

    def within(self, key: str, prefix: str = "") -> Section:
        """Return the keys of a mapping in this one."""
        value = self._values.get(key)
        return Section(self.path(key), value if is_given(value) and value != "none" else None, prefix)

    def flag(self, key: str, otherwise: bool = False) -> bool:
        """Return a value that is true or false."""
        value = self.get(key)
        if value is None:
            return otherwise
        if isinstance(value, bool | int) or (isinstance(value, str) and value.lower() in _ON + _OFF):
            return not is_off(value)
        raise self._refused(key, "true or false")

    def whole(self, key: str, otherwise: int, fewest: int = 0) -> int:
        """Return a value that is a whole number."""
        value = self.get(key)
        if value is None:
            return otherwise
        number = _number(value)
        if number is None or not number.is_integer() or number < fewest:
            raise self._refused(key, f"a whole number of {fewest} or more")
        return int(number)

    def number(self, key: str, otherwise: float) -> float:
        """Return a value that is a number of 0 or more."""
        value = self.get(key)
        if value is None:
            return otherwise
        number = _number(value)
        if number is None or number < 0:
            raise self._refused(key, "a number of 0 or more")
        return number

    def text(self, key: str, otherwise: str = "") -> str:
        """Return a value that is text or a number; what is off is ``no``."""
        value = self.get(key)
        if value is None:
            return otherwise
        if isinstance(value, bool):  # which YAML makes of a plain no
            return "yes" if value else "no"
        if isinstance(value, str | int | float):
            return str(value)
        raise self._refused(key, "text")

    def _refused(self, key: str, allowed: str) -> ConfigError:
        return ConfigError(f"the key {self.path(key)} is {shortened(self._values[key])}; allowed: {allowed}")


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None
