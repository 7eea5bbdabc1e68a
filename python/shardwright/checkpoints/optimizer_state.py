"""The state of an optimizer by the names of parameters: what this rank has of it, and how it is taken back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from shardwright.checkpoints.boxes import Piece, pieces
from shardwright.checkpoints.decoding import Decoder
from shardwright.checkpoints.encoding import Encoder
from shardwright.checkpoints.tensors import MASTERS, MODEL, OPTIMIZER, ModelTensors, Named
from shardwright.errors import ShardwrightError
from shardwright.job.runtime import Runtime
from shardwright.model.sentinel import is_sentinel
from shardwright.optimizer import DistributedOptimizer
from shardwright.optimizer.half_precision import HalfPrecision
from shardwright.optimizer.offloading import StreamedState
from shardwright.optimizer.sharding.elementwise import original_class
from shardwright.sharded_data_parallel.parameters import ShardedParameters, shard_of

#: The dtype and the shape of a saved tensor, by name.
Kinds = Mapping[str, tuple[str, tuple[int, ...]]]
#: Reads pieces.
Read = Callable[[list[Piece]], None]


@dataclass(frozen=True)
class Updated:
    """A parameter of which this rank updates something.

    Attributes:
        parameter: The parameter in the optimizer's groups.
        named: What it is in the model.
        key: What the optimizer's state is kept by: it, or a run of its elements.
        master_of: What a master weight is kept by.
        run: The run of elements; None for all.
        group: The parameter's group.
    """

    parameter: torch.Tensor
    named: Named
    key: torch.Tensor
    master_of: torch.Tensor
    run: tuple[int, int] | None
    group: dict[str, Any]

    @property
    def shape(self) -> torch.Size:
        """The shape of state tensors that have an element for each of the parameter's that this rank updates."""
        return self.master_of.shape

    def pieces(self, tensor: torch.Tensor, prefix: str, suffix: str = "") -> Iterator[Piece]:
        """Yield the pieces of a tensor of that shape."""
        for piece in pieces(tensor, self.named.fragments, shard_of(self.parameter).shape, self.run):
            yield Piece(f"{prefix}{piece.name}{suffix}", piece.shape, piece.offset, piece.view)

    @property
    def is_whole(self) -> bool:
        """Whether this rank updates all of one tensor of the whole model."""
        return (
            self.run is None
            and len(self.named.fragments) == 1
            and self.named.fragments[0].size == tuple(self.named.fragments[0].shape)
        )


def _is_by_weight(optimizer: DistributedOptimizer, one: Updated) -> bool:
    """Whether 1-D state has a number for each of several weights that a parameter was made of."""
    return len(one.named.names) > 1 and bool(getattr(original_class(optimizer), "steps_on_all_ranks", False))


