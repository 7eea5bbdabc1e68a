"""``smp.save_checkpoint``."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwright._core import CheckpointWriter, __version__, is_in_store
from shardwright.checkpoints import random_state
from shardwright.checkpoints.background import background
from shardwright.checkpoints.boxes import Piece
from shardwright.checkpoints.encoding import Encoder
from shardwright.checkpoints.full import save_full
from shardwright.checkpoints.left_out import tell_left_out, tell_plain
from shardwright.checkpoints.optimizer_state import OptimizerState
from shardwright.checkpoints.places import check_on_disk, check_tag, place_of
from shardwright.checkpoints.streamed import Given, write_part
from shardwright.checkpoints.tensors import ModelTensors, extra_states
from shardwright.checkpoints.together import keep_others_out, model_of, on_all_ranks, optimizer_of, outside_steps
from shardwright.errors import CheckpointError, ShardwrightError
from shardwright.job.runtime import Runtime
from shardwright.model import DistributedModel
from shardwright.model.updates import Updates
from shardwright.optimizer import DistributedOptimizer
from shardwright.safe_repr import safe_repr

_OPERATION = "smp.save_checkpoint"
USER = "user/"
#: Under which the configuration of a model of ``transformers`` is where exports look for it.
HUGGINGFACE_CONFIG = "huggingface_config"

#: What identifies a piece on all ranks that hold it: name, offset and size.
Key = tuple[str, tuple[int, ...], tuple[int, ...]]


@dataclass
class Part:
    """What a rank holds, before it is known which of it this rank writes."""

    pieces: list[Piece] = field(default_factory=list)
    #: The names of what the first rank that holds it writes, since others may have other values until the next step.
    of_first: set[str] = field(default_factory=set)
    about: dict[str, Any] = field(default_factory=dict)

    def add_model(self, tensors: ModelTensors) -> None:
        """Add what this rank holds of a model."""
        for named in tensors.every:
            if named.is_here:
                own = list(named.pieces())
                self.pieces += own
                self.of_first.update(piece.name for piece in own if named.is_buffer)

    def told(self) -> str:
        """What the other ranks are told."""
        rows = [
            (each.name, each.offset, each.size, each.view.nbytes, each.name in self.of_first, _value_of(each))
            for each in self.pieces
        ]
        return json.dumps({"pieces": rows, "about": self.about})

    def given(self, mine: set[Key]) -> list[Given]:
        """Those pieces that this rank writes; contiguous in host memory, or where they are on a device."""
        return [
            (each.name, _contiguous(each.view.detach()), list(each.shape), each.region)
            for each in self.pieces
            if _key(each) in mine
        ]


def save_checkpoint(
    path: str | os.PathLike[str],
    tag: str,
    partial: bool = True,
    model: DistributedModel | None = None,
    optimizer: Any = None,
    user_content: Any = None,
    translate_if_full: bool = True,
    num_kept_partial_checkpoints: int | None = None,
    *,
    asynchronous: bool = False,
) -> None:
    """Save a checkpoint: model, optimizer, random number streams and what else the script gives. All ranks call this.

    Each rank writes a part of it, and each element is written once. When all parts are on the disk, the checkpoint
    gets its name in one step, and becomes the newest. It can be loaded under any degrees of parallelism, partition and
    number of ranks. Whatever fails, checkpoints from before stay, and all ranks raise the error.

    Args:
        path: The directory of checkpoints, which all ranks can write to. It is made if it is not there. With
            ``s3://BUCKET/PREFIX`` it is in an object store; see the guide.
        tag: The name of the checkpoint, which replaces an older one of the same name.
        partial: Save in parts. A full checkpoint is one file, ``path/tag``, with the model only, by rank 0.
        model: The model; by default the job's only one.
        optimizer: What ``smp.DistributedOptimizer`` returned; by default the only one that trains the model.
        user_content: What else is to be saved, such as ``{"scheduler": scheduler.state_dict(), "step": step}``. That of
            rank 0 counts. What is not data in it is left out, which is logged once; see the guide.
        translate_if_full: Save a full checkpoint with the names and layouts of weights that the model has in one
            process. False keeps those of distributed modules.
        num_kept_partial_checkpoints: Remove the oldest complete checkpoints so that so many are left; None keeps all.
        asynchronous: Return once everything is copied to host memory, and write in the background. The next call of
            this function or ``smp.resume_from_checkpoint`` waits for the end, and raises what went wrong;
            ``smp.shutdown`` waits too, and logs it.

    Raises:
        CheckpointError: It failed on a rank: ranks gave different tags, a directory cannot be written, the disk is
            full, and so on.
        FrameError: Called inside a step function.
        PeerLostError: Another rank is gone.
        StallError: Another rank did not call it.
    """
    runtime = outside_steps(_OPERATION)
    background(runtime).finish(_OPERATION)
    if not partial:
        check_on_disk(_OPERATION, path)
        save_full(runtime, _OPERATION, path, tag, model, user_content, translate=translate_if_full)
        return
    part = Part()
    found: list[tuple[DistributedModel, DistributedOptimizer | None]] = []

    def find() -> None:
        check_tag(path, tag)
        _check_kept(num_kept_partial_checkpoints)
        if is_in_store(path):
            CheckpointWriter(path, tag).check()  # before anything is copied
        of = model_of(runtime, model)
        found.append((of, optimizer_of(runtime, of, optimizer)))

    on_all_ranks(_OPERATION, find)
    (of, trained_by) = found[0]
    if trained_by is not None:
        trained_by.agree_on_groups(_OPERATION)

    def collect() -> str:
        _collect(part, runtime, of, trained_by, user_content)
        part.about["request"] = [tag, num_kept_partial_checkpoints, asynchronous]
        part.about["nonce"] = secrets.token_hex(8)
        return part.told()

    told = [json.loads(text) for text in on_all_ranks(_OPERATION, collect)]
    abouts = [one["about"] for one in told]
    check_same([one["request"] for one in abouts], "tag, num_kept_partial_checkpoints and asynchronous")
    _check_values(told)
    mine = assigned(told, runtime.place.rank)
    folder = place_of(path)

    def given() -> list[Given]:
        return part.given(mine)

    description = description_of(runtime, of, abouts) if runtime.place.rank == 0 else None
    if asynchronous:
        nonce, keep = abouts[0]["nonce"], num_kept_partial_checkpoints
        background(runtime).save(_OPERATION, folder, tag, nonce, given, description, keep)
    else:
        write_parts(_OPERATION, folder, tag, runtime.place.rank, given, description, num_kept_partial_checkpoints)


def write_parts(
    operation: str,
    folder: str,
    tag: str,
    rank: int,
    given: Callable[[], list[Given]],
    description: dict[str, Any] | None,
    keep: int | None,
) -> None:
    """Write this rank's part, and complete the checkpoint on rank 0, which has its description."""
    writer = CheckpointWriter(folder, tag)

    def commit() -> None:
        if description is not None:
            writer.commit(json.dumps(description), reports, keep=keep)

    try:
        keep_others_out(operation, writer, rank)
        reports = on_all_ranks(operation, lambda: write_part(writer, f"part-{rank:05}.safetensors", given()))
        on_all_ranks(operation, commit)
    except CheckpointError:
        if rank == 0:
            with contextlib.suppress(ShardwrightError):  # the error is told that came first
                writer.abandon()
        raise
    finally:
        writer.unlock()


