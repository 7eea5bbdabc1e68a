"""``smp.save``, ``smp.load`` and ``smp.resume_from_checkpoint``, as scripts for the original library call them."""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import sys
from typing import Any

import shardwright
from shardwright import CheckpointError, ConfigError
from shardwright.logs import warn_once


def save(
    obj: Any,
    f: str,
    partial: bool = True,
    pickle_module: Any = pickle,
    pickle_protocol: int = 2,
    v3: bool = False,
) -> None:
    """Save a value in a file, without pickle; see ``shardwright.save``.

    A partial file has the name ``f_{pp_rank}_{tp_rank}``, and beside it, as a hard link, ``f_{mp_rank}``, which
    versions before 1.6 gave it: scripts list and remove their files by either. What is left of a file of which a script
    has removed one name goes with the next save.

    Args:
        obj: The value.
        f: The path.
        partial: Add the rank's place, ``_{pp_rank}_{tp_rank}``, to the path.
        pickle_module: Nothing but ``pickle``, which is not used.
        pickle_protocol: Without effect.
        v3: With ``partial``, add the rank's place in RDP_GROUP too.

    Raises:
        ConfigError: ``pickle_module`` is another one.
    """
    if not partial or v3 or not isinstance(f, str):
        shardwright.save(obj, f, partial, pickle_module, pickle_protocol, v3=v3)
        return
    _remove_halves()
    name = f"{f}_{shardwright.pp_rank()}_{shardwright.tp_rank()}"
    older = f"{f}_{shardwright.mp_rank()}"
    is_free = not os.path.lexists(older) or _file_of(older) == _file_of(name) is not None
    shardwright.save(obj, f, partial, pickle_module, pickle_protocol)
    if is_free:
        _name_also(name, older)


#: The names of partial files, and which file it is, by their older names.
_named: dict[str, tuple[str, tuple[int, int]]] = {}


def _file_of(path: str) -> tuple[int, int] | None:
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _name_also(name: str, older: str) -> None:
    """Give a file another name; a file system that has no such names leaves it with one."""
    beside = f"{older}.linking"
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(beside)
        os.link(name, beside)
        os.replace(beside, older)
    except OSError as error:
        warn_once(f"smp.save: {older!r} is not another name of {name!r}, as for older scripts: {error.strerror}")
        return
    file = _file_of(name)
    if file is not None:
        _named[older] = name, file


def _remove_halves() -> None:
    """Remove the other name of files of which the script has removed one."""
    for older, (name, file) in list(_named.items()):
        there = [path for path in (older, name) if _file_of(path) == file]
        if len(there) < 2:
            del _named[older]
            for path in there:
                with contextlib.suppress(OSError):
                    os.unlink(path)


def load(
    f: str,
    map_location: Any = None,
    pickle_module: Any = pickle,
    pickle_load_args: Any = None,
    partial: bool = True,
    back_compat: bool = False,
) -> Any:
    """Load what :func:`save` saved, or ``torch.save``; see ``shardwright.load``.

    Args:
        f: The path, as it was given to :func:`save`.
        map_location: The device of tensors; by default the CPU.
        pickle_module: Nothing but ``pickle``, which is not used.
        pickle_load_args: Nothing but None or {}.
        partial: Load the file of this rank's place, whether it was saved with ``v3`` or not.
        back_compat: With ``partial``, the file has the name that versions before 1.6 gave it, ``_{mp_rank}``.

    Raises:
        ConfigError: ``pickle_module`` or ``pickle_load_args`` is another one.
    """
    if pickle_load_args:
        raise ConfigError(
            f"smp.load: pickle_load_args is {pickle_load_args!r}, but nothing is unpickled; allowed: None"
        )
    of_shards = False
    if partial and not back_compat and isinstance(f, str):
        place = f"{f}_{shardwright.pp_rank()}_{shardwright.tp_rank()}"
        of_shards = not os.path.exists(place) and os.path.exists(f"{place}_{shardwright.rdp_rank()}")
    return shardwright.load(
        f, map_location, partial, pickle_module=pickle_module, back_compat=back_compat, v3=of_shards
    )


#: The file that Trainer of transformers asks for, and the one that it has written.
_ASKED_FOR, _WRITTEN = "pytorch_model.bin", "model.safetensors"


@functools.wraps(shardwright.resume_from_checkpoint)
def resume_from_checkpoint(path: Any, tag: str | None = None, partial: bool = True, **options: Any) -> Any:
    """Load a checkpoint, or the weights in a folder of ``Trainer``; see ``shardwright.resume_from_checkpoint``."""
    trainer = sys.modules.get("smdistributed.modelparallel.torch._trainer")  # else there is no Trainer
    if trainer is not None and not partial and tag == _ASKED_FOR and not os.path.exists(os.path.join(path, tag)):
        model = trainer.model_in_training()
        if model is not None:
            if not os.path.exists(os.path.join(path, _WRITTEN)):
                raise CheckpointError(
                    f"{path!r} has neither {_ASKED_FOR} nor {_WRITTEN}; adapters of peft are not loaded by Trainer of "
                    "transformers on its path for the original library, but by that of shardwright.huggingface"
                )
            try:
                model.load_pretrained(path)
            except CheckpointError as error:  # raised on all ranks
                model.load_state_dict(_read_by_transformers(model, path, error))
            return None
    return shardwright.resume_from_checkpoint(path, tag, partial, **options)


def _read_by_transformers(model: Any, path: Any, error: CheckpointError) -> dict[str, Any]:
    """Return the state dict of a folder that has other names of weights: transformers saves those of its first version.

    Raises:
        CheckpointError: transformers does not find all weights of the model there.
    """
    kind = type(model.given())
    if not hasattr(kind, "from_pretrained"):
        raise error
    read, found = kind.from_pretrained(path, dtype="auto", output_loading_info=True)
    if any(found.values()):
        raise error
    state: dict[str, Any] = read.state_dict()
    return state
