"""Weights that ``from_pretrained`` of ``transformers`` reads from files: delayed, the ranks that own them read them.

While modules are created with delayed parameters, files of safetensors are opened for their headers only. A weight is
noted as one that is read, with what is made of it: another dtype, a part, several put together, or few bits.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from shardwright.delayed.few_bits import install_conversions
from shardwright.delayed.tensor import noted
from shardwright.patches import original_of, replaced

#: Where ``transformers`` opens files, and a module that is imported before it with any automatic class.
_LOADING, _CLASSES = "transformers.modeling_utils", "transformers.models.auto.auto_factory"


@contextlib.contextmanager
def reading_delayed() -> Iterator[None]:
    """Read no weights of files in the block, but note which are to be read."""
    if _LOADING not in sys.modules and _CLASSES not in sys.modules:
        yield
        return
    loading: Any = importlib.import_module(_LOADING)
    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(loading, {"safe_open": _Opened}))
        install_conversions(stack)
        yield


class _Opened:
    """A file of safetensors of which only the header is read."""

    def __init__(self, file: Any, *args: Any, **kwargs: Any) -> None:
        self._path = str(file)
        self._file: Any = original_of(_Opened)(file, *args, **kwargs)

    def keys(self) -> Any:
        """The names of its tensors."""
        return self._file.keys()

    def metadata(self) -> Any:
        """What it says of itself."""
        return self._file.metadata()

    def get_slice(self, name: str) -> _Slice:
        """What stands for a tensor until it is needed."""
        return _Slice(self._path, name, self._file.get_slice(name))

    def get_tensor(self, name: str) -> torch.Tensor:
        """A tensor that is read when it is needed."""
        read: torch.Tensor = self.get_slice(name)[...]
        return read

    def __enter__(self) -> _Opened:
        return self

    def __exit__(self, *error: Any) -> None:
        self._file.__exit__(*error)


class _Slice:
    """A tensor in a file."""

    def __init__(self, path: str, name: str, described: Any) -> None:
        self._path, self._name, self._described = path, name, described

    def get_shape(self) -> Any:
        """Its shape."""
        return self._described.get_shape()

    def get_dtype(self) -> Any:
        """Its dtype, as the file calls it."""
        return self._described.get_dtype()

    def __getitem__(self, part: Any) -> Any:
        dtype = _dtypes()[self.get_dtype()]
        meta = torch.empty(self.get_shape(), dtype=dtype, device="meta")
        read = noted(_Read(self._path, self._name), [], meta)
        return read if part is Ellipsis else read[part]


def _dtypes() -> dict[str, torch.dtype]:
    table: dict[str, torch.dtype] = importlib.import_module(_LOADING).str_to_torch_dtype
    return table


@dataclass(frozen=True)
class _Read:
    """Reads a tensor of a file."""

    path: str
    name: str

    def __call__(self) -> torch.Tensor:
        from safetensors import safe_open

        # In memory of its own: what is mapped would count as the process's until the whole file is closed.
        with safe_open(self.path, framework="pt", device="cpu", backend="pread") as file:
            return file.get_tensor(self.name)  # type: ignore[no-any-return]
