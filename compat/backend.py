"""Builds the distribution with setuptools, unless the environment has another package of its name.

Wheels run no code when they are installed, so this is seen only where the environment that builds is the one that is
installed into (``pip install --no-build-isolation``). Everywhere else the first import sees it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import (
    build_sdist,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_wheel",
]

#: A file that no other package of the name has.
_OURS = "_alone.py"


def refuse_others(path: Iterable[str]) -> None:
    """Raise if a folder of a search path has a ``smdistributed.modelparallel`` that is not this one.

    Raises:
        RuntimeError: It has, and installing this one would overwrite its files.
    """
    for folder in path:
        other = Path(folder or ".", "smdistributed", "modelparallel")
        if other.is_dir() and not (other / _OURS).exists():
            raise RuntimeError(
                f"{other} belongs to another package: shardwright-smdistributed would overwrite its files. Uninstall "
                "that package first, or take an environment without it"
            )


def build_wheel(wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None) -> str:
    """Build the wheel; see PEP 517."""
    refuse_others(sys.path)
    name: str = build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)
    return name
