"""The comparison on rank 0: runs the step in one process, collects what every rank computed, and makes the report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from shardwright.errors import ConfigError
from shardwright.execution import process
from shardwright.execution.reproducible import microbatch_seed
from shardwright.partition.preserve import copied_arguments
from shardwright.verify.evidence import EvidenceReader, Overview, with_inputs
from shardwright.verify.locate import Side, comparable_calls, first_backward, first_forward
from shardwright.verify.measure import error_of, error_of_leaf, floor_of, tolerance_for
from shardwright.verify.record import ModuleRecord
from shardwright.verify.reference import CallArguments, Expected, Reference
from shardwright.verify.report import Departure, Report, Row, first_of
from shardwright.verify.whole_batch import whole_batch_note

if TYPE_CHECKING:
    from shardwright.verify.run import Verification

NamedGradients = Mapping[str, torch.Tensor | None]


@dataclass
class Replica:
    """One pipeline, by its data-parallel rank.

    Attributes:
        root: The global rank that runs the step function.
        ranks: All its global ranks.
        arguments: The arguments that its root passed to the step function.
        seed: The seed of its root's generator.
        random: The states of its root's generators at the start of the step.
    """

    index: int
    root: int
    ranks: list[int]
    arguments: CallArguments
    seed: int
    random: process.RandomState


class Comparison:
    """The comparison on rank 0."""

    def __init__(self, verified: Verification, modules: list[nn.Module], reader: EvidenceReader) -> None:
        """Request an overview from every rank; whole `modules` of the models are the reference."""
        runtime = verified.runtime
        self.verified = verified
        self.reader = reader
        self.runtime = runtime
        self.num_microbatches = verified.step.num_microbatches(runtime)
        self.ranks: list[Overview] = [reader.read(rank, "overview") for rank in range(runtime.place.launch.world_size)]
        self.reference = Reference(verified.models, modules, verified.prefixes, runtime.place.device)
        self.reference.draw_as_the_ranks()
        self.replicas = [self._replica(index, root) for index, root in enumerate(runtime.place.dp_ranks)]
        self.rows: list[Row] = []
        self._first_buffers: dict[str, torch.Tensor] = {}

    def _replica(self, index: int, root: int) -> Replica:
        arguments = self.verified.arguments
        if root != self.runtime.place.rank:
            arguments = with_inputs(*arguments, self.reader.read(root, "inputs"), root)
        seed, state, devices = self.reader.read(root, "random")
        generator = torch.Generator()
        generator.set_state(state)
        if devices:  # the device of that root differs from this rank's
            devices = {self.runtime.place.device.index: next(iter(devices.values()))}
        ranks = self.runtime.place.topology.group("PP_GROUP", root)
        return Replica(index, root, ranks, arguments, int(seed), (generator, devices))

    # --- running

    def load(self) -> None:
        """Set the whole models to the values that the first replica started from."""
        with torch.no_grad():
            for kind, tensors, holders in (
                ("start_parameters", self.reference.named_parameters(), self._holders_of_parameters()),
                ("start_buffers", self.reference.named_buffers(), self._holders_of_buffers(0)),
            ):
                loaded: set[int] = set()
                for name, tensor in tensors.items():
                    value = None
                    if id(tensor) not in loaded and name in holders:
                        value = self.reader.read(holders[name], kind, name)
                    if value is not None:
                        tensor.copy_(value)
                        loaded.add(id(tensor))
                missing = [name for name, tensor in tensors.items() if id(tensor) not in loaded]
                if missing:
                    raise ConfigError(
                        f"no rank holds {missing[0]!r} of the whole model; was it made after the model was divided?"
                    )
        self._first_buffers = {name: buffer.clone() for name, buffer in self.reference.named_buffers().items()}

    def _holders_of_parameters(self) -> dict[str, int]:
        """Return, by full name, the rank of the first replica that owns the parameter."""
        ranks = self.replicas[0].ranks
        return {name: rank for rank in reversed(ranks) for group in self.ranks[rank].groups for name in group}

    def _holders_of_buffers(self, replica: int) -> dict[str, int]:
        """Return, by full name, the first rank of a replica that holds the buffer."""
        ranks = self.replicas[replica].ranks
        return {name: rank for rank in reversed(ranks) for name in self.ranks[rank].start_buffers}

    def expect(self) -> tuple[list[Expected], NamedGradients]:
        """Run every replica's step in this process, and compare its results before the next replica runs."""
        expected, gradients = [], []
        for replica in self.replicas:
            one = self.run(replica, self.num_microbatches, recorded=True)
            self._compare_results(replica, one)
            self._compare_buffers(replica, one)
            one.results, one.losses = [], {}
            expected.append(one)
            gradients.append(self.reference.take_gradients())
        weights = [one.weight for one in expected]
        return expected, self.reference.mean(gradients, weights, self.num_microbatches)

    def run(self, replica: Replica, num_microbatches: int, *, recorded: bool) -> Expected:
        """Run one replica's step from its start in this process, with the random numbers of its ranks."""
        self.reference.load_buffers(self._starting_buffers(replica))
        process.restore_random_state(replica.random)
        args, kwargs = copied_arguments(*replica.arguments)
        parts, _ = self.verified.step.splitter.split(args, kwargs, num_microbatches)
        runtime = self.runtime
        seeds: list[int | None] = [None] * len(parts)
        if runtime.place.pp_size > 1 or runtime.place.cfg.reproducible_rng:
            seeds = [microbatch_seed(runtime, replica.seed, number, replica.index) for number in range(len(parts))]
        return self.reference.run(self.verified.step, parts, seeds, recorded)

    def _starting_buffers(self, replica: Replica) -> Mapping[str, torch.Tensor]:
        """Return the buffers that a replica starts from: in training those of the first replica, by default."""
        if replica.index == 0 or self.verified.shares_buffers:
            return self._first_buffers
        holders = self._holders_of_buffers(replica.index)
        own = {name: self.reader.read(rank, "start_buffers", name) for name, rank in holders.items()}
        return {name: own.get(name, buffer) for name, buffer in self._first_buffers.items()}

    # --- comparing

    def _add(self, kind: str, name: str, rank: int, found: tuple[float, str]) -> None:
        self.rows.append(Row(kind=kind, name=name, rank=rank, error=found[0], detail=found[1]))

    def _compare_results(self, replica: Replica, expected: Expected) -> None:
        root = replica.root
        for microbatch, wanted in enumerate(expected.results):
            for number, loss in enumerate(expected.losses.get(microbatch, [])):
                given = self.reader.read(root, "losses", microbatch)
                found = error_of(given[number] if number < len(given) else None, loss)
                self._add("loss", f"microbatch {microbatch}", root, found)
            returned = self.reader.read(root, "results", microbatch)
            paths = [path for path, _ in returned], [path for path, _ in wanted]
            if paths[0] != paths[1]:
                detail = f"the ranks return {len(paths[0])} values, one process {len(paths[1])}"
                self._add("output", f"microbatch {microbatch}", root, (math.inf, detail))
                continue
            for (path, here), (_, there) in zip(returned, wanted, strict=True):
                name = f"microbatch {microbatch}{': ' + path if path else ''}"
                self._add("output", name, root, error_of_leaf(here, there))

    def _compare_buffers(self, replica: Replica, expected: Expected) -> None:
        for rank in replica.ranks:
            for name in self.ranks[rank].buffers:
                found = error_of(self.reader.read(rank, "buffers", name), expected.buffers.get(name))
                self._add("buffer", name, rank, found)

    def _compare_gradients(self, wanted: NamedGradients) -> dict[str, tuple[float, str]]:
        """Add a row for each parameter and rank, and return the worst error and its reason by name."""
        floor = floor_of(wanted.values())
        worst: dict[str, tuple[float, str]] = {}
        for rank, said in enumerate(self.ranks):
            for group in said.groups:
                found = self.reader.read(rank, "gradients", group[0])
                for name in group:
                    departs = error_of(found, wanted.get(name), floor)
                    if name == group[0] and not (found is None and wanted.get(name) is None):
                        self._add("gradient", name, rank, departs)
                    if name not in worst or not departs[0] <= worst[name][0]:
                        worst[name] = departs
        return worst

    def _compare_ties(self) -> dict[str, str]:
        """Add a row for each tie, and return a description of each untied parameter by name."""
        ties: dict[int, list[str]] = {}
        for name, parameter in self.reference.named_parameters().items():
            ties.setdefault(id(parameter), []).append(name)
        untied: dict[str, str] = {}
        for names in ties.values():
            if len(names) == 1:
                continue
            for rank, said in enumerate(self.ranks):
                apart = [group for group in said.groups if set(group) & set(names)]
                if not apart:
                    continue
                detail = ""
                for group in apart[1:]:
                    detail = f"a tensor of its own on rank {rank}; in one process it is tied to {names[0]!r}"
                    untied |= dict.fromkeys(group, detail)
                name = apart[-1][0] if detail else " = ".join(names)
                self._add("tie", name, rank, (math.inf if detail else 0.0, detail))
        return untied

    # --- the report

    def report(self, tolerance: float | None, whole_batch: bool) -> Report:
        """Run and compare the step, and return the report. Every other rank must serve its evidence meanwhile.

        Without a tolerance, that of the dtype applies. With `whole_batch`, effects of microbatches are noted.
        """
        self.load()
        expected, gradients = self.expect()
        errors = self._compare_gradients(gradients)
        untied = self._compare_ties()
        dtypes = {str(p.dtype).removeprefix("torch.") for p in self.reference.named_parameters().values()}
        dtypes |= {dtype for one in expected for dtype in one.record.dtypes}
        dtype, usual = tolerance_for(dtypes)
        allowed = usual if tolerance is None else tolerance
        sides = {
            replica.index: (Side.of({rank: self.ranks[rank].record for rank in replica.ranks}), one.record)
            for replica, one in zip(self.replicas, expected, strict=True)
        }
        departure, notes = self._departure(sides, errors, untied, allowed)
        notes += self._hook_note()
        if whole_batch and self.num_microbatches > 1:
            notes += whole_batch_note(
                self, gradients, {key[0] for one in expected for key in one.record.calls}, allowed
            )
        return Report(
            rows=tuple(sorted(self.rows, key=lambda row: -row.error)),
            first_departure=departure,
            notes=tuple(notes),
            dtype=dtype,
            tolerance=allowed,
            num_module_calls=sum(len(comparable_calls(side.record, record)) for side, record in sides.values()),
            requests=(sum(said.requests[0] for said in self.ranks), sum(said.requests[1] for said in self.ranks)),
            holding=tuple(rank for rank, said in enumerate(self.ranks) if said.groups),
        )

    def _departure(
        self,
        sides: Mapping[int, tuple[Side, ModuleRecord]],
        errors: Mapping[str, tuple[float, str]],
        untied: Mapping[str, str],
        tolerance: float,
    ) -> tuple[Departure | None, list[str]]:
        for replica, (side, record) in sides.items():
            found = first_forward(side, record, replica, tolerance)
            if found is not None:
                departure, key = found
                return departure, _random_note(departure, self.reference.flow.drew.get(key, ()))
        explained = {name: (error, untied.get(name, detail)) for name, (error, detail) in errors.items()}
        backward = first_backward(sides, self.reference.flow, explained, self.reference.paths.values(), tolerance)
        if backward is None and untied:
            name, why = next(iter(untied.items()))
            module = name.rpartition(".")[0]
            return Departure(module=module, phase="forward", what=f"its {name!r} is {why}", error=math.inf), []
        return backward, []

    def _hook_note(self) -> list[str]:
        names = sorted({name for said in self.ranks for name in said.hooked})
        if not names:
            return []
        return [
            f"gradient hooks on {first_of(names)} ran on the ranks; the whole model in one process has only those that "
            "reference() registers"
        ]


def _random_note(departure: Departure, drew: Sequence[str]) -> list[str]:
    foreign = [{"random": "Python's random", "numpy": "NumPy"}[one] for one in drew if one != "torch"]
    if foreign:
        return [
            f"module {departure.module!r} draws random numbers from {' and '.join(foreign)}, of which each rank has "
            "its own: the difference is due to that; draw from torch, whose numbers are the same on both sides"
        ]
    return []
