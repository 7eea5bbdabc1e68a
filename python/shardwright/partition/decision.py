"""A partition as a value: who owns what. Rank 0 makes it, and every other rank checks it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from shardwright.errors import PartitionError
from shardwright.execution.placed import KeptState
from shardwright.partition.tree import ModelTree, TensorEntry, tensor_bytes
from shardwright.tensor_parallel.module import named_shardings


@dataclass(frozen=True, kw_only=True)
class TensorRow:
    """One parameter or buffer of the model.

    Attributes:
        names: All its full names, the first as in ``named_parameters()``.
        nbytes: Bytes of its elements.
        ranks: The pp_ranks that hold it: one, except for a buffer shared by modules of several ranks.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    ranks: tuple[int, ...]

    @property
    def name(self) -> str:
        """The first name."""
        return self.names[0]


@dataclass(frozen=True, kw_only=True)
class JoinReason:
    """Why two modules, given by their paths, must be on one rank, as text."""

    modules: tuple[str, str]
    reason: str


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Which pp_rank runs each module and owns each parameter and buffer.

    Attributes:
        num_devices: The pipeline degree the model was divided for.
        modules: The pp_rank of each module, by its path, in ``named_modules()`` order.
        classes: The class name of each module, by its path.
        parameters: Every parameter once.
        buffers: Every buffer once.
        follows: Modules without parameters or a placement of their own, which run on whichever rank calls them, with
            the pp_ranks that called them in the trace. `modules` has the rank that holds their buffers first.
        attributes: Full names of the attributes that forwards set, with the pp_ranks on which they are set.
        temporaries: Those `attributes` that each forward sets before anything reads them.
        reads: Full names of the attributes that modules on other pp_ranks read in the trace, with those pp_ranks.
        joins: Why modules were kept together.
        kept: State that modules keep from one microbatch to the next. Microbatches use it in their order.
        one_at_a_time: Why microbatches must run one after another, instead of overlapping; empty if they need not.
        report: The partitioner's report of costs and crossings, for people and tools.
    """

    num_devices: int
    modules: Mapping[str, int]
    classes: Mapping[str, str]
    parameters: tuple[TensorRow, ...]
    buffers: tuple[TensorRow, ...]
    follows: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    attributes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    temporaries: tuple[str, ...] = ()
    reads: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    joins: tuple[JoinReason, ...] = ()
    kept: tuple[KeptState, ...] = ()
    one_at_a_time: tuple[str, ...] = ()
    report: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(
        tree: ModelTree,
        ranks: Mapping[str, int],
        num_devices: int,
        follows: Mapping[str, tuple[int, ...]] | None = None,
        **more: Any,
    ) -> Decision:
        """Create the decision that runs each module of `tree` on the rank that `ranks` gives for its path.

        It checks that every module has a rank that exists, and that modules with a common parameter are on one rank.
        """
        follows = follows or {}
        for entry in tree.modules:
            rank = ranks.get(entry.path)
            if rank is None or not 0 <= rank < num_devices:
                raise PartitionError(
                    f"module {entry.path!r} was placed on {rank}, but pp_ranks are 0 to {num_devices - 1}"
                )
        for parameter in tree.parameters:
            first = parameter.holders[0]
            for holder in parameter.holders:
                if ranks[holder] != ranks[first]:
                    raise PartitionError(
                        f"parameter {parameter.name!r} is shared by module {first!r} on pp_rank {ranks[first]} and "
                        f"module {holder!r} on pp_rank {ranks[holder]}; modules that share a parameter must be on one "
                        "rank"
                    )
        return Decision(
            num_devices=num_devices,
            modules={entry.path: ranks[entry.path] for entry in tree.modules},
            classes={entry.path: type(entry.module).__name__ for entry in tree.modules},
            parameters=tuple(_row(entry, ranks, {}) for entry in tree.parameters),
            buffers=tuple(_row(entry, ranks, follows) for entry in tree.buffers),
            follows=follows,
            **more,
        )

    def parameter_bytes(self, rank: int) -> int:
        """Return the size in bytes of the parameters that `rank` owns."""
        return sum(row.nbytes for row in self.parameters if rank in row.ranks)

    def buffer_bytes(self, rank: int) -> int:
        """Return the size in bytes of the buffers that `rank` holds."""
        return sum(row.nbytes for row in self.buffers if rank in row.ranks)

    def is_divided(self, path: str) -> bool:
        """Return whether a module has parts on several ranks."""
        prefix = f"{path}." if path else ""
        inside = (name for name in self.modules if name == path or name.startswith(prefix))
        return len({self.modules[name] for name in inside if name not in self.follows}) > 1

    def check_against(self, module: nn.Module, *, rank: int | None = None) -> None:
        """Check that a rank's whole model is the one that this decision was made for.

        Raises:
            PartitionError: A module, parameter or buffer differs. The message describes the first one on both ranks.
        """
        tree = ModelTree.of(module)
        # One tp rank has the values of these tensors, and the others have nothing.
        of_one = {name for name, sharding in named_shardings(module).items() if sharding.owner is not None}
        here = "this rank" if rank is None else f"rank {rank}"
        differences = [
            ("module", dict(self.classes), {entry.path: type(entry.module).__name__ for entry in tree.modules}),
            ("parameter", _texts(self.parameters), _entry_texts(tree.parameters)),
            ("buffer", _texts(self.buffers), _entry_texts(tree.buffers)),
        ]
        for kind, expected, found in differences:
            for name in [*expected, *found]:
                if expected.get(name) != found.get(name) and not (name in of_one and name not in found):
                    there = expected.get(name, "absent")
                    raise PartitionError(
                        f"{here} built a different model than the rank that divided it: {kind} {name!r} is {there} "
                        f"there and {found.get(name, 'absent')} here; every rank must run the same script with the "
                        "same model configuration"
                    )


def _row(entry: TensorEntry, ranks: Mapping[str, int], follows: Mapping[str, tuple[int, ...]]) -> TensorRow:
    return TensorRow(
        names=entry.names,
        shape=tuple(entry.tensor.shape),
        dtype=str(entry.tensor.dtype),
        nbytes=tensor_bytes(entry.tensor),
        ranks=tuple(sorted({rank for holder in entry.holders for rank in (ranks[holder], *follows.get(holder, ()))})),
    )


def _texts(rows: tuple[TensorRow, ...]) -> dict[str, str]:
    return {row.name: f"{row.shape} {row.dtype} as {', '.join(row.names)}" for row in rows}


def _entry_texts(entries: tuple[TensorEntry, ...]) -> dict[str, str]:
    return {
        entry.name: f"{tuple(entry.tensor.shape)} {entry.tensor.dtype} as {', '.join(entry.names)}" for entry in entries
    }
