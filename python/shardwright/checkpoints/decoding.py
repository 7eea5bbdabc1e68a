"""Values of JSON that :mod:`.encoding` wrote, given back as they were. Nothing that a file says is run or imported."""

from __future__ import annotations

import argparse
import base64
import json
import struct
import types
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from shardwright.checkpoints.known_types import BY_NAME, NAMED_TUPLE
from shardwright.checkpoints.left_out import LeftOut, made
from shardwright.errors import UnsupportedValueError
from shardwright.safe_repr import safe_repr

#: Where a value was left out: what it was called, what it was, and what to save in its place.
LEFT_OUT = "left out"


def is_left_out(value: Any) -> bool:
    """Return whether JSON says that a value was left out."""
    return isinstance(value, dict) and LEFT_OUT in value


class Decoder:
    """Decodes what :class:`Encoder` has encoded; the same tensor is the same object again."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], device: Any = None, *, plain: bool = False) -> None:
        """Create a decoder.

        Args:
            tensors: The tensors of values, on the CPU.
            device: Where values have them; by default where they are.
            plain: Give no values of classes that are made here: a named tuple is a tuple, and where a value was left
                out is nothing, or None.
        """
        self._tensors = tensors
        self._device_of_tensors = device
        self._plain = plain
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
            try:
                if kind in BY_NAME:
                    return self._made_of(kind, content)
                if kind in _KINDS:
                    return getattr(self, f"_{kind.replace(' ', '_')}")(content)
            except UnsupportedValueError:
                raise
            except Exception as error:  # whatever Python says of values that make no sense
                raise UnsupportedValueError(
                    f"saved content has {safe_repr(value)}, which makes no sense ({type(error).__name__}: {error})",
                    "content",
                ) from error
        raise UnsupportedValueError(f"saved content has {safe_repr(value)}, which this version cannot read", "content")

    def _made_of(self, kind: str, content: Any) -> Any:
        found = self.decode(content)
        return tuple(found[-1]) if self._plain and BY_NAME[kind] is NAMED_TUPLE else BY_NAME[kind].make(found)

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
        found: dict[Any, Any] = self._items(dict, content)
        return found

    def _OrderedDict(self, content: list[list[Any]]) -> Any:
        return self._items(OrderedDict, content)

    def _Namespace(self, content: list[list[Any]]) -> Any:
        return self._items(argparse.Namespace, content)

    def _SimpleNamespace(self, content: list[list[Any]]) -> Any:
        return self._items(types.SimpleNamespace, content)

    def _items(self, kind: type, content: list[list[Any]]) -> Any:
        items, left_out = {}, {}
        for key, item in content:
            if is_left_out(item):
                left_out[self.decode(key)] = LeftOut(*item[LEFT_OUT])
            else:
                items[self.decode(key)] = self.decode(item)
        return made(kind, items, {} if self._plain else left_out)

    def _left_out(self, content: list[str]) -> LeftOut | None:
        return None if self._plain else LeftOut(*content)

    def _set(self, content: list[Any]) -> set[Any]:
        return set(self.decode(content))

    def _frozenset(self, content: list[Any]) -> frozenset[Any]:
        return frozenset(self.decode(content))

    def _scalar(self, content: list[Any]) -> Any:
        return np.frombuffer(base64.b64decode(content[1]), self._dtype_of_numpy(content[0]), count=1)[0]

    def _array(self, content: list[Any]) -> Any:
        dtype, shape, name = content
        data = self._named(name).numpy().tobytes()
        return np.frombuffer(bytearray(data), self._dtype_of_numpy(dtype)).reshape(shape)

    def _dtype_of_numpy(self, said: Any) -> np.dtype[Any]:
        dtype: np.dtype[Any] = np.dtype(said) if isinstance(said, str) else self.decode(said)
        return dtype

    def _tensor(self, content: str) -> torch.Tensor:
        if self._device_of_tensors is None:
            return self._named(content)
        if content not in self._made:
            self._made[content] = self._named(content).to(self._device_of_tensors)
        return self._made[content]

    def _complex_tensor(self, content: str) -> torch.Tensor:
        key = f"complex {content}"
        if key not in self._made:
            self._made[key] = torch.view_as_complex(self._tensor(content))
        return self._made[key]

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
        *("Namespace", "SimpleNamespace", "set", "frozenset", "scalar", "array", "tensor", "complex tensor"),
        *("Parameter", LEFT_OUT),
    }
)
