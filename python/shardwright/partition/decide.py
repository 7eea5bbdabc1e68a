"""Makes the decision for a model from one call of it: trace, audit, and the partitioner of the core."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn

from shardwright import _core
from shardwright.delayed.materialise import has_delayed
from shardwright.errors import PartitionError
from shardwright.frames.checkpointing import mark_of
from shardwright.partition.by_shapes import trace_by_shapes
from shardwright.partition.decision import Decision, JoinReason
from shardwright.partition.flows import without_trace
from shardwright.partition.manual import ManualPlacement, manual_placements
from shardwright.partition.measure import as_request
from shardwright.partition.record import Trace
from shardwright.partition.saved import read_partition
from shardwright.partition.structure import is_compiled, structural_joins
from shardwright.partition.trace import choose_device, trace_forward
from shardwright.partition.tree import ModelTree, has_forward, join_path, tensor_bytes
from shardwright.progress import Progress

_REQUEST_VERSION = 2


def decide(
    module: nn.Module,
    call: Callable[[], Any],
    cfg: Any,
    num_devices: int,
    options: Mapping[str, Any] | None = None,
    together: Callable[[bool], bool] = bool,
    progress: Progress | None = None,
    *,
    alone: bool = True,
    saved: str | None = None,
) -> Decision:
    """Trace one call of a model and divide it over the ranks of a pipeline.

    Args:
        call: Runs one forward. Arguments bound by ``functools.partial`` are copied before the trace uses them.
        options: ``trace_device``, ``trace_execution_times`` and ``trace_memory_usage`` as given to
            ``smp.DistributedModel``.
        together: Makes ranks whose modules contain collectives agree on whether a forward runs again.
        alone: Whether no other rank takes part in the trace. Collectives need values.
        saved: The path of a saved partition to be taken instead of dividing by cost.
    """
    options = options or {}
    progress = progress or Progress(0)
    trace = None
    if not cfg.skip_tracing:
        function, args, kwargs = _taken_apart(call)
        refines = cfg.refine_partition and cfg.auto_partition and num_devices > 1
        device = choose_device(module, options.get("trace_device", "gpu"))
        measured: dict[str, Any] = {
            "measure_times": bool(options.get("trace_execution_times")) or (None if refines else False),
            "measure_memory": bool(options.get("trace_memory_usage", False)),
            "progress": progress,
        }
        if alone and has_delayed(module) and device is not None:
            trace = trace_by_shapes(module, function, args, kwargs, device=device, **measured)
        trace = trace or trace_forward(module, function, args, kwargs, device=device, together=together, **measured)
    with progress.phase("dividing the model over the ranks"):
        return divide(module, trace, cfg, num_devices, saved)


def divide(module: nn.Module, trace: Trace | None, cfg: Any, num_devices: int, saved: str | None = None) -> Decision:
    """Divide a model that may have been traced; without a trace, only parameters and modules determine the cost.

    A saved partition, of this path, places every module that has parameters.

    Raises:
        PartitionError: The model cannot be divided as requested.
    """
    if num_devices > 1 and is_compiled(module):
        raise PartitionError(
            f"{type(module).__name__} is compiled as a whole and cannot be divided: compile the modules that stay "
            "whole instead (its layers, say), before smp.DistributedModel"
        )
    tree = ModelTree.of(module)
    # Modules without parameters at any depth run on whichever rank calls them.
    follows = {entry.path for entry in tree.modules if entry.path and next(entry.module.parameters(), None) is None}
    joins = (
        *structural_joins(tree, traced=trace is not None),
        *(trace.joins if trace is not None else ()),
        *_buffer_joins(tree, trace, follows),
    )
    if saved is not None:
        placed = [each for each in read_partition(saved, tree, num_devices) if each.path not in follows]
    else:
        placed = manual_placements(tree, auto=cfg.auto_partition)
    for place in placed:
        if place.pp_rank >= num_devices:
            raise PartitionError(
                f"module {place.path!r} was placed on partition {place.pp_rank}, but pipeline_parallel_degree is "
                f"{num_devices}; allowed: 0 to {num_devices - 1}"
            )
    request = partition_request(tree, trace, joins, placed, cfg, num_devices)
    try:
        result = json.loads(_core.partition(json.dumps(request)))
    except PartitionError as error:
        raise PartitionError(f"{error}{_why_together(joins, placed)}") from None
    fixed = {path for join in joins for path in join.modules} | {place.path for place in placed}
    return _decision(tree, trace, result, joins, follows - fixed, num_devices)


def _why_together(joins: Iterable[JoinReason], placed: Iterable[ManualPlacement]) -> str:
    """Return why modules that the script placed on different ranks must be on one rank."""
    places = {place.path: place.pp_rank for place in placed}

    def place_of(path: str) -> int | None:
        while path and path not in places:
            path = path.rpartition(".")[0]
        return places.get(path)

    reasons = [
        f"{join.modules[0] or 'the model itself'!r} {join.reason} ({join.modules[1] or 'the model itself'!r})"
        for join in joins
        if len({place_of(path) for path in join.modules} - {None}) > 1
    ]
    return (
        f" ({'; '.join(reasons[:3])}): place them on one rank, or let one return what the other needs"
        if reasons
        else ""
    )


def partition_request(
    tree: ModelTree,
    trace: Trace | None,
    joins: Iterable[JoinReason],
    placed: Iterable[ManualPlacement],
    cfg: Any,
    num_devices: int,
) -> dict[str, Any]:
    """Return the request to the core's partitioner as plain data, with modules and parameters by number."""
    number = {entry.path: index for index, entry in enumerate(tree.modules)}
    activation_bytes = {} if trace is None else _activation_bytes(tree, trace)
    modules = []
    for entry in tree.modules:
        row: dict[str, Any] = {
            "name": entry.path,
            "class_name": type(entry.module).__name__,
            "has_forward": has_forward(entry.module),
            "parents": [number[parent] for parent in entry.parents],
            "parameters": list(dict.fromkeys(entry.parameters.values())),
            "buffer_bytes": sum(tensor_bytes(tree.buffers[i].tensor) for i in dict.fromkeys(entry.buffers.values())),
        }
        record = trace.modules.get(entry.path) if trace is not None else None
        if record is not None:
            row["execution_index"] = record.execution_index
            row["own_seconds"] = record.own_seconds
            row["own_activation_bytes"] = activation_bytes[entry.path]
        modules.append(row)
    calls = trace.calls if trace is not None else ()
    return {
        **_measured(trace, cfg, number),
        "format_version": _REQUEST_VERSION,
        "num_devices": num_devices,
        "alpha": cfg.memory_weight,
        "auto": cfg.auto_partition,
        "default_partition": cfg.default_partition,
        "modules": modules,
        "parameters": [
            {"names": list(entry.names), "bytes": tensor_bytes(entry.tensor), "numel": entry.tensor.numel()}
            for entry in tree.parameters
        ],
        "joins": sorted({tuple(sorted((number[a], number[b]))) for a, b in (join.modules for join in joins)}),
        "pins": [{"module": number[place.path], "pp_rank": place.pp_rank} for place in placed],
        "calls": [
            {"caller": number[caller], "callee": number[callee], "count": count}
            for caller, callee, count in calls
            if caller != callee
        ],
    }


