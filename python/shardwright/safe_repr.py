"""Values and foreign text in error messages."""

from __future__ import annotations

#: The maximum number of characters of a value.
_MAX = 200
#: The maximum number of characters of a line.
_MAX_LINE = 4000


def safe_repr(value: object) -> str:
    """``repr(value)``, truncated if it is long; never raises."""
    try:
        text = repr(value)
    except Exception as error:  # the script's own method
        return f"<a value of type {type(value).__name__}, whose repr() raises {type(error).__name__}>"
    return text if len(text) <= _MAX else f"{text[:_MAX]}... ({len(text):,} characters)"


def bounded(text: str) -> str:
    """Text of an error, of whose long lines only the beginning and the end are kept."""
    if len(text) <= _MAX_LINE:
        return text
    return "\n".join(map(_bounded_line, text.split("\n")))


def _bounded_line(line: str) -> str:
    if len(line) <= _MAX_LINE:
        return line
    end = _MAX_LINE // 3
    return f"{line[: _MAX_LINE - end]}... ({len(line)} characters) ...{line[-end:]}"
