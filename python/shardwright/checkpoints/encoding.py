"""What is no tensor of the model, as JSON that says types: :mod:`.decoding` gives values back as they were."""

from __future__ import annotations

import argparse
import base64
import json
import math
import struct
import types
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from shardwright.checkpoints.decoding import LEFT_OUT, Decoder, is_left_out
from shardwright.checkpoints.dtypes import DTYPES
from shardwright.checkpoints.known_types import NAMED_TUPLE, Known, known
from shardwright.checkpoints.left_out import KINDS, LeftOut, NotDataError
from shardwright.checkpoints.plain import plain
from shardwright.errors import ShardwrightError
from shardwright.safe_repr import safe_repr

#: JSON's readers limit how deep it is nested: Rust's to 128 levels, of which the manifest needs some.
_MAX_DEPTH = 100
_INT_RANGE = range(-(1 << 63), 1 << 63)
#: Python refuses to write longer integers in decimal.
_DECIMAL_BITS = 2048
#: Kinds of arrays whose elements are bytes of a known meaning: no objects, no records.
_ARRAY_KINDS = "biufcSUmMV"
_ALLOWED = (
    ". Allowed are None, bool, int, float, complex, str, bytes, list, tuple, dict, set, argparse.Namespace, scalars "
    "and arrays of numpy, dense tensors, torch.Size, torch.dtype, torch.device, and values of Python's library such as "
    "paths, dates and collections.Counter"
)
_TENSOR_DTYPES = frozenset(DTYPES.values()) | {"complex128"}

Tensors = dict[str, torch.Tensor]