def _activation_bytes(tree: ModelTree, trace: Trace) -> dict[str, int]:
    """Return the bytes that each module keeps for its backward: checkpointed ones keep their arguments, and no more."""
    kept = {path: record.own_activation_bytes for path, record in trace.modules.items()}
    for entry in reversed(tree.modules):  # what a module around it keeps counts, not what is computed in that
        mark = mark_of(entry.module)
        if mark is None or entry.path not in kept:
            continue
        prefix = f"{entry.path}." if entry.path else ""
        inside = [path for path in kept if path.startswith(prefix)]
        groups = -(-len(list(entry.module.children())) // mark.group) if mark.group else 1
        kept |= {**dict.fromkeys(inside, 0), entry.path: groups * trace.modules[entry.path].input_bytes}
    return kept


def _measured(trace: Trace | None, cfg: Any, number: Mapping[str, int]) -> dict[str, Any]:
    """Return the measurements for the refinement of the partition, if there is one."""
    if trace is None or trace.measurement is None or not cfg.refine_partition:
        return {}
    # Lists, programs and `auto` are approximated by the default.
    policy = cfg.pipeline if cfg.pipeline in ("simple", "looped", "zero_bubble") else "interleaved"
    schedule = policy if policy == "simple" else f"{policy}(active={cfg.active_microbatches})"
    undivided = sorted({flow.scope for flow in trace.flows})
    return {"measured": as_request(trace.measurement, number, schedule, cfg.microbatches, undivided)}


def _taken_apart(call: Callable[[], Any]) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    if isinstance(call, functools.partial):
        return call.func, call.args, dict(call.keywords)
    return call, (), {}


def _buffer_joins(tree: ModelTree, trace: Trace | None, follows: set[str]) -> tuple[JoinReason, ...]:
    """Join modules without parameters, whose buffers change, with their callers."""
    joins = []
    for entry in tree.modules:
        if entry.path not in follows or not entry.buffers:
            continue
        if trace is None:
            callers = list(entry.parents) if len(entry.parents) > 1 else []
        elif any(tree.buffers[index].name in trace.written_buffers for index in entry.buffers.values()):
            callers = sorted(_callers(entry.path, trace, follows))
        else:
            callers = []
        joins += [
            JoinReason(modules=(caller, entry.path), reason="calls it, and its buffers change") for caller in callers
        ]
    return tuple(joins)


def _callers(path: str, trace: Trace, follows: set[str]) -> set[str]:
    """Return the modules with parameters from which `path` is called, through followers."""
    found: set[str] = set()
    seen = {path}
    open_paths = [path]
    while open_paths:
        callee = open_paths.pop()
        for caller, called, _ in trace.calls:
            if called == callee and caller not in seen:
                seen.add(caller)
                if caller in follows:
                    open_paths.append(caller)
                else:
                    found.add(caller)
    return found


def _decision(
    tree: ModelTree,
    trace: Trace | None,
    result: dict[str, Any],
    joins: tuple[JoinReason, ...],
    follows: set[str],
    num_devices: int,
) -> Decision:
    ranks: dict[str, int] = {row["name"]: row["pp_rank"] for row in result["modules"]}
    # A module that follows its callers is on their ranks, and its constant buffers on each of them.
    running: dict[str, tuple[int, ...]] = {}
    for path in sorted(follows):
        callers = _callers(path, trace, follows) if trace is not None else set()
        running[path] = tuple(sorted({ranks[caller] for caller in callers} or {ranks[path]}))
        if len(running[path]) == 1:
            ranks[path] = running[path][0]
    report = {
        key: value for key, value in result.items() if key not in ("modules", "parameter_ranks", "format_version")
    }

    def ranks_of(paths: Iterable[str]) -> set[int]:
        return {rank for path in paths for rank in running.get(path, {ranks[path]})}

    attributes = {
        join_path(path, name): tuple(sorted(ranks_of(writers)))
        for (path, name), writers in (trace.attributes if trace is not None else {}).items()
    }
    reads = {
        join_path(path, name): tuple(sorted(elsewhere))
        for (path, name), readers in (trace.reads if trace is not None else {}).items()
        if (elsewhere := ranks_of(readers) - ranks_of([path]))
    }
    return Decision.of(
        tree,
        ranks,
        num_devices,
        follows=running,
        attributes=attributes,
        temporaries=tuple(sorted(join_path(*attribute) for attribute in trace.temporaries))
        if trace is not None
        else (),
        reads=reads,
        joins=joins,
        kept=trace.kept if trace is not None else without_trace(tree),
        one_at_a_time=_interrupted(trace, ranks, follows),
        report=report,
    )


def _interrupted(trace: Trace | None, ranks: dict[str, int], follows: set[str]) -> tuple[str, ...]:
    """Return state that another microbatch could overwrite during a call to another rank or before a backward."""
    found: dict[str, None] = {}
    for flow in trace.flows if trace is not None else ():
        prefix = join_path(flow.scope, "")
        inside = {rank for path, rank in ranks.items() if path not in follows and (path + ".").startswith(prefix or "")}
        if len(inside) > 1 or flow.meets_backward:
            found[flow.what] = None
    return tuple(found)
