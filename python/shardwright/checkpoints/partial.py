"""``smp.save`` and ``smp.load``: a value of each rank in a file (spec, 2.11)."""

from __future__ import annotations

from typing import Any

from shardwright.checkpoints.file import read_value, to_device, write_value
from shardwright.errors import ConfigError
from shardwright.job.runtime import current_runtime


def save(obj: Any, f: str, partial: bool = True, *, v3: bool = False) -> None:
    """Save a value in a file, without pickle: in the format of safetensors, with everything that is no tensor as JSON.

    Types come back as they were; see the guide for those that are known. The file is complete, or as it was before.

    Args:
        obj: The value, such as ``model.local_state_dict()``.
        f: The path.
        partial: Add the rank's place, ``_{pp_rank}_{tp_rank}``, to the path.
        v3: With ``partial``, add the rank's place in RDP_GROUP too, for values that differ there.

    Raises:
        ConfigError: The path is not a string.
        UnsupportedValueError: The value contains something of a type that is not known; the message has its path.
        CheckpointError: The file cannot be written.
    """
    write_value(_path(f, partial, v3, "save"), obj)


def load(f: str, map_location: Any = None, partial: bool = True, *, v3: bool = False) -> Any:
    """Load what :func:`save` saved; also the tensors of other files of safetensors, and what ``torch.save`` saved.

    A file of ``torch.save`` is read by ``weights_only=True``: tensors, containers and numbers. Other pickles are
    refused, since reading one runs the code in it.

    Args:
        f: The path, as it was given to :func:`save`.
        map_location: The device of tensors; by default the CPU.
        partial: As for :func:`save`.
        v3: As for :func:`save`.

    Raises:
        ConfigError: The path is not a string.
        CheckpointError: There is no such file, it is damaged, or it is a pickle that is refused.
    """
    found = read_value(_path(f, partial, v3, "load"))
    return found if map_location is None else to_device(found, map_location)


def _path(f: object, partial: bool, v3: bool, function: str) -> str:
    if not isinstance(f, str):
        raise ConfigError(f"smp.{function}: f is a {type(f).__name__}; allowed: a str")
    if not partial:
        return f
    place = current_runtime().place
    suffix = [place.pp_rank, place.tp_ranks.index(place.rank), *([place.rdp_ranks.index(place.rank)] if v3 else [])]
    return "_".join([f, *map(str, suffix)])
