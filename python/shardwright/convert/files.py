"""Configuration files, read as accelerate reads them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwright.config import text_of
from shardwright.convert.values import shortened
from shardwright.errors import ConfigError

_MOST_BYTES = 16 << 20


def read(path: str) -> dict[str, Any]:
    """Return the keys of a file: JSON by its name, and else YAML.

    Raises:
        ConfigError: It is not there, or is none of both, or has no keys.
    """
    try:
        text = text_of(Path(path), _MOST_BYTES)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"cannot read {shortened(path)}: {why}") from None
    found = _json(path, text) if path.endswith(".json") else _yaml(path, text)
    if not isinstance(found, Mapping):
        raise ConfigError(f"{shortened(path)} has no keys and values, but {shortened(found)}")
    return {str(key): value for key, value in found.items()}


def _json(path: str, text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{shortened(path)} is not valid JSON: {error}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse a key that is there twice, of which one would be lost."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {shortened(key)} is there twice")
        found[key] = value
    return found


def _yaml(path: str, text: str) -> Any:
    try:
        import yaml
    except ImportError:
        raise ConfigError("reading YAML needs PyYAML, which accelerate has too: pip install pyyaml") from None

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        """As accelerate's, but that a key is there once."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            keys = [self.construct_object(key, deep=True) for key, _ in node.value]
            twice = next((key for number, key in enumerate(keys) if key in keys[:number]), None)
            if twice is not None:
                raise ValueError(f"the key {shortened(twice)} is there twice")
            made: dict[Any, Any] = super().construct_mapping(node, deep)
            return made

    try:
        return yaml.load(text, Loader)
    except (yaml.YAMLError, ValueError, RecursionError, TypeError) as error:
        raise ConfigError(f"{shortened(path)} is not valid YAML: {' '.join(str(error).split())}") from None