class Encoder:
    """Encodes values, and takes the tensors in them out.

    Attributes:
        tensors: The tensors, on the CPU and contiguous, by their names.
        left_out: Why each value was left out that is not data.
        plain: Of each value that comes back as something simpler: what it is called, what it is, what comes back.
    """

    def __init__(self, prefix: str = "", *, leave_out: bool = False) -> None:
        """Create an encoder.

        Args:
            prefix: Names of tensors begin with it, and end with the path of the value.
            leave_out: Leave out what is not data, and encode data of unknown classes as plain data. Otherwise both
                are refused: of what training goes on with, nothing may be missing.
        """
        self.tensors: Tensors = {}
        self.left_out: list[NotDataError] = []
        self.plain: list[list[str]] = []
        self._leave_out = leave_out
        self._prefix = prefix
        self._names: dict[int, tuple[str, torch.Tensor]] = {}
        #: Those values that contain the one that is being encoded.
        self._around: set[int] = set()

    def encode(self, value: Any, path: str) -> Any:
        """Return a value as plain JSON.

        Args:
            value: The value.
            path: What the value is called in errors and in names of tensors.

        Raises:
            UnsupportedValueError: It contains what is not data and is not left out; the message has its path.
        """
        return self._encode(value, path, 0)

    def _encode(self, value: Any, path: str, depth: int) -> Any:
        kind = type(value)
        if value is None or kind is bool or (kind is int and value in _INT_RANGE):
            return value
        if kind is str:
            return value if _is_text(value) else {"text": _base64(value.encode("utf-8", "surrogatepass"))}
        if (encode := _SCALARS.get(kind)) is not None:
            return encode(value)
        try:
            return self._nested(value, path, depth)
        except NotDataError as error:
            if not self._leave_out:
                raise
            return self._without(error)
        except ShardwrightError:
            raise
        except Exception as error:  # of the script's own class
            if not self._leave_out:
                raise
            why = f", which cannot be read ({type(error).__name__}: {error})"
            return self._without(NotDataError(path, _name(value) + why))

    def _without(self, error: NotDataError) -> Any:
        self.left_out.append(error)
        return {LEFT_OUT: [error.path, error.what, error.hint]}

    def _nested(self, value: Any, path: str, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise NotDataError(path, f"{_name(value)} that is nested too deep, or that contains itself")
        if id(value) in self._around:
            raise NotDataError(path, f"{_name(value)} that contains itself")
        self._around.add(id(value))
        try:
            return self._by_kind(value, path, depth)
        finally:
            self._around.remove(id(value))

    def _by_kind(self, value: Any, path: str, depth: int) -> Any:
        kind = KINDS.get(type(value), type(value))
        if kind is list:
            return [self._encode(item, f"{path}[{index}]", depth + 1) for index, item in enumerate(value)]
        if kind is tuple:
            items = [self._encode(item, f"{path}[{index}]", depth + 2) for index, item in enumerate(value)]
            return {"tuple": items}
        if kind in (dict, OrderedDict):
            return {kind.__name__: self._items(value, value, path, depth, lambda key: f"[{safe_repr(key)}]")}
        if kind in (argparse.Namespace, types.SimpleNamespace):
            return {kind.__name__: self._items(value, vars(value), path, depth, lambda name: f".{name}")}
        if kind in (set, frozenset):
            return {kind.__name__: self._set(value, path, depth)}
        if (found := known(value)) is not None and (simpler := found.simpler(value)) is not None:
            return self._made_of(found, simpler, path, depth)
        if kind is LeftOut:  # of an earlier save
            raise NotDataError(*value.__dict__["record"])
        if kind is np.ndarray or (isinstance(value, np.generic) and kind.__module__ == "numpy"):
            return self._numpy(value, path, depth)
        if isinstance(value, torch.Tensor) and (kind in (torch.Tensor, nn.Parameter) or not self._leave_out):
            return self._tensor(value, path)
        return self._plainly(value, path, depth)

    def _made_of(self, found: Known, simpler: Any, path: str, depth: int) -> Any:
        if type(simpler) is not tuple:
            return {found.name: self._encode(simpler, path, depth + 1)}
        return {found.name: {"tuple": [self._encode(item, path, depth + 3) for item in simpler]}}

    def _plainly(self, value: Any, path: str, depth: int) -> Any:
        found = plain(value) if self._leave_out else None
        if found is None:
            raise _unknown(value, path)
        simpler, becomes = found
        self.plain.append([path, _name(value), becomes])
        if simpler is value:
            return self._made_of(NAMED_TUPLE, NAMED_TUPLE.simpler(value), path, depth)
        return self._encode(simpler, path, depth)

    def _items(
        self, whole: Any, items: Mapping[Any, Any], path: str, depth: int, shown: Callable[[Any], str]
    ) -> list[list[Any]]:
        found: list[list[Any]] = []
        taken = {key for key in items if type(key) in (str, int)}
        for key, item in items.items():
            name = f"the key {safe_repr(key)} of {path}"
            encoded = self._encode(key, name, depth + 3)
            if type(key) not in (str, int) and self._leave_out and not self._is_key(encoded, taken, name, key):
                continue
            found.append([encoded, self._encode(item, path + shown(key), depth + 3)])
        if type(whole) in KINDS:
            for key, one in whole.left_out.items():
                error = NotDataError(*one.__dict__["record"])
                found.append([self._encode(key, path, depth), self._without(error)])
        return found

    def _is_key(self, encoded: Any, taken: set[Any], name: str, key: Any) -> bool:
        """Return whether a key is one after it was saved: plain data may not be, or may be another key's."""
        if is_left_out(encoded):
            return False
        try:
            back = Decoder(self.tensors).decode(encoded)
            if back not in taken:
                taken.add(back)
                return True
            what = f"{_name(key)} that is the same as another key once it is plain data"
        except TypeError:  # it has no hash
            what = f"{_name(key)} that is no key once it is plain data"
        self.left_out.append(NotDataError(name, what))
        return False

    def _set(self, value: Any, path: str, depth: int) -> list[Any]:
        taken: set[Any] = set()
        items = []
        for item in value:
            name = f"{path}{{{safe_repr(item)}}}"
            encoded = self._encode(item, name, depth + 2)
            is_simple = type(item) in (str, int) or not self._leave_out or is_left_out(encoded)
            if is_simple or self._is_key(encoded, taken, name, item):
                items.append(encoded)
        return sorted(items, key=json.dumps)

    def _numpy(self, value: Any, path: str, depth: int) -> Any:
        dtype = value.dtype
        if dtype.kind not in _ARRAY_KINDS or dtype.hasobject:
            raise NotDataError(path, f"an array of numpy with elements of type {dtype}")
        said = dtype.str if dtype.kind != "V" else self._encode(dtype, path, depth + 2)
        if isinstance(value, np.generic):
            return {"scalar": [said, _base64(value.tobytes())]}
        data = torch.from_numpy(np.frombuffer(bytearray(np.ascontiguousarray(value).tobytes()), np.uint8))
        return {"array": [said, list(value.shape), self._add(data, path)]}

    def _tensor(self, value: torch.Tensor, path: str) -> Any:
        is_dense = value.layout is torch.strided and not value.is_nested and not value.is_meta
        if type(value) not in (torch.Tensor, nn.Parameter) or not is_dense:
            what = f"a {type(value).__name__} ({value.layout}, {value.device})"
            raise NotDataError(path, what, ": only dense tensors with values can")
        dtype = str(value.dtype).removeprefix("torch.")
        if dtype not in _TENSOR_DTYPES:
            raise NotDataError(path, "a quantized tensor" if value.is_quantized else f"a tensor with dtype {dtype}")
        known = self._names.get(id(value))
        if known is not None:
            name = known[0]
        else:
            plain = value.detach().resolve_conj().resolve_neg()
            plain = torch.view_as_real(plain) if plain.dtype is torch.complex128 else plain
            name = self._add(plain.cpu().contiguous(), path)
            self._names[id(value)] = name, value
        found = {"complex tensor" if value.dtype is torch.complex128 else "tensor": name}
        return {"Parameter": [found, value.requires_grad]} if type(value) is nn.Parameter else found

    def _add(self, tensor: torch.Tensor, path: str) -> str:
        name = f"{self._prefix}{path}"
        number = 1
        while name in self.tensors:  # items of a set may look alike
            number += 1
            name = f"{self._prefix}{path}#{number}"
        self.tensors[name] = tensor
        return name


def _float(value: float) -> Any:
    if math.isnan(value):
        return {"nan": struct.pack(">d", value).hex()}
    return {"float": repr(value)}


_SCALARS: dict[type, Callable[[Any], Any]] = {
    int: lambda value: {"int": str(value) if value.bit_length() < _DECIMAL_BITS else hex(value)},
    float: _float,
    complex: lambda value: {"complex": [_float(value.real), _float(value.imag)]},
    bytes: lambda value: {"bytes": _base64(value)},
    torch.Size: lambda value: {"Size": list(value)},
    torch.dtype: lambda value: {"dtype": str(value).removeprefix("torch.")},
    torch.device: lambda value: {"device": str(value)},
}


def _base64(value: bytes) -> str:
    return base64.b64encode(value).decode("ascii")


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:  # a lone surrogate, as file names have
        return False
    return True


def _name(value: Any) -> str:
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _unknown(value: Any, path: str) -> NotDataError:
    hint = ""
    base = next(
        (one for one in type(value).__mro__[1:] if one in (bool, int, float, str, list, tuple, dict, set)), None
    )
    if base is not None:
        hint = f"; convert it, {base.__name__}(...)"
    elif isinstance(value, np.ndarray):
        hint = "; convert it, numpy.asarray(...)"
    elif hasattr(type(value), "state_dict"):
        hint = "; save its state_dict()"
    return NotDataError(path, _name(value), hint, _ALLOWED)
