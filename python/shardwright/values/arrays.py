"""NumPy's arrays, scalars and dtypes as values; nothing of it is imported before a script has."""

from __future__ import annotations

import sys
from typing import Any

import torch

from shardwright.errors import UnsupportedValueError

#: A dtype as its description, sizes, order in memory, whether it may be written, and the bytes.
Fields = tuple[Any, tuple[int, ...], str, bool, torch.Tensor]


def is_array(value: object) -> bool:
    """Whether something is an array of NumPy, of whatever class."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def array_fields(array: Any) -> Fields:
    """An array's bytes as a tensor: large ones then stay with the rank that made them, as tensors do.

    They are copied, because nothing says when an array is written to.
    """
    import numpy

    described = describe(array.dtype)
    order = "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"
    data = numpy.frombuffer(bytearray(array.tobytes(order)), numpy.uint8)
    return described, array.shape, order, bool(array.flags.writeable), torch.from_numpy(data)


def array_of(fields: Fields) -> Any:
    """The array again; it owns its memory alone."""
    import numpy

    described, shape, order, writeable, data = fields
    array: Any = numpy.ndarray(shape, _dtype_of(described), data.numpy(), order="F" if order == "F" else "C")
    array.flags.writeable = writeable
    return array


def scalar_fields(scalar: Any) -> tuple[Any, bytes]:
    """A scalar as its dtype and bytes."""
    return describe(scalar.dtype), scalar.tobytes()


def scalar_of(fields: tuple[Any, bytes]) -> Any:
    """The scalar again."""
    import numpy

    described, data = fields
    return numpy.frombuffer(data, _dtype_of(described), 1)[0] if data else _dtype_of(described).type()


def describe(dtype: Any) -> Any:
    """A dtype as text, or a list of its fields.

    Raises:
        UnsupportedValueError: Its elements are Python objects.
    """
    import numpy

    if not dtype.hasobject:
        described = numpy.lib.format.dtype_to_descr(dtype)
        if numpy.lib.format.descr_to_dtype(described) == dtype:
            return described
    raise UnsupportedValueError(
        f"a NumPy array of dtype {dtype} cannot cross ranks, because its elements are more than bytes; pass its "
        "tolist(), or an array of numbers"
    )


def _dtype_of(described: Any) -> Any:
    import numpy

    dtype = numpy.lib.format.descr_to_dtype(described)
    if dtype.hasobject:
        raise UnsupportedValueError(f"an array of dtype {dtype} has arrived, whose elements are not bytes")
    return dtype
