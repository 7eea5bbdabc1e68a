"""The rows of the table."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

SMP = "smdistributed.modelparallel.torch"


@dataclass(frozen=True)
class Symbol:
    """A function, class, module or attribute.

    Attributes:
        name: As scripts have it.
        group: What it is about; the heading in the guide.
        signature: Its parameters with their defaults, as in a ``def``; None if it is not called.
        path: Where it is, ``module:name.of.attribute``; by default what ``name`` says.
        made: Of an attribute that only objects have: how the object is made, a name in ``tests.compat.found``.
        here: What a script that imports ``shardwright as smp`` writes, where that is something else.
        differs: What is different here, and why.
        other_defaults: Parameters whose defaults differ; ``differs`` says how.
        refused: Why it is not here.
    """

    name: str
    group: str
    signature: str | None = None
    path: str = ""
    made: str = ""
    here: str = ""
    differs: str = ""
    other_defaults: tuple[str, ...] = ()
    refused: str = ""

    @property
    def place(self) -> tuple[str, list[str]]:
        """The module, and the attributes that lead to it."""
        if self.path:
            module, _, attributes = self.path.partition(":")
            return module, attributes.split(".") if attributes else []
        return SMP, self.name.removeprefix("smp.").split(".")


@dataclass(frozen=True)
class Key:
    """A configuration key.

    Attributes:
        name: The key.
        group: What it is about; the heading in the guide.
        default: Its default in the original library; a text in words where other keys decide.
        values: Values that the original library takes, each with the further keys in ``beside``.
        beside: Keys without which the values are refused.
        refused_values: Values that the original library takes and this one refuses.
        differs: What is different here, and why.
        refused: Why the key has no effect other than its default's; the reason is a part of the error.
    """

    name: str
    group: str
    default: Any
    values: tuple[Any, ...]
    beside: dict[str, Any] = field(default_factory=dict)
    refused_values: tuple[Any, ...] = ()
    differs: str = ""
    refused: str = ""

    @property
    def shown_default(self) -> str:
        """The default as the guide shows it."""
        return self.default if isinstance(self.default, InWords) else f"`{json.dumps(self.default)}`"


class InWords(str):
    """A default that depends on other keys."""
