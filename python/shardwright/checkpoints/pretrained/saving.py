"""``smp.DistributedModel.save_pretrained``."""

from __future__ import annotations

import json
import os
import re
import shutil
from typing import Any

from torch import nn

from shardwright._core import export_full_checkpoint
from shardwright.checkpoints.places import check_on_disk
from shardwright.checkpoints.pretrained.folder import CONFIG, GENERATION_CONFIG, INDEX, SINGLE
from shardwright.checkpoints.saving import Part, assigned, check_same, description_of, write_parts
from shardwright.checkpoints.tensors import ModelTensors
from shardwright.checkpoints.together import on_all_ranks, outside_steps
from shardwright.errors import CheckpointError, ConfigError
from shardwright.job.runtime import Runtime
from shardwright.model import DistributedModel
from shardwright.model.updates import Updates
from shardwright.safe_repr import safe_repr

_OPERATION = "model.save_pretrained"
_TAG = "model"
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
#: What the core counts bytes in, and the digits of that.
_MOST_BYTES, _MOST_DIGITS = 1 << 63, 19
_SHARD = re.compile(r"model-\d{5,}-of-\d{5,}\.safetensors")


def save_pretrained(
    runtime: Runtime, model: DistributedModel, folder: str | os.PathLike[str], max_shard_size: int | str
) -> None:
    """Write the model in the layout of ``transformers``; all ranks call this.

    Ranks write what they hold into a checkpoint beside the folder, each element once. Rank 0 makes files of whole
    tensors of it, as a stream, so that no rank has the model in memory.
    """
    outside_steps(_OPERATION)
    check_on_disk(_OPERATION, folder)
    target = os.path.abspath(folder)
    parent, name = os.path.split(target)
    beside = os.path.join(parent, f".{name}.saving")
    part = Part()

    def collect() -> str:
        if not name:
            raise ConfigError(f"folder is {os.fspath(folder)!r}, which has no name")
        runtime[Updates].check_whole(_OPERATION)
        model.placement.deferred_loads.run(model.module)
        tensors = ModelTensors(runtime, model)
        tensors.refuse_few_bits(_OPERATION)
        part.add_model(tensors)
        part.about = {"aliases": tensors.aliases, "content": None, "extra_states": {}}
        part.about["request"] = [target, _bytes_of(max_shard_size)]
        return part.told()

    told = [json.loads(text) for text in on_all_ranks(_OPERATION, collect)]
    abouts = [one["about"] for one in told]
    check_same([one["request"] for one in abouts], "folder and max_shard_size")
    mine, rank = assigned(told, runtime.place.rank), runtime.place.rank
    description = description_of(runtime, model, abouts) if rank == 0 else None

    def export() -> None:
        if rank == 0:
            try:
                whole = os.path.join(beside, "whole")
                shutil.rmtree(whole, ignore_errors=True)  # what an ended run left
                export_full_checkpoint(beside, _TAG, whole, abouts[0]["request"][1])
                _write_configurations(model.module, whole)
                _move(whole, target)
            finally:
                shutil.rmtree(beside, ignore_errors=True)

    try:
        write_parts(_OPERATION, beside, _TAG, rank, lambda: part.given(mine), description, None)
    except CheckpointError:
        if rank == 0:
            shutil.rmtree(beside, ignore_errors=True)
        raise
    on_all_ranks(_OPERATION, export)


def _write_configurations(module: nn.Module, folder: str) -> None:
    """Say in the configuration what dtype weights have, as ``transformers`` does, and add the one for generation."""
    path = os.path.join(folder, CONFIG)
    if os.path.exists(path):
        with open(path) as file:
            config: dict[str, Any] = json.load(file)
        dtype = next((one.dtype for one in module.parameters() if one.is_floating_point()), None)
        if dtype is not None:
            key = "torch_dtype" if "torch_dtype" in config else "dtype"
            config[key] = str(dtype).removeprefix("torch.")
        with open(path, "w") as file:
            json.dump(config, file, indent=2, sort_keys=True)
            file.write("\n")
    generation = getattr(module, "generation_config", None)
    to_json = getattr(generation, "to_json_string", None)
    if callable(to_json):
        with open(os.path.join(folder, GENERATION_CONFIG), "w") as file:
            file.write(to_json())


def _move(whole: str, target: str) -> None:
    """Put new files in the place of old ones; other files in the folder, as those of a tokenizer, stay."""
    os.makedirs(target, exist_ok=True)
    made = os.listdir(whole)
    for name in os.listdir(target):
        if name not in made and (name in (SINGLE, INDEX) or _SHARD.fullmatch(name)):
            os.unlink(os.path.join(target, name))
    for name in sorted(made, key=lambda name: name in (CONFIG, INDEX)):  # what names others comes last
        os.replace(os.path.join(whole, name), os.path.join(target, name))


def _bytes_of(size: int | str) -> int:
    """The bytes that a size means, such as ``"5GB"``."""
    if isinstance(size, int) and not isinstance(size, bool) and 0 < size <= _MOST_BYTES:
        return size
    found = re.fullmatch(r"(\d+) *([KMG]i?B)", size, re.IGNORECASE) if isinstance(size, str) else None
    # Python refuses to read numbers of thousands of digits.
    if found is not None and len(found[1]) <= _MOST_DIGITS:
        number = int(found[1]) * _UNITS[found[2].upper()]
        if 0 < number <= _MOST_BYTES:
            return number
    raise ConfigError(
        f"max_shard_size is {safe_repr(size)}; allowed: a number of bytes from 1 to 2**63, or a size "
        "such as '500MB' or '5GB'"
    )
