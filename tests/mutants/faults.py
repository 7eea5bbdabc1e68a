"""The faults: what stands in a file, what stands there instead, and which tests are likely to find it."""

from __future__ import annotations

from dataclasses import dataclass

_FRAMES = "python/shardwright/frames"
_DATA = "python/shardwright/data_parallel"
_TENSOR = "python/shardwright/tensor_parallel"


@dataclass(frozen=True)
class Fault:
    """A change of one place.

    Attributes:
        area: The part of the library.
        what: What is wrong with it then.
        file: The file, from the repository's root.
        old: What stands there, once.
        new: What stands there instead.
        tests: Tests of ``make test`` that run first: of a crate, if it is one word, otherwise files of pytest.
    """

    area: str
    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


FAULTS = (
    Fault(
        "frames",
        "of two gradients that enter a node, one is lost",
        f"{_FRAMES}/backward.py",
        "waiting[key] = waiting[key] + gradient if key in waiting else gradient",
        "waiting[key] = gradient",
        ("tests/frames",),
    ),
    Fault(
        "frames",
        "a cut keeps the last gradient only",
        f"{_FRAMES}/cut.py",
        "self.gradient = gradient if self.gradient is None else self.gradient + gradient",
        "self.gradient = gradient",
        ("tests/frames",),
    ),
    Fault(
        "frames",
        "a user's hook sees a part of the gradient",
        f"{_FRAMES}/levels.py",
        "level = self.level[vertex] + 1 if behind in hooked else base",
        "level = base",
        ("tests/frames",),
    ),
    Fault(
        "frames",
        "calls that no gradient reaches are never closed",
        f"{_FRAMES}/backward.py",
        "if close or any(slot.gradient is not None for slot, _ in call.results):",
        "if any(slot.gradient is not None for slot, _ in call.results):",
        ("tests/frames",),
    ),
    Fault(
        "machine",
        "a message overtakes another thread's",
        "crates/runtime/src/outbox.rs",
        ".partition(|(to, _)| self.sending_to.contains(to));",
        ".partition(|(to, _)| self.sending_to.contains(to) && to.0 == u32::MAX);",
        ("shardwright-runtime",),
    ),
    Fault(
        "machine",
        "an answer unlike the predicted one goes unseen",
        "crates/runtime/src/machine/held.rs",
        ".all(|(meta, part)| *meta == part.meta)",
        ".all(|(meta, part)| meta.dtype == part.meta.dtype)",
        ("shardwright-runtime",),
    ),
    Fault(
        "machine",
        "the simple schedule begins backward one forward too early",
        "crates/schedule/src/policy/simple.rs",
        "progress.forwards_done == progress.num_microbatches",
        "progress.forwards_done + 1 >= progress.num_microbatches",
        ("shardwright-schedule",),
    ),
    Fault(
        "machine",
        "one microbatch too many is in flight",
        "crates/schedule/src/policy/interleaved.rs",
        "progress.active() < active",
        "progress.active() <= active",
        ("shardwright-schedule",),
    ),
    Fault(
        "reducers",
        "buckets sent during backward are not divided by the microbatches",
        f"{_DATA}/reducer.py",
        "self._await(bucket, num_ranks * (sent_divisor if bucket.index() < self.sent else 1))",
        "self._await(bucket, num_ranks)",
        ("tests/data_parallel",),
    ),
    Fault(
        "reducers",
        "a bucket that one rank sent too early is not sent again",
        f"{_DATA}/reducer.py",
        "            if bucket in again:\n",
        "            if bucket in again and not bucket:\n",
        ("tests/data_parallel",),
    ),
    Fault(
        "reducers",
        "a parameter that no rank used gets a gradient",
        f"{_DATA}/bucket.py",
        "            if parameter not in used:\n                continue\n",
        "",
        ("tests/data_parallel",),
    ),
    Fault(
        "partition",
        "segments are balanced by their sum",
        "crates/partition/src/allot.rs",
        "let largest = last.max(best[start]);",
        "let largest = last + best[start];",
        ("shardwright-partition",),
    ),
    Fault(
        "partition",
        "devices are dealt by cost for each device that one has already",
        "crates/partition/src/allot.rs",
        "let (own, others) = (won[number].len() + 1, won[other].len() + 1);",
        "let (own, others) = (won[number].len().max(1), won[other].len() + 1);",
        ("shardwright-partition",),
    ),
    Fault(
        "partition",
        "a shared parameter's bytes count for each module that has it",
        "crates/partition/src/cost.rs",
        "if !std::mem::replace(&mut counted[parameter], true) {",
        "if !std::mem::replace(&mut counted[parameter], false) {",
        ("shardwright-partition",),
    ),
    Fault(
        "wire",
        "a complex number loses its imaginary part",
        "crates/wire/src/codec/value.rs",
        "writer.f64(*imaginary);",
        "writer.f64(*imaginary * 0.0);",
        ("shardwright-wire",),
    ),
    Fault(
        "wire",
        "a heartbeat says of sending what is true of computing",
        "crates/wire/src/codec/frame.rs",
        "writer.bool(heartbeat.sending);",
        "writer.bool(heartbeat.executing);",
        ("shardwright-wire",),
    ),
    Fault(
        "wire",
        "a place in shared memory is off by one",
        "crates/wire/src/codec/placement.rs",
        "writer.u64(place.offset);",
        "writer.u64(place.offset + 1);",
        ("shardwright-wire",),
    ),
    Fault(
        "tensor parallelism",
        "the gradient of a replicated input is not summed",
        f"{_TENSOR}/layouts.py",
        "{SHARED: PARTIAL, PARTIAL: SHARED}",
        "{SHARED: WHOLE, PARTIAL: SHARED}",
        ("tests/tensor_parallel/test_tensor_parallel.py", "tests/tensor_parallel/test_parts.py"),
    ),
    Fault(
        "tensor parallelism",
        "every rank keeps the first rank's slice",
        f"{_TENSOR}/layouts.py",
        "return [torch.split(tensor, list(of), dim)[group.rank].clone() for tensor, (dim, of) in cuts]",
        "return [torch.split(tensor, list(of), dim)[0].clone() for tensor, (dim, of) in cuts]",
        ("tests/tensor_parallel/test_tensor_parallel.py", "tests/tensor_parallel/test_parts.py"),
    ),
    Fault(
        "tensor parallelism",
        "every rank adds the bias of a row-parallel linear layer",
        "python/shardwright/nn/parallel_linear.py",
        "Sharding(owner=0) if sums_alone else as_output",
        "as_output",
        ("tests/tensor_parallel/test_tensor_parallel.py", "tests/tensor_parallel/test_parts.py"),
    ),
)
