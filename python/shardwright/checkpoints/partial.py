"""``smp.save`` and ``smp.load``: a value of each rank in a file (spec, 2.11)."""

from __future__ import annotations

import pickle
from typing import Any

from shardwright.checkpoints.file import Leaves, read_value, write_value
from shardwright.errors import ConfigError
from shardwright.job.ranks import mp_rank
from shardwright.job.runtime import current_runtime
from shardwright.safe_repr import safe_repr


def save(
    obj: Any,
    f: str,
    partial: bool = True,
    pickle_module: Any = None,
    pickle_protocol: int | None = None,
    *,
    v3: bool = False,
) -> None:
    """Save a value in a file, without pickle: in the format of safetensors, with everything that is no tensor as JSON.

    Types come back as they were, or as plain data; see the guide. What is not data, such as a module or an open file,
    is left out, which is logged once; whoever asks for it after loading gets an error that says so. The file is
    complete, or as it was before.

    Args:
        obj: The value, such as ``model.local_state_dict()``.
        f: The path.
        partial: Add the rank's place, ``_{pp_rank}_{tp_rank}``, to the path.
        pickle_module: Python's ``pickle``, which scripts pass and no file needs. Another one is refused.
        pickle_protocol: Accepted without effect: there is no pickle in the file.
        v3: With ``partial``, add the rank's place in RDP_GROUP too, for values that differ there.

    Raises:
        ConfigError: The path is not a string, or a module is given to pickle with.
        UnsupportedValueError: The value itself is not data.
        CheckpointError: The file cannot be written.
    """
    _refuse_pickle(pickle_module, "save")
    write_value("smp.save", _path(f, partial, v3, "save"), obj, leaves_out=Leaves.PARTS)


def load(
    f: str,
    map_location: Any = None,
    partial: bool = True,
    *,
    pickle_module: Any = None,
    back_compat: bool = False,
    v3: bool = False,
    **pickle_load_args: Any,
) -> Any:
    """Load what :func:`save` saved; also the tensors of other files of safetensors, and what ``torch.save`` saved.

    A file of ``torch.save`` is read by ``weights_only=True``: tensors, containers and numbers. Other pickles are
    refused, since reading one runs the code in it.

    Args:
        f: The path, as it was given to :func:`save`.
        map_location: The device of tensors, or what else ``torch.load`` takes; by default the CPU.
        partial: As for :func:`save`.
        pickle_module: As for :func:`save`.
        back_compat: With ``partial``, the file has the suffix of versions before 1.6 of the original, ``_{mp_rank}``.
        v3: As for :func:`save`.
        pickle_load_args: Refused: there is no pickle to read with them.

    Raises:
        ConfigError: The path is not a string, or arguments are given to unpickle with.
        CheckpointError: There is no such file, it is damaged, or it is a pickle that is refused.
    """
    _refuse_pickle(pickle_module, "load")
    if pickle_load_args:
        raise ConfigError(
            f"smp.load: {', '.join(sorted(pickle_load_args))} would go to pickle, and smp.load unpickles only "
            "what torch.load(weights_only=True) does: leave it out"
        )
    return read_value("smp.load", _path(f, partial, v3, "load", back_compat=back_compat), map_location)


def _refuse_pickle(module: Any, function: str) -> None:
    if module is not None and module is not pickle:
        raise ConfigError(
            f"smp.{function}: pickle_module is {safe_repr(module)}; files have no pickle, so that opening one runs no "
            "code: leave it out, and give values of the types that smp.save knows"
        )


def _path(f: object, partial: bool, v3: bool, function: str, *, back_compat: bool = False) -> str:
    if not isinstance(f, str):
        raise ConfigError(f"smp.{function}: f is a {type(f).__name__}; allowed: a str")
    if not partial:
        return f
    if back_compat:
        return f"{f}_{mp_rank()}"
    place = current_runtime().place
    suffix = [place.pp_rank, place.tp_ranks.index(place.rank), *([place.rdp_ranks.index(place.rank)] if v3 else [])]
    return "_".join([f, *map(str, suffix)])
