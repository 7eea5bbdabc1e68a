"""What is no tensor of the model, as JSON: a typed codec, so that a value comes back as the type that it was."""

from __future__ import annotations

import argparse
import base64
import json
import math
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from shardwright.errors import UnsupportedValueError
from shardwright.safe_repr import safe_repr

#: JSON's readers limit how deep values are nested; three levels of it are one of a dict.
_MAX_DEPTH = 32
_INT_RANGE = range(-(1 << 63), 1 << 63)
#: Python refuses to write longer integers in decimal.
_DECIMAL_BITS = 2048
#: Kinds of arrays whose elements are bytes of a known meaning: no objects, no records.
_ARRAY_KINDS = "biufcSUmM"
_ALLOWED = (
    "None, bool, int, float, complex, str, bytes, list, tuple, dict, collections.OrderedDict, set, frozenset, "
    "argparse.Namespace, scalars and arrays of numpy, dense tensors, torch.Size, torch.dtype and torch.device"
)

Tensors = dict[str, torch.Tensor]


class Encoder:
    """Encodes values, and takes the tensors in them out.

    Attributes:
        tensors: The tensors, on the CPU and contiguous, by their names.
    """

    def __init__(self, prefix: str = "") -> None:
        """Create an encoder; names of tensors begin with ``prefix``, and end with the path of the value."""
        self.tensors: Tensors = {}
        self._prefix = prefix
        self._names: dict[int, tuple[str, torch.Tensor]] = {}

    def encode(self, value: Any, path: str) -> Any:
        """Return a value as plain JSON.

        Args:
            value: The value.
            path: What the value is called in errors and in names of tensors.

        Raises:
            UnsupportedValueError: It contains something of a type that is not known; the message has its path.
        """
        return self._encode(value, path, 0)

    def _encode(self, value: Any, path: str, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise UnsupportedValueError(
                f"{path} is nested more than {_MAX_DEPTH} levels deep, or contains itself", "nested value"
            )
        kind = type(value)
        if value is None or kind is bool or (kind is int and value in _INT_RANGE):
            return value
        if kind is str:
            return value if _is_text(value) else {"text": _base64(value.encode("utf-8", "surrogatepass"))}
        if (encode := _SCALARS.get(kind)) is not None:
            return encode(value)
        if kind is list:
            return [self._encode(item, f"{path}[{index}]", depth + 1) for index, item in enumerate(value)]
        if kind is tuple:
            return {"tuple": self._encode(list(value), path, depth)}
        if kind in (dict, OrderedDict):
            return {kind.__name__: self._items(value.items(), path, depth, lambda key: f"[{safe_repr(key)}]")}
        if kind is argparse.Namespace:
            return {"Namespace": self._items(vars(value).items(), path, depth, lambda name: f".{name}")}
        if kind in (set, frozenset):
            items = [self._encode(item, f"{path}{{{safe_repr(item)}}}", depth + 1) for item in value]
            return {kind.__name__: sorted(items, key=json.dumps)}
        if kind is np.ndarray or (isinstance(value, np.generic) and kind.__module__ == "numpy"):
            return self._numpy(value, path)
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        raise _unknown(value, path)

    def _items(
        self, items: Iterable[tuple[Any, Any]], path: str, depth: int, shown: Callable[[Any], str]
    ) -> list[list[Any]]:
        return [
            [
                self._encode(key, f"the key {safe_repr(key)} of {path}", depth + 1),
                self._encode(item, path + shown(key), depth + 1),
            ]
            for key, item in items
        ]

    def _numpy(self, value: Any, path: str) -> Any:
        if value.dtype.kind not in _ARRAY_KINDS:
            raise UnsupportedValueError(
                f"{path} is an array of numpy with elements of type {value.dtype}, which cannot be saved", "ndarray"
            )
        about = [value.dtype.str, list(value.shape)]
        if isinstance(value, np.generic):
            return {"scalar": [value.dtype.str, _base64(value.tobytes())]}
        data = torch.from_numpy(np.frombuffer(bytearray(np.ascontiguousarray(value).tobytes()), np.uint8))
        return {"array": [*about, self._add(data, path)]}

    def _tensor(self, value: torch.Tensor, path: str) -> Any:
        is_dense = value.layout is torch.strided and not value.is_nested and not value.is_meta
        if type(value) not in (torch.Tensor, nn.Parameter) or not is_dense:
            raise UnsupportedValueError(
                f"{path} is a {type(value).__name__} ({value.layout}, {value.device}), which cannot be saved: "
                "only dense tensors with values can",
                "tensor",
            )
        if value.is_quantized:
            raise UnsupportedValueError(f"{path} is a quantized tensor, which cannot be saved", "tensor")
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


class Decoder:
    """Decodes what :class:`Encoder` has encoded; the same tensor is the same object again."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Create a decoder of values with these tensors."""
        self._tensors = tensors
        #: Those that are made of these.
        self._made: dict[str, torch.Tensor] = {}

    def decode(self, value: Any) -> Any:
        """Return the value that was encoded.

        Raises:
            UnsupportedValueError: It is not what :class:`Encoder` writes.
        """
        if value is None or isinstance(value, bool | int | str):
            return value
        if isinstance(value, list):
            return [self.decode(item) for item in value]
        if isinstance(value, dict) and len(value) == 1:
            ((kind, content),) = value.items()
            decode = getattr(self, f"_{kind.replace(' ', '_')}", None) if kind in _KINDS else None
            if decode is not None:
                return decode(content)
        raise UnsupportedValueError(f"saved content has {safe_repr(value)}, which this version cannot read", "content")

    def _int(self, content: str) -> int:
        return int(content, 0)

    def _float(self, content: str) -> float:
        return float(content)

    def _nan(self, content: str) -> float:
        found: float = struct.unpack(">d", bytes.fromhex(content))[0]
        return found

    def _complex(self, content: list[Any]) -> complex:
        return complex(self.decode(content[0]), self.decode(content[1]))

    def _text(self, content: str) -> str:
        return base64.b64decode(content).decode("utf-8", "surrogatepass")

    def _bytes(self, content: str) -> bytes:
        return base64.b64decode(content)

    def _Size(self, content: list[int]) -> torch.Size:
        return torch.Size(content)

    def _dtype(self, content: str) -> torch.dtype:
        found = getattr(torch, content, None)
        if not isinstance(found, torch.dtype):
            raise UnsupportedValueError(f"saved content has the dtype {content!r}, which torch has not", "dtype")
        return found

    def _device(self, content: str) -> torch.device:
        return torch.device(content)

    def _tuple(self, content: list[Any]) -> tuple[Any, ...]:
        return tuple(self.decode(content))

    def _dict(self, content: list[list[Any]]) -> dict[Any, Any]:
        return {self.decode(key): self.decode(item) for key, item in content}

    def _OrderedDict(self, content: list[list[Any]]) -> OrderedDict[Any, Any]:
        return OrderedDict((self.decode(key), self.decode(item)) for key, item in content)

    def _Namespace(self, content: list[list[Any]]) -> argparse.Namespace:
        return argparse.Namespace(**self._dict(content))

    def _set(self, content: list[Any]) -> set[Any]:
        return set(self.decode(content))

    def _frozenset(self, content: list[Any]) -> frozenset[Any]:
        return frozenset(self.decode(content))

    def _scalar(self, content: list[Any]) -> Any:
        return np.frombuffer(base64.b64decode(content[1]), np.dtype(content[0]), count=1)[0]

    def _array(self, content: list[Any]) -> Any:
        dtype, shape, name = content
        data = self._named(name).numpy().tobytes()
        return np.frombuffer(bytearray(data), np.dtype(dtype)).reshape(shape)

    def _tensor(self, content: str) -> torch.Tensor:
        return self._named(content)

    def _complex_tensor(self, content: str) -> torch.Tensor:
        if content not in self._made:
            self._made[content] = torch.view_as_complex(self._named(content))
        return self._made[content]

    def _Parameter(self, content: list[Any]) -> torch.Tensor:
        key = json.dumps(content)
        if key not in self._made:
            self._made[key] = nn.Parameter(self.decode(content[0]), content[1])
        return self._made[key]

    def _named(self, name: str) -> torch.Tensor:
        if name not in self._tensors:
            raise UnsupportedValueError(f"saved content has a tensor {name!r}, which is not there", "tensor")
        return self._tensors[name]


_KINDS = frozenset(
    {
        *("int", "float", "nan", "complex", "text", "bytes", "Size", "dtype", "device", "tuple", "dict", "OrderedDict"),
        *("Namespace", "set", "frozenset", "scalar", "array", "tensor", "complex tensor", "Parameter"),
    }
)


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


def _unknown(value: Any, path: str) -> UnsupportedValueError:
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
    hint = ""
    base = next((one for one in kind.__mro__[1:] if one in (bool, int, float, str, list, tuple, dict, set)), None)
    if base is not None:
        hint = f"; convert it, {base.__name__}(...)"
    elif isinstance(value, np.ndarray) and not isinstance(value, np.ma.MaskedArray):
        hint = "; convert it, numpy.asarray(...)"
    elif hasattr(value, "state_dict"):
        hint = "; save its state_dict()"
    return UnsupportedValueError(f"{path} is a {name}, which cannot be saved{hint}. Allowed are {_ALLOWED}", name)
