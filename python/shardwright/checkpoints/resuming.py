"""``smp.resume_from_checkpoint``."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwright._core import is_in_store
from shardwright.checkpoints import random_state
from shardwright.checkpoints.background import background
from shardwright.checkpoints.boxes import Piece
from shardwright.checkpoints.claims import check_optimizer
from shardwright.checkpoints.decoding import Decoder
from shardwright.checkpoints.full import load_full, newest_full
from shardwright.checkpoints.left_out import tell_plain
from shardwright.checkpoints.optimizer_state import OptimizerState
from shardwright.checkpoints.places import check_on_disk
from shardwright.checkpoints.saved import Kinds, Saved
from shardwright.checkpoints.saving import USER, check_same, united
from shardwright.checkpoints.state_claims import check_state
from shardwright.checkpoints.tensors import MASTERS, MODEL, OPTIMIZER, ModelTensors, Named, extra_states
from shardwright.checkpoints.together import model_of, on_all_ranks, optimizer_of, outside_steps
from shardwright.errors import CheckpointError, CheckpointGoneError, ShardwrightError, UnsupportedValueError
from shardwright.job.runtime import Runtime
from shardwright.model import DistributedModel
from shardwright.model.updates import Updates

_OPERATION = "smp.resume_from_checkpoint"
_MAX_LISTED = 40
#: How often a checkpoint is loaded that another job removes or replaces meanwhile.
_LOOKS = 10


def resume_from_checkpoint(
    path: str | os.PathLike[str],
    tag: str | None = None,
    partial: bool = True,
    strict: bool = True,
    load_optimizer: bool = True,
    load_sharded_optimizer_state: bool = True,
    translate_function: Callable[[dict[str, Any]], Mapping[str, Any]] | None = None,
    *,
    model: DistributedModel | None = None,
    optimizer: Any = None,
) -> Any:
    """Load a checkpoint under any degrees of parallelism, partition and number of ranks. All ranks call this.

    Call it once model and optimizer are wrapped. If the model is not divided yet, what is in the checkpoint is compared
    with it now, and values are loaded when it is divided, in the first step. Each rank reads what it holds.

    Random number streams are restored in a job with the same number of ranks, degrees and placement. In another one
    they stay as the script has seeded them. With ``reproducible_rng``, numbers drawn in steps depend on the number of
    the step, which goes on from the checkpoint's in any job.

    Args:
        path: The directory of checkpoints, or ``s3://BUCKET/PREFIX``.
        tag: The checkpoint; by default the newest that was saved in parts, or the newest full one.
        partial: Load what was saved in parts. Otherwise the file ``path/tag`` with the state dict of the whole model,
            saved by ``smp.save_checkpoint(partial=False)``, ``smp.save`` or ``torch.save``; weights of replaced modules
            are translated, unless it has the entry ``_smp_is_partial`` with the value False.
        strict: Refuse a checkpoint if any name, shape or dtype is not the model's. False loads what is in both.
        load_optimizer: Load the optimizer's state too, if the checkpoint is partial.
        load_sharded_optimizer_state: In a job that shards optimizer state or parameters, load all of it. False loads
            master weights and the loss scaler only.
        translate_function: Translates the state dict of a full checkpoint, in place of the library.
        model: The model; by default the job's only one.
        optimizer: What ``smp.DistributedOptimizer`` returned; by default the only one that trains the model.

    Returns:
        The user content, with tensors on the CPU.

    Raises:
        CheckpointError: There is no such checkpoint, it is damaged, or it differs from the model or the optimizer; the
            message lists the differences.
        FrameError: Called inside a step function.
        PeerLostError: Another rank is gone.
        StallError: Another rank did not call it.
    """
    runtime = outside_steps(_OPERATION)
    background(runtime).finish(_OPERATION)
    if not partial:
        check_on_disk(_OPERATION, path)
        if tag is None:
            tag = on_all_ranks(_OPERATION, lambda: newest_full(path) if runtime.place.rank == 0 else None)[0]
        return load_full(runtime, _OPERATION, path, tag, model, strict, translate_function)
    for _ in range(_LOOKS - 1):
        try:
            return _resume(runtime, path, tag, model, optimizer, load_optimizer, load_sharded_optimizer_state, strict)
        except CheckpointGoneError as error:  # on all ranks; the newest is another one by now
            if runtime.place.rank == 0:
                runtime.logger.info("%s; looking again", error)
    return _resume(runtime, path, tag, model, optimizer, load_optimizer, load_sharded_optimizer_state, strict)


def _resume(
    runtime: Runtime,
    path: str | os.PathLike[str],
    tag: str | None,
    model: DistributedModel | None,
    optimizer: Any,
    load_optimizer: bool,
    load_sharded: bool,
    strict: bool,
) -> Any:
    """Load what is there now."""
    opened: list[Saved] = []

    def open_as_first() -> str:
        if tag is not None and not isinstance(tag, str):
            raise ShardwrightError(f"tag is a {type(tag).__name__}; allowed: a str, or None for the newest")
        opened.append(Saved(path, tag))
        return str(opened[0].manifest["tag"])

    # Rank 0 says which is the newest: a job that writes there may go on.
    tag = on_all_ranks(_OPERATION, lambda: open_as_first() if runtime.place.rank == 0 else None)[0]
    loading: list[_Loading] = []

    def look() -> tuple[Any, ...]:
        saved = opened[0] if opened else _opened(path, str(tag))
        found = _Loading.of(runtime, saved, model, optimizer, load_optimizer, load_sharded, strict)
        found.look_at_content()
        loading.append(found)
        own_states = [name for name, _ in extra_states(found.model)]
        return saved.manifest["sequence"], json.dumps([found.tensors.wanted(), own_states]), found.groups

    told = on_all_ranks(_OPERATION, look)
    try:
        check_same([sequence for sequence, *_ in told], "path, in which they found other checkpoints: their")
    except CheckpointError as error:  # or it was replaced between two looks
        raise CheckpointGoneError(str(error)) from None
    own = loading[0]
    wanted = [json.loads(one) for _, one, _ in told]
    states = {name for _, names in wanted for name in names}
    own.compare([kinds for kinds, _ in wanted], [groups for *_, groups in told], states)
    on_all_ranks(_OPERATION, own.look_at_optimizer)
    with runtime[Updates].loading(*own.what):
        on_all_ranks(_OPERATION, own.load_or_defer)
        on_all_ranks(_OPERATION, own.restore_streams)
    return own.user_content


def _opened(path: str | os.PathLike[str], tag: str) -> Saved:
    """Open a checkpoint that rank 0 has opened."""
    try:
        return Saved(path, tag)
    except CheckpointGoneError:
        raise
    except ShardwrightError as error:
        if not is_in_store(path) and not os.path.lexists(os.path.join(path, f"{tag}_partial")):
            raise CheckpointGoneError(str(error)) from error
        raise


@dataclass
class _Loading:
    """What one rank loads."""

    runtime: Runtime
    saved: Saved
    model: DistributedModel
    optimizer: Any
    tensors: ModelTensors
    groups: list[list[str]] | None
    all_state: bool
    strict: bool
    has_weights: bool = False
    user_content: Any = None
    streams: dict[str, torch.Tensor] | None = None
    decoded: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        """What is loaded, for errors."""
        return f"checkpoint {self.saved.manifest['tag']!r}"

    @property
    def what(self) -> list[str]:
        """What is loaded, as :class:`Updates` calls it."""
        return ["weights"] if self.optimizer is None else ["weights", "the optimizer's state"]

    @staticmethod
    def of(
        runtime: Runtime,
        saved: Saved,
        model: Any,
        optimizer: Any,
        load_optimizer: bool,
        load_sharded: bool,
        strict: bool,
    ) -> _Loading:
        """Find what is to be loaded."""
        found = model_of(runtime, model)
        tensors = ModelTensors(runtime, found)
        saved.tie({MODEL + alias: MODEL + name for alias, name in tensors.aliases.items()})
        trained_by = optimizer_of(runtime, found, optimizer) if load_optimizer else None
        if load_optimizer and trained_by is None and strict and saved.content["optimizer"] is not None:
            raise ShardwrightError(
                "the checkpoint has the state of an optimizer, and no optimizer trains the model yet: create "
                "smp.DistributedOptimizer first, or leave the state out by load_optimizer=False"
            )
        if trained_by is not None:
            trained_by.check_known(_OPERATION)
        groups = None if trained_by is None else OptimizerState(runtime, trained_by, tensors).groups
        shards = runtime.place.shards_optimizer_state or runtime.place.shards_parameters
        return _Loading(runtime, saved, found, trained_by, tensors, groups, load_sharded or not shards, strict)

    def look_at_content(self) -> None:
        """Decode all that is no tensor of the model, and refuse what cannot be taken over, before anything is changed.

        Raises:
            ShardwrightError: Names what is wrong, and what is allowed.
        """
        saved = self.saved
        decoder = Decoder(saved.tensors(USER))
        if self.runtime.place.rank == 0:
            tell_plain(_OPERATION, saved.content.get("plain", ()))
        self.user_content = decoder.decode(saved.content["content"])
        for name, state in saved.content["extra_states"].items():
            _decoded(decoder, f"user_content.extra_states[{name!r}]", state)
        if (optimizer := saved.content["optimizer"]) is not None:
            for key in ("options", "loss_scaler"):
                self.decoded[key] = _decoded(decoder, f"user_content.optimizer.{key}", optimizer[key])
            self.decoded["values"] = {
                name: {
                    key: _decoded(decoder, f"user_content.optimizer.values[{name!r}][{key!r}]", value)
                    for key, value in values.items()
                }
                for name, values in optimizer["values"].items()
            }
        if self._draws_on():
            prefix = random_state.prefix(self.runtime.place.rank)
            found = {name.removeprefix(prefix): one for name, one in saved.tensors(prefix).items()}
            random_state.check(found, prefix)
            self.streams = found

    def look_at_optimizer(self) -> None:
        """Refuse what the optimizer cannot go on with; the checkpoint's parameters are those of the model.

        Raises:
            ShardwrightError: Names what is wrong, and what is allowed.
        """
        saved = self.saved.content["optimizer"]
        if self.optimizer is None or saved is None or saved["kind"] not in (None, type(self.optimizer).__name__):
            return
        check_optimizer(self.optimizer, self.decoded, self.saved.kinds, saved["groups"])
        joined = {name for one in self.tensors.every if len(one.names) > 1 for name in one.names}
        check_state(self.optimizer, self.decoded, self.saved.kinds, saved["groups"], joined)

    def _draws_on(self) -> bool:
        """Whether the job has the layout of the one that saved, so that each rank goes on with the numbers it drew."""
        degrees, place = self.saved.manifest["degrees"], self.runtime.place
        return bool(
            degrees["pipeline"] == place.pp_size
            and degrees["tensor"] == len(place.tp_ranks)
            and self.saved.content["placement"] == [place.cfg.placement_strategy, place.launch.world_size]
        )

    def compare(
        self, wanted: Sequence[Mapping[str, Any]], groups: Sequence[list[list[str]] | None], states: set[str]
    ) -> None:
        """Compare the checkpoint with the model and optimizer of all ranks, whose modules have these extra states.

        Raises:
            CheckpointError: They differ, and ``strict`` is set.
        """
        every = {name: (dtype, tuple(shape)) for one in wanted for name, (dtype, shape) in one.items()}
        trained = {name for of_rank in groups if of_rank is not None for group in of_rank for name in group}
        kinds = self.saved.kinds
        not_compared = {
            name: kind
            for name, kind in kinds.items()
            if not name.startswith(MODEL) and (self.optimizer is None or _parameter_of(name) in {None, *trained})
        }
        found = self.saved.differences({**every, **not_compared})
        if self.optimizer is not None:
            several = [one for one in groups if one is not None]
            state = OptimizerState(self.runtime, self.optimizer, self.tensors)
            found += state.differences(self.saved.content["optimizer"], united(several))
        saved_states = self.saved.content["extra_states"].keys()
        if self.saved.has_extra_states:
            found += [f"the extra state of module {name!r} is missing" for name in sorted(states - saved_states)]
        found += [f"the extra state of module {name!r} is not the model's" for name in sorted(saved_states - states)]
        if found and self.strict:
            listed = "\n  ".join(found[:_MAX_LISTED])
            more = f"\n  and {len(found) - _MAX_LISTED} more" if len(found) > _MAX_LISTED else ""
            raise CheckpointError(
                f"{_OPERATION}: checkpoint {self.saved.manifest['tag']!r} is not of this model; nothing was loaded. "
                f"strict=False would load what is in both. Differences:\n  {listed}{more}"
            )
        if found:
            if self.runtime.place.rank == 0:
                self.runtime.logger.warning(
                    "%s: %d differences between checkpoint and model, which are left out: %s",
                    _OPERATION,
                    len(found),
                    "; ".join(found[:5]),
                )
            self._leave_out(every, trained)

    def _leave_out(self, every: Kinds, trained: set[str]) -> None:
        """Forget saved tensors that are not, with the same shape and dtype, in the model."""
        kinds = self.saved.kinds
        usable = {name for name, kind in every.items() if kinds.get(name) == kind}
        for name in list(kinds):
            parameter = _parameter_of(name)
            unknown = name.startswith(MODEL) and name not in usable
            if unknown or (parameter is not None and (MODEL + parameter not in usable or parameter not in trained)):
                del kinds[name]
        optimizer = self.saved.content["optimizer"]
        if optimizer is None or self.groups is None:
            self.optimizer = None
        elif optimizer["kind"] not in (None, type(self.optimizer).__name__) or len(optimizer["groups"]) != len(
            self.groups
        ):
            self.optimizer = None  # its options and state mean something else

    def load_or_defer(self) -> None:
        """Load now, or once the model is divided."""
        if self.model.placement.partitioned:
            self._load()
            return
        if self.optimizer is not None:
            decoder = Decoder(self.saved.tensors(f"{USER}param_groups"))
            options = decoder.decode(self.saved.content["optimizer"]["options"]) if self.all_state else []
            self.optimizer.wait_for(self, options)
        self.model.placement.deferred_loads.add(str(self), self._load_weights, self.model.module)
        self.model.register_post_partition_hook(lambda *_: self._load_divided())

    def _load_divided(self) -> None:
        try:
            if not self.has_weights:
                self._load_weights()
            if self.optimizer is not None and self.optimizer.awaits(self):  # no other state was loaded since
                self._load_optimizer(with_options=False)
        except BaseException as error:
            for what in self.what:
                self.runtime[Updates].loaded_in_part(what, error)
            error.add_note(f"while {_OPERATION} loaded {self} into the model that was divided")
            raise

    def _load(self) -> None:
        self._load_weights()
        self._load_optimizer(with_options=True)

    def _load_weights(self) -> None:
        """Load what this rank holds of the model: all of it, if it is not divided yet."""
        # The first step may be an evaluation in inference mode, with training to follow.
        with torch.inference_mode(False), torch.no_grad():
            tensors, saved = ModelTensors(self.runtime, self.model), self.saved
            tensors.check_made(_OPERATION)
            saved.read([piece for named in tensors.every for piece in self._wanted(named)])
            decoder = Decoder(saved.tensors(f"{USER}extra_states"))
            states = saved.content["extra_states"]
            for name, module in extra_states(self.model):
                if name in states:
                    module.set_extra_state(decoder.decode(states[name]))
        self.has_weights = True

    def _load_optimizer(self, *, with_options: bool) -> None:
        if self.optimizer is None:
            return
        with torch.inference_mode(False), torch.no_grad():
            saved = self.saved
            state = OptimizerState(self.runtime, self.optimizer, ModelTensors(self.runtime, self.model))
            decoder = Decoder(saved.tensors(USER))
            content = saved.content["optimizer"]
            state.load(content, saved.kinds, saved.read, decoder, all_state=self.all_state, with_options=with_options)
            self.optimizer.has_state()

    def _wanted(self, named: Named) -> list[Piece]:
        return [piece for piece in named.pieces() if piece.name in self.saved.kinds] if named.is_here else []

    def restore_streams(self) -> None:
        """Continue counting steps, and drawing random numbers if the job has the layout of the one that saved."""
        step = self.runtime.step
        if self.saved.manifest["step"] is not None:
            step.apart = step.number - self.saved.manifest["step"]
            # Earlier versions drew by the number of the step.
            step.trained, step.looked = self.saved.content.get("random_steps", (self.saved.manifest["step"], 0))
        if self.streams is not None:
            random_state.restore(self.streams)


def _decoded(decoder: Decoder, place: str, value: Any) -> Any:
    """Return what was encoded; an error tells where it is."""
    try:
        return decoder.decode(value)
    except UnsupportedValueError as error:
        raise UnsupportedValueError(f"manifest.json: {place}: {error}", place) from error


def _parameter_of(name: str) -> str | None:
    """The parameter that a tensor of an optimizer is of; None for other tensors."""
    if name.startswith(OPTIMIZER):
        return name.removeprefix(OPTIMIZER).rpartition("/")[0]
    return name.removeprefix(MASTERS) if name.startswith(MASTERS) else None