class OptimizerState:
    """The state of an optimizer of a model on this rank."""

    def __init__(self, runtime: Runtime, optimizer: DistributedOptimizer, tensors: ModelTensors) -> None:
        """Look at an optimizer, whose parameters are all of the model.

        Raises:
            ShardwrightError: A parameter is of no model.
        """
        self._runtime = runtime
        self.optimizer = optimizer
        self._tensors = tensors
        self._own_share = optimizer._own_share()
        self.groups = [
            list(dict.fromkeys(name for one in whole.parameters for name in self._named(one).names))
            for whole in optimizer._groups()
        ]

    def _named(self, parameter: torch.Tensor) -> Named:
        named = self._tensors.of(parameter)
        if named is None:
            raise ShardwrightError(
                f"{type(self.optimizer).__name__} has a parameter of shape {tuple(parameter.shape)} that is not the "
                "model's: checkpoints keep its state by the name of the parameter in the model"
            )
        return named

    def updated(self) -> Iterator[Updated]:
        """Yield the parameters of which this rank updates something."""
        share, registry = self._own_share, self._runtime[ShardedParameters]
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if is_sentinel(parameter):
                    continue
                named = self._named(parameter)
                if share is None:
                    yield Updated(parameter, named, parameter, registry.local(parameter), None, group)
                elif (tensor := share.tensor(parameter)) is not None:
                    own = share.own(parameter)
                    run = None if own is None else (own.start, own.stop)
                    yield Updated(parameter, named, tensor, tensor, run, group)

    # --- saving

    def save(self, encoder: Encoder) -> tuple[list[Piece], dict[str, Any]]:
        """Return this rank's pieces of state tensors, and the rest as JSON, by the name of a parameter and the key.

        Raises:
            ShardwrightError: There is state that is not of a parameter, or that cannot be divided as its parameter is.
        """
        optimizer, found = self.optimizer, list[Piece]()
        values: dict[str, Any] = {}
        known = set()
        optimizer.check_has_state("smp.save_checkpoint")
        masters: Any = None
        if isinstance(optimizer, HalfPrecision):
            masters = optimizer._masters
            masters.follow_model(also_loaded=False)
        for one in self.updated():
            known.add(id(one.key))
            for key, value in optimizer.state.get(one.key, {}).items():
                if not isinstance(value, torch.Tensor):
                    for name in one.named.names:
                        values.setdefault(name, {})[key] = encoder.encode(value, f"optimizer[{name!r}][{key!r}]")
                    continue
                value = shard_of(value).detach()
                if value.shape == one.shape:
                    found += one.pieces(value, OPTIMIZER, f"/{key}")
                elif _is_by_weight(optimizer, one) and value.shape == (len(one.named.names),):
                    found += [
                        Piece(f"{OPTIMIZER}{name}/{key}", (), (), each)
                        for name, each in zip(one.named.names, value, strict=True)
                    ]
                elif value.dim() == 0 or one.is_whole or optimizer._verdict.needs_whole:  # the same on all tp ranks
                    offset = (0,) * value.dim()
                    found += [
                        Piece(f"{OPTIMIZER}{name}/{key}", tuple(value.shape), offset, value) for name in one.named.names
                    ]
                else:
                    raise ShardwrightError(
                        f"the state {key!r} of {one.named.names[0]!r} in {type(optimizer).__name__} has shape "
                        f"{tuple(value.shape)}, and this rank's part of the parameter {tuple(one.shape)}: it is not "
                        "known how the whole one is made of the ranks' parts"
                    )
            if masters is not None:
                for _, master in masters.copies([one.master_of]):
                    found += one.pieces(master, MASTERS)
        others = [key for key in optimizer.state if not isinstance(key, torch.Tensor)]
        if others:
            raise ShardwrightError(f"{type(optimizer).__name__} has state that is of no parameter: {others[0]!r}")
        return found, values

    def options(self, encoder: Encoder) -> dict[str, Any]:
        """Return what the groups say besides their parameters, and the loss scaler's state, as JSON."""
        groups = [
            {key: value for key, value in group.items() if key not in ("params", "param_names")}
            for group in self.optimizer.param_groups
        ]
        scaler = self.optimizer.loss_scaler.state_dict() if isinstance(self.optimizer, HalfPrecision) else None
        return {
            "kind": type(self.optimizer).__name__,
            "options": encoder.encode(groups, "param_groups"),
            "loss_scaler": encoder.encode(scaler, "loss_scaler"),
        }

    # --- loading

    @torch.no_grad()
    def load(
        self,
        saved: Mapping[str, Any],
        kinds: Kinds,
        read: Read,
        decoder: Decoder,
        *,
        all_state: bool,
        with_options: bool,
    ) -> None:
        """Load what all ranks have saved.

        Args:
            saved: The groups and the rest, as JSON.
            kinds: The tensors that were saved.
            read: Reads pieces of them.
            decoder: Decodes values.
            all_state: Whether to load more than master weights and the loss scaler.
            with_options: Whether to load what the groups say besides their parameters, as a part of all state.
        """
        optimizer = self.optimizer
        by_parameter: dict[str, list[str]] = {}
        for name in kinds:
            if name.startswith(OPTIMIZER):
                of, _, key = name.removeprefix(OPTIMIZER).rpartition("/")
                by_parameter.setdefault(of, []).append(key)
        reads: list[Piece] = []
        masters: list[torch.Tensor] = []
        states: list[tuple[torch.Tensor, dict[str, Any]]] = []
        for one in self.updated():
            if all_state:
                state = self._state(one, kinds, by_parameter, saved["values"], decoder, reads)
                states.append((one.key, state))
            is_saved = all(f"{MASTERS}{name}" in kinds for name in one.named.names)
            if not isinstance(optimizer, HalfPrecision) or not is_saved:
                continue
            if (values := optimizer._masters.to_load(one.master_of)) is not None:
                reads += one.pieces(values, MASTERS)
                masters.append(one.master_of)
        read(reads)
        if all_state:
            if with_options:
                for group, options in zip(optimizer.param_groups, decoder.decode(saved["options"]), strict=True):
                    group.update(options)
            optimizer.state.clear()
            optimizer.state.update({key: state for key, state in states if state})
        if isinstance(optimizer, HalfPrecision):
            for master_of in masters:
                optimizer._masters.has_loaded(master_of)
            scaler = decoder.decode(saved["loss_scaler"])
            if scaler is not None:
                optimizer.loss_scaler.load_state_dict(scaler)
            optimizer._taken_of, optimizer._clipped = None, False
        if isinstance(optimizer, StreamedState):
            optimizer.release_state()

    def _new(self, like: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a tensor for state: of a device, or where the optimizer offloads it."""
        optimizer = self.optimizer
        if isinstance(optimizer, StreamedState):
            kept = optimizer.new_state(torch.empty_like(like, dtype=dtype, device="meta"))
            if kept is not None:
                return kept
        return torch.zeros_like(like, dtype=dtype, device=device, requires_grad=False)

    def _state(
        self,
        one: Updated,
        kinds: Kinds,
        by_parameter: Mapping[str, list[str]],
        values: Mapping[str, Mapping[str, Any]],
        decoder: Decoder,
        reads: list[Piece],
    ) -> dict[str, Any]:
        """Make the state of a parameter, whose tensors get their values when ``reads`` are read."""
        first = one.named.names[0]
        state = {key: decoder.decode(value) for key, value in values.get(first, {}).items()}
        for key in by_parameter.get(first, ()):
            names = [f"{OPTIMIZER}{name}/{key}" for name in one.named.names]
            if any(name not in kinds for name in names):
                continue
            dtype_name, shape = kinds[names[0]]
            dtype, device = getattr(torch, dtype_name), one.master_of.device
            on_host = key == "step" and not (one.group.get("capturable") or one.group.get("fused"))
            device = torch.device("cpu") if on_host else device
            if shape == kinds[MODEL + first][1]:
                state[key] = self._new(one.master_of, dtype, device)
                reads += one.pieces(state[key], OPTIMIZER, f"/{key}")
            elif not shape and _is_by_weight(self.optimizer, one):
                state[key] = self._new(torch.empty(len(names), dtype=dtype, device="meta"), dtype, device)
                reads += [Piece(name, (), (), each) for name, each in zip(names, state[key], strict=True)]
            else:
                state[key] = self._new(torch.empty(shape, dtype=dtype, device="meta"), dtype, device)
                reads.append(Piece(names[0], shape, (0,) * len(shape), state[key]))
        return state

    def differences(self, saved: Mapping[str, Any] | None, groups: list[list[str]]) -> list[str]:
        """Return how the optimizer differs from what was saved, a line for each difference.

        Args:
            saved: What was saved; None for a checkpoint without an optimizer.
            groups: The names of the parameters of each group, of all ranks.
        """
        if saved is None:
            return [
                "missing: the state of an optimizer, which was not saved (load_optimizer=False loads the model alone)"
            ]
        found = []
        if saved["kind"] not in (None, type(self.optimizer).__name__):  # others do not say it
            found.append(f"the optimizer was {saved['kind']}, wanted {type(self.optimizer).__name__}")
        if len(saved["groups"]) != len(groups):
            found.append(f"the optimizer had {len(saved['groups'])} parameter groups, wanted {len(groups)}")
            return found
        for number, (theirs, ours) in enumerate(zip(saved["groups"], groups, strict=True)):
            for what, names in (
                ("missing in", set(ours) - set(theirs)),
                ("unexpected in", set(theirs) - set(ours)),
            ):
                found += [f"{what} parameter group {number}: {name}" for name in sorted(names)]
        return found
