"""The precision of ``float32`` matrix products and convolutions, which torch stores under older and newer names.

The older names cannot be read while the newer ones contradict them. All are read together, as one string, and read
again only after one of them is set, because reading them takes longer than reading all other settings together.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from shardwright.patches import original_of


class _Older(NamedTuple):
    get: Callable[[], Any]
    set: Callable[[Any], None]
    values: tuple[Any, ...]


_UNREADABLE = "?"
_OLDER = (
    _Older(
        torch._C._get_float32_matmul_precision,
        torch._C._set_float32_matmul_precision,
        ("highest", "high", "medium"),
    ),
    _Older(torch._C._get_cudnn_allow_tf32, torch._C._set_cudnn_allow_tf32, (False, True)),
    # Not set: it follows the first, and is readable where the first is not.
    _Older(torch._C._get_cublas_allow_tf32, torch._C._set_cublas_allow_tf32, ()),
)
#: By backend and operation, since torch 2.9; an entry without a value inherits that of a more general one.
_get_newer: Callable[[str, str], str] = getattr(torch._C, "_get_fp32_precision_getter", None)  # type: ignore[assignment]
_set_newer: Callable[[str, str, str], Any] = getattr(torch._C, "_set_fp32_precision_setter", None)  # type: ignore[assignment]
_BACK_ENDS = ("cuda", "mkldnn")
_NEWER = (
    ("generic", "all"),
    *((back_end, "all") for back_end in _BACK_ENDS),
    *itertools.product(_BACK_ENDS, ("matmul", "conv", "rnn")),
)

#: The precisions read last; None if one may have been set since.
_known: str | None = None


def precision() -> str:
    """Return all current precisions as one string."""
    global _known
    if _known is None:
        newer = [] if _get_newer is None else [_get_newer(*key) for key in _NEWER]
        _known = " ".join([*map(_text, _OLDER), *newer])
    return _known


def _text(older: _Older) -> str:
    try:
        return str(older.get())
    except RuntimeError:
        return _UNREADABLE


def set_precision(wanted: str) -> None:
    """Set all precisions to a string returned by :func:`precision`."""
    texts = wanted.split()
    # Set an older name only if setting the newer ones is not enough, because it sets some of them too.
    choices = [
        (None, *(value for value in older.values if text in (_UNREADABLE, str(value))))
        for older, text in zip(_OLDER, texts, strict=False)
    ]
    for values in itertools.product(*choices):
        for older, value in zip(_OLDER, values, strict=True):
            if value is not None:
                older.set(value)
        for key, text in zip(_NEWER, texts[len(_OLDER) :], strict=False):
            if _get_newer(*key) != text:
                _set_newer(*key, text)
        forget()
        if precision() == wanted:
            return


def forget() -> None:
    """Discard the precisions read last, because they may have been set since."""
    global _known
    _known = None


def _forgetting() -> Callable[..., Any]:
    def set_(*args: Any) -> Any:
        try:
            return original_of(set_)(*args)
        finally:
            forget()

    return set_


#: Replacements of the functions of ``torch._C`` that set a precision.
SETTERS = {
    name: _forgetting()
    for name in (
        "_set_float32_matmul_precision",
        "_set_cublas_allow_tf32",
        "_set_cudnn_allow_tf32",
        "_set_fp32_precision_setter",
    )
    if hasattr(torch._C, name)
}
#: The replacement of the setters that properties of ``torch.backends`` hold.
set_property = _forgetting()
