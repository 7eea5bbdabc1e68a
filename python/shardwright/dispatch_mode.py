"""Base class of the library's dispatch modes."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A ``TorchDispatchMode`` that does not import torch's compiler."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Avoid the import of torch's compiler, which takes seconds and 80 MiB."""
        return False


def write_positions(function: Any) -> tuple[tuple[int, str], ...]:
    """Return index and name of the arguments that an operator writes to according to its schema."""
    schema = getattr(function, "_schema", None)
    if schema is None or not schema.is_mutable:
        return ()
    return tuple(
        (index, argument.name)
        for index, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
