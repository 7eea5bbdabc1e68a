"""Without Ray, its module says what to install."""

from __future__ import annotations

import importlib
import sys

import pytest


def test_the_module_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "shardwright.ray", raising=False)
    with pytest.raises(ImportError, match=r"needs Ray Train: pip install 'shardwright\[ray\]'"):
        importlib.import_module("shardwright.ray")