def _check_kept(keep: object) -> None:
    if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or not 1 <= keep < 2**32):
        raise ShardwrightError(
            f"num_kept_partial_checkpoints is {safe_repr(keep)}; allowed: None, or an integer of 1 or more, below 2**32"
        )


def check_same(values: Sequence[Any], what: str) -> None:
    """Raise on all ranks if they gave different arguments."""
    for rank, value in enumerate(values):
        if value != values[0]:
            raise CheckpointError(f"ranks gave different values of {what}: {values[0]} on rank 0, {value} on {rank}")


def _collect(
    part: Part, runtime: Runtime, model: DistributedModel, optimizer: DistributedOptimizer | None, user_content: Any
) -> None:
    """Find what this rank holds of everything."""
    if model.placement.replicas.is_accumulating:
        raise ShardwrightError(
            "gradients are being accumulated (backward_passes_per_step), which a checkpoint does not keep: save after "
            "the step in which they are reduced"
        )
    runtime[Updates].check_whole("smp.save_checkpoint")
    model.placement.deferred_loads.run(model.module)
    tensors = ModelTensors(runtime, model)
    part.add_model(tensors)
    encoder = Encoder(USER)
    about: dict[str, Any] = {"aliases": tensors.aliases}
    side = Encoder(USER, leave_out=True)
    if runtime.place.rank == 0:
        about["content"] = side.encode(user_content, "user_content")
        about["plain"] = side.plain
        tell_left_out(_OPERATION, side.left_out)
        tell_plain(_OPERATION, side.plain)
    if optimizer is not None:
        state = OptimizerState(runtime, optimizer, tensors)
        found, values = state.save(encoder)
        part.pieces += found
        about["optimizer"] = {"groups": state.groups, "values": values}
        if runtime.place.rank == 0:
            about["optimizer"] |= state.options(encoder)
    about["extra_states"] = {
        name: encoder.encode(module.get_extra_state(), f"extra_states[{name!r}]")
        for name, module in extra_states(model)
    }
    named_tensors = {
        **side.tensors,
        **encoder.tensors,
        **{random_state.prefix(runtime.place.rank) + name: one for name, one in random_state.streams().items()},
    }
    for name, tensor in named_tensors.items():
        part.pieces.append(Piece(name, tuple(tensor.shape), (0,) * tensor.dim(), tensor))
        part.of_first.add(name)
    part.about = about


