"""A value in one file: the format of safetensors, with the value as JSON in its header. No pickle."""

from __future__ import annotations

import contextlib
import enum
import json
import math
import os
import pickle
import stat
import tempfile
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch

from shardwright.checkpoints.decoding import Decoder, is_left_out
from shardwright.checkpoints.dtypes import DTYPES
from shardwright.checkpoints.encoding import Encoder
from shardwright.checkpoints.left_out import tell_left_out, tell_plain
from shardwright.errors import CheckpointError

#: In the header, the value.
_CONTENT = "shardwright"
#: In the header, what comes back as something simpler than it was.
_PLAIN = "shardwright_plain"
_MAX_HEADER_BYTES = 100_000_000
_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, own) for name, own in DTYPES.items()}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
#: How files of ``torch.save`` begin: a zip archive, or a pickle in older versions.
_ZIP, _PICKLE = b"PK", b"\x80"


class Leaves(enum.Enum):
    """What is left out of a file if it is not data; otherwise it is refused."""

    NOTHING = enum.auto()
    PARTS = enum.auto()
    ALL = enum.auto()


def write_value(
    operation: str, path: str, value: Any, name: str = "value", *, leaves_out: Leaves = Leaves.NOTHING
) -> None:
    """Write a value, so that the file is there whole or as it was before.

    Args:
        operation: The call, for what is said of it.
        path: The file.
        value: The value.
        name: What it is called.
        leaves_out: What to leave out, which is logged once: parts of the value, or the value itself too.

    Raises:
        UnsupportedValueError: It contains what is not data, and that is not left out.
        CheckpointError: The file system refuses.
    """
    encoder = Encoder(leave_out=leaves_out is not Leaves.NOTHING)
    if _is_state_dict(value):  # other readers of the format find the names
        items = [[key, encoder.encode(item, key)] for key, item in value.items()]
        content: Any = {type(value).__name__: items}
    else:
        content = encoder.encode(value, name)
        if leaves_out is Leaves.PARTS and is_left_out(content):
            raise encoder.left_out[-1]
    tell_left_out(operation, encoder.left_out)
    tell_plain(operation, encoder.plain)
    header: dict[str, Any] = {"__metadata__": {"format": "pt", _CONTENT: json.dumps(content)}}
    if encoder.plain:
        header["__metadata__"][_PLAIN] = json.dumps(encoder.plain)
    begin = 0
    # The strictest alignment first, as the format asks.
    tensors = sorted(encoder.tensors.items(), key=lambda item: -item[1].element_size())
    for name, tensor in tensors:
        if tensor.dtype not in _NAMES:
            raise CheckpointError(f"{name} has dtype {tensor.dtype}, which files of safetensors cannot hold")
        end = begin + tensor.nbytes
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    folder, name = os.path.split(os.path.abspath(path))
    try:
        descriptor, beside = tempfile.mkstemp(prefix=f".{name[:100]}.", dir=folder)
        try:
            with os.fdopen(descriptor, "wb") as file:
                os.fchmod(file.fileno(), 0o666 & ~_umask())
                file.write(len(text).to_bytes(8, "little") + text)
                for _, tensor in tensors:
                    if tensor.numel():
                        file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(beside)
            raise
    except OSError as error:
        raise CheckpointError(f"cannot write {path!r}: {error.strerror}") from error


def read_value(operation: str, path: str, map_location: Any = None) -> Any:
    """Read a value that :func:`write_value` wrote, tensors of a file of safetensors, or what ``torch.save`` wrote.

    Args:
        operation: The call, for what is said of it.
        path: The file.
        map_location: Where tensors are to be, as ``torch.load`` takes it; by default on the CPU.

    Raises:
        CheckpointError: The file cannot be read, is damaged, or is a pickle of more than tensors and plain values.
    """
    try:
        with open(path, "rb", opener=_regular) as file:
            start = file.read(8)
            if start.startswith((_ZIP, _PICKLE)) and not _is_header_size(start, path):
                return _torch_file(path, "cpu" if map_location is None else map_location)
            size = int.from_bytes(start, "little")
            total = os.fstat(file.fileno()).st_size
            if len(start) < 8 or size > min(_MAX_HEADER_BYTES, total - 8):
                raise CheckpointError(f"{path!r} is no file of smp.save, of safetensors or of torch.save")
            header = _parsed(file.read(size), path)
            metadata = header.pop("__metadata__", {})
            tensors = {}
            for name, about in header.items():
                begin, end = about["data_offsets"]
                dtype, shape = _DTYPES[about["dtype"]], about["shape"]
                is_there = 0 <= begin <= end <= total - 8 - size and min(shape, default=0) >= 0
                if not is_there or end - begin != math.prod(shape) * dtype.itemsize:
                    raise CheckpointError(f"{path!r} is damaged: tensor {name!r} is not where its header says")
                tensor = torch.empty(shape, dtype=dtype)
                if end > begin:
                    file.seek(8 + size + begin)
                    memory = tensor.view(-1).view(torch.uint8).numpy()
                    if file.readinto(memory.data) != end - begin:
                        raise CheckpointError(f"{path!r} is damaged: it ends in tensor {name!r}")
                tensors[name] = tensor
        said = {key: json.loads(metadata[key]) for key in (_CONTENT, _PLAIN) if key in metadata}
    except OSError as error:
        raise CheckpointError(f"cannot read {path!r}: {error.strerror or error}") from error
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"{path!r} is damaged: its header makes no sense ({error})") from error
    device = _device(map_location)
    if _CONTENT not in said:
        return tensors if device is None else {name: tensor.to(device) for name, tensor in tensors.items()}
    if _PLAIN in said:
        tell_plain(operation, said[_PLAIN])
    return Decoder(tensors, device).decode(said[_CONTENT])


def _regular(path: str, flags: int) -> int:
    """Open a file, and nothing that would have the reader wait, or never end."""
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError("it is no regular file")
    return descriptor


def _device(map_location: Any) -> Any:
    """Where tensors that are on the CPU are to be; None for where they are."""
    if isinstance(map_location, Mapping):
        return map_location.get("cpu")
    if callable(map_location) and not isinstance(map_location, torch.device):
        moved = map_location(torch.empty(0).untyped_storage(), "cpu")
        return None if moved is None else moved.device
    return map_location


def _is_state_dict(value: Any) -> bool:
    return type(value) in (dict, OrderedDict) and all(
        type(key) is str and key != "__metadata__" and type(item) is torch.Tensor for key, item in value.items()
    )


def _is_header_size(start: bytes, path: str) -> bool:
    return int.from_bytes(start, "little") <= min(_MAX_HEADER_BYTES, os.path.getsize(path) - 8)


def _parsed(text: bytes, path: str) -> dict[str, Any]:
    header = json.loads(text)
    if not isinstance(header, Mapping):
        raise CheckpointError(f"{path!r} is damaged: its header is no table of tensors")
    return dict(header)


def _torch_file(path: str, map_location: Any) -> Any:
    """Read what ``torch.save`` wrote, without running code that is in it."""
    try:
        return torch.load(path, map_location=map_location, weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path!r} is a pickle of more than tensors and plain values. Reading it would run the code in it, so it "
            "is refused. If you trust whoever wrote it, load it by torch.load(..., weights_only=False) in a process of "
            f"its own, and save its tensors by smp.save. What torch says: {str(error).splitlines()[0]}"
        ) from None
    except (RuntimeError, EOFError) as error:
        raise CheckpointError(f"{path!r} is damaged: {str(error).splitlines()[0]}") from error


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
