"""NumPy arrays, scalars and dtypes as values; NumPy is not imported before the script imports it."""

from __future__ import annotations

import sys
from typing import Any

import torch

from shardwright.errors import UnsupportedValueError

#: An array: description of the dtype, shape, memory order, whether it is writeable, and its bytes.
Fields = tuple[Any, tuple[int, ...], str, bool, torch.Tensor]


def is_array(value: object) -> bool:
    """Return whether a value is a NumPy array or an instance of a subclass."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def array_fields(array: Any) -> Fields:
    """Take an array apart, with its bytes as a tensor, so that large ones can stay on the rank that created them.

    The bytes are copied, because writes to an array cannot be detected.
    """
    import numpy

    described = describe(array.dtype)
    order = "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"
    data = numpy.frombuffer(bytearray(array.tobytes(order)), numpy.uint8)
    return described, array.shape, order, bool(array.flags.writeable), torch.from_numpy(data)


def array_of(fields: Fields) -> Any:
    """Build an array from its fields; it shares its memory with no other array."""
    import numpy

    described, shape, order, writeable, data = fields
    array: Any = numpy.ndarray(shape, _dtype_of(described), data.numpy(), order="F" if order == "F" else "C")
    array.flags.writeable = writeable
    return array


def scalar_fields(scalar: Any) -> tuple[Any, bytes]:
    """Return the description of a scalar's dtype, and its bytes."""
    return describe(scalar.dtype), scalar.tobytes()


def scalar_of(fields: tuple[Any, bytes]) -> Any:
    """Build a scalar from its fields."""
    import numpy

    described, data = fields
    return numpy.frombuffer(data, _dtype_of(described), 1)[0] if data else _dtype_of(described).type()


def describe(dtype: Any) -> Any:
    """Return a dtype as a string or a list of its fields.

    Raises:
        UnsupportedValueError: Its elements are Python objects, or the description does not reproduce it.
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