def _value_of(piece: Piece) -> str | None:
    """The bytes of a single value that is no element of a parameter, such as the number of updates."""
    is_value = piece.name.startswith("optimizer/") and piece.view.dim() == 0
    return bytes(piece.view.reshape(1).cpu().view(torch.uint8).tolist()).hex() if is_value else None


def _check_values(told: Sequence[Mapping[str, Any]]) -> None:
    """Raise if ranks have different values of what is one value of the whole model."""
    known: dict[str, tuple[int, str]] = {}
    for rank, one in enumerate(told):
        for name, *_, value in one["pieces"]:
            if value is not None and known.setdefault(name, (rank, value))[1] != value:
                first = known[name][0]
                raise CheckpointError(
                    f"ranks {first} and {rank} have different values of {name!r}, which is one of the whole model"
                )


def _contiguous(view: torch.Tensor) -> torch.Tensor:
    return view.contiguous() if view.device.type == "cpu" else view


def _key(piece: Piece) -> Key:
    return piece.name, piece.offset, piece.size


def assigned(told: Sequence[Mapping[str, Any]], rank: int) -> set[Key]:
    """Choose for each piece one of the ranks that hold it, so that all write about the same; return this rank's."""
    holders: dict[Key, list[int]] = {}
    sizes: dict[Key, int] = {}
    fixed: set[Key] = set()
    for holder, one in enumerate(told):
        for name, offset, size, nbytes, of_first, _ in one["pieces"]:
            key = name, tuple(offset), tuple(size)
            holders.setdefault(key, []).append(holder)
            sizes[key] = nbytes
            if of_first:
                fixed.add(key)
    loads = [0] * len(told)
    mine = set()
    # First what only few can write, the largest first.
    for key in sorted(holders, key=lambda key: (key not in fixed, len(holders[key]), -sizes[key], key)):
        writer = holders[key][0] if key in fixed else min(holders[key], key=lambda one: (loads[one], one))
        loads[writer] += sizes[key]
        if writer == rank:
            mine.add(key)
    return mine


def description_of(runtime: Runtime, model: DistributedModel, abouts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the manifest says besides tensors."""
    place, ownership = runtime.place, model.placement.ownership
    first = abouts[0]
    content = {
        "content": first["content"],
        **({"plain": first["plain"]} if first.get("plain") else {}),
        "extra_states": _merged(one["extra_states"] for one in abouts),
        "placement": [place.cfg.placement_strategy, place.launch.world_size],
        "random_steps": [runtime.step.trained, runtime.step.looked],
        "optimizer": None,
    }
    if "optimizer" in first:
        own = first["optimizer"]
        every = [one["optimizer"] for one in abouts]
        content["optimizer"] = {
            **{key: own[key] for key in ("kind", "options", "loss_scaler")},
            "groups": united([one["groups"] for one in every]),
            "values": _merged(one["values"] for one in every),
        }
    aliases = _merged(one["aliases"] for one in abouts)
    if (config := _huggingface_config(model.module)) is not None:
        content[HUGGINGFACE_CONFIG] = config
    return {
        "library_version": __version__,
        "step": runtime.step.of_training,
        "degrees": {
            "pipeline": place.pp_size,
            "tensor": len(place.tp_ranks),
            "reduced_data": len(place.rdp_ranks),
            "optimizer_sharding": len(place.dp_ranks) if place.shards_optimizer_state else 1,
            "sharded_data": int(place.cfg.sharded_data_parallel_degree),
        },
        "partition": []
        if ownership is None
        else [{"module": name, "pp_rank": rank} for name, rank in sorted(ownership.decision.modules.items())],
        "aliases": [{"name": f"model/{name}", "of": f"model/{of}"} for name, of in sorted(aliases.items())],
        "user_content": content,
    }


def _huggingface_config(module: torch.nn.Module) -> Any:
    """Return the configuration that the model has, as ``save_pretrained`` writes it; None for one that is not JSON."""
    to_dict = getattr(getattr(module, "config", None), "to_dict", None)
    if not callable(to_dict):
        return None
    try:
        return json.loads(json.dumps({**to_dict(), "architectures": [type(module).__name__]}, allow_nan=False))
    except (TypeError, ValueError):
        return None


def united(groups: Sequence[list[list[str]]]) -> list[list[str]]:
    """The names in each group on any rank: a tp rank may lack a parameter that another has, such as a bias."""
    return [list(dict.fromkeys(name for names in same for name in names)) for same in zip(*groups, strict=True)]


def _merged(several: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for one in several:
        for key, value in one.items():
            merged.setdefault(key, value)
    return merged
