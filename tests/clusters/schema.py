"""Checks documents against `schemas.json`: all fields of the types that the manifests use.

The fields are those of the API models of Kubeflow Trainer 2.3 (TrainJob, JobSet) and Training Operator 1.9, and of
Kubernetes 1.37. A type is its name, ``list`` or ``map`` and a type, or the type of a single value.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_SCHEMAS = json.loads(Path(__file__).with_name("schemas.json").read_text())
_SINGLE = {
    "string": str,
    "integer": int,
    "boolean": bool,
    "string or number": (str, int, float),
}


def problems(document: dict[str, Any]) -> list[str]:
    """Return what in a document its kind does not allow."""
    root = _SCHEMAS["roots"][f"{document['apiVersion']} {document['kind']}"]
    return list(_problems(root, document, document["kind"]))


def _problems(kind: str, value: Any, place: str) -> Iterator[str]:
    outer, _, inner = kind.partition(" ")
    if outer in ("list", "map"):
        if not isinstance(value, list if outer == "list" else dict):
            yield f"{place} is {value!r}, not a {outer}"
            return
        for name, one in enumerate(value) if outer == "list" else value.items():
            yield from _problems(inner, one, f"{place}.{name}")
        return
    described = _SCHEMAS["types"].get(kind, kind)
    if isinstance(described, str):
        is_other = isinstance(value, bool) and described != "boolean"  # which Python takes for a number
        if described not in _SINGLE:
            yield f"{place}: the type {described} is missing in schemas.json"
        elif is_other or not isinstance(value, _SINGLE[described]):
            yield f"{place} is {value!r}; allowed: {described}"
        return
    if not isinstance(value, dict):
        yield f"{place} is {value!r}, not a {kind}"
        return
    yield from (f"{place} lacks {name}" for name in described["required"] if name not in value)
    for name, one in value.items():
        if name in described["fields"]:
            yield from _problems(described["fields"][name], one, f"{place}.{name}")
        else:
            yield f"{place}.{name} is not a field of {kind}"
