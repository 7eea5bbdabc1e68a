"""Values in the texts of errors."""

from __future__ import annotations

#: The most characters of a value in a text.
_MOST = 200


def shown(value: object) -> str:
    """``repr(value)``, cut where it is long, whatever the value's own method does."""
    try:
        text = repr(value)
    except Exception as error:  # the script's own method
        return f"<a value of type {type(value).__name__}, whose repr() raises {type(error).__name__}>"
    return text if len(text) <= _MOST else f"{text[:_MOST]}... ({len(text):,} characters)"
