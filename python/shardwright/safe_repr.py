"""Values in error messages."""

from __future__ import annotations

#: The maximum number of characters.
_MAX = 200


def safe_repr(value: object) -> str:
    """``repr(value)``, truncated if it is long; never raises."""
    try:
        text = repr(value)
    except Exception as error:  # the script's own method
        return f"<a value of type {type(value).__name__}, whose repr() raises {type(error).__name__}>"
    return text if len(text) <= _MAX else f"{text[:_MAX]}... ({len(text):,} characters)"
