"""The effective configuration, from the script and the environment."""

from __future__ import annotations

import json
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwright import _core
from shardwright.errors import ConfigError
from shardwright.logs import logger
from shardwright.safe_repr import safe_repr

#: Holds a JSON object of keys that override those of the script.
ENVIRONMENT_VARIABLE = "SM_HP_MP_PARAMETERS"

#: More than any order of this many ranks and microbatches takes.
_MAX_PROGRAM_BYTES = 64 << 20
#: The names of keys that have two.
_ALIASES = (("partitions", "pipeline_parallel_degree"), ("_prescaled_batch", "prescaled_batch"))


def load_config(
    config: Mapping[str, Any] | None, keys: Mapping[str, Any], environ: Mapping[str, str], world: int | None = None
) -> _core.Config:
    """The effective configuration, checked, from a script's mapping, its keyword arguments, and its environment.

    `SM_HP_MP_PARAMETERS` in the environment overrides the others, key by key; these must not contradict each other.
    With ``world``, the number of ranks, the degrees in ``elastic_degrees`` are lowered to what fits it.

    Raises:
        ConfigError: Names the key, its value, and what is allowed.
    """
    given = merged(config, keys, environ)
    path = _read_program(given)
    try:
        return _core.Config.parse(json.dumps(given), world)
    except ConfigError as error:
        if path is None or "program" not in str(error):
            raise
        raise ConfigError(f"{error} (it was read from the file {path!r})") from None


def check_world(
    cfg: _core.Config, world: int, config: Mapping[str, Any] | None, keys: Mapping[str, Any], environ: Mapping[str, str]
) -> None:
    """Raise, in the words of the keys that were given, if the configuration does not fit the world size."""
    try:
        cfg.check_world(world)
    except ConfigError as error:
        if "partitions" not in merged(config, keys, environ):
            raise
        raise ConfigError(
            f'{error}; "partitions", which was given, is another name of pipeline_parallel_degree'
        ) from None


def log_lowered(cfg: _core.Config, asked: _core.Config, world: int) -> None:
    """Log which degrees are lower than those that were asked for."""
    for name in ("pipeline_parallel_degree", "tensor_parallel_degree", "sharded_data_parallel_degree"):
        if getattr(cfg, name) != getattr(asked, name):
            logger.warning(
                "%s is %d instead of %d, which does not fit %d ranks (elastic_degrees)",
                name,
                getattr(cfg, name),
                getattr(asked, name),
                world,
            )


def merged(config: Mapping[str, Any] | None, keys: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    """Merge the given keys; those of the environment take precedence."""
    given = _given("config", {} if config is None else config)
    for name, value in _given("keyword arguments", keys).items():
        if name in given and given[name] != value:
            raise ConfigError(
                f"the configuration key {name!r} is {safe_repr(given[name])} in config and {safe_repr(value)} as a "
                "keyword argument; give it once"
            )
        given[name] = value
    overriding = _from_environment(environ)
    for names in _ALIASES:
        if any(name in overriding for name in names):  # either overrides both
            for name in names:
                given.pop(name, None)
    return given | overriding


def _read_program(given: dict[str, Any]) -> str | None:
    """Replace the path of a program with its text, which all ranks compare; return the path."""
    path = given.get("pipeline")
    if not isinstance(path, str) or _core.is_schedule(path):
        return None
    try:
        text = text_of(Path(path), _MAX_PROGRAM_BYTES)
    except (OSError, ValueError) as error:
        allowed = next(row[2] for row in _core.Config.keys_table() if row[0] == "pipeline")
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f'the configuration key "pipeline" is {safe_repr(path)}; allowed: {allowed} '
            f"(there is no file to read: {why})"
        ) from None
    try:
        given["pipeline"] = _core.read_program(text)
    except ConfigError as error:
        raise ConfigError(f'the configuration key "pipeline" is the program of the file {path!r}: {error}') from None
    return path


def text_of(path: Path, most_bytes: int) -> str:
    """Read a regular file; reading a device or a pipe might never end.

    Raises:
        OSError: It cannot be read.
        ValueError: It is no regular file of at most so many bytes of UTF-8.
    """
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise ValueError("it is no regular file")
    if found.st_size > most_bytes:
        raise ValueError(f"it has {found.st_size:,} bytes; allowed: {most_bytes:,}")
    return path.read_text(encoding="utf-8")


def _given(where: str, config: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(config, Mapping):
        raise ConfigError(f"{where} is a {type(config).__name__}; allowed: a mapping of keys and values")
    for name, value in config.items():
        if not isinstance(name, str) or not _is_text(name):
            raise ConfigError(f"a configuration key is {safe_repr(name)}; allowed: text")
        if not _is_json(value) and not (name == "pipeline" and _is_list(value)):
            raise ConfigError(
                f"the configuration key {safe_repr(name)} is {safe_repr(value)}, a {type(value).__name__}; allowed: "
                "a boolean, a finite number, text without lone surrogates, or None"
            )
    return dict(config)


def _is_json(value: object) -> bool:
    # Exact types: an IntEnum or a NumPy scalar would change its kind on the way through JSON.
    if type(value) in (int, float):
        return abs(value) <= sys.float_info.max  # type: ignore[arg-type]
    return value is None or type(value) is bool or (type(value) is str and _is_text(value))


def _is_text(text: str) -> bool:
    """Whether the value can be encoded as UTF-8, without lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_list(value: object) -> bool:
    """Whether the value may be a list of starts; the core checks its items."""
    return type(value) in (list, tuple) and all(
        type(entry) in (list, tuple) and all(map(_is_json, entry))
        for entry in value  # type: ignore[attr-defined]
    )


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    text = environ.get(ENVIRONMENT_VARIABLE, "").strip()
    if not text:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the environment variable {ENVIRONMENT_VARIABLE} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(
            f"the environment variable {ENVIRONMENT_VARIABLE} is {safe_repr(text)}; allowed: a JSON object"
        )
    return _given(f"the environment variable {ENVIRONMENT_VARIABLE}", value)
