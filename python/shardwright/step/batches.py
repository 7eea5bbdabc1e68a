"""Checks batches: whether the ranks of a pipeline received the same one, and whether microbatches count alike."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves

from shardwright.data_parallel.weights import LabelCounts
from shardwright.job.runtime import Runtime
from shardwright.step.split import MicrobatchArguments, Splitter

if TYPE_CHECKING:
    from shardwright.step.decorator import StepFunction

#: A checksum of the tensors of each argument, by the argument's name.
Fingerprints = dict[str, int]

#: The target that PyTorch's losses ignore by default.
_IGNORED = -100
#: Batches are compared in the first calls of a step function, and then once in a number of calls.
_FIRST_CALLS = 3
_LATER_CALLS = 100
#: The approximate number of values of a tensor in its checksum, evenly spaced.
_VALUES = 1024
#: What divides data sets of Ray, whose shards are those of processes.
_OF_RAY = ". With Ray Data, give the TorchTrainer dataset_config=shardwright.ray.DataConfig(config of smp.init)"


def is_compared(call: int) -> bool:
    """Return whether ranks compare batches in the call of a step function with this number, counted from 1."""
    return call <= _FIRST_CALLS or call % _LATER_CALLS == 0


def fingerprints(arguments: Iterable[tuple[str, Any]]) -> Fingerprints:
    """Return checksums of shapes, dtypes and some values of the tensors in each argument that has any."""
    found: Fingerprints = {}
    for name, value in arguments:
        tensors = [] if isinstance(value, torch.nn.Module) else [leaf for leaf in tree_leaves(value) if _is_plain(leaf)]
        for tensor in tensors:
            found[name] = _checksum(tensor, found.get(name, 0))
    return found


def _is_plain(value: object) -> bool:
    return type(value) is torch.Tensor and value.layout == torch.strided and value.device.type != "meta"


def _checksum(tensor: torch.Tensor, start: int) -> int:
    described = zlib.crc32(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), start)
    if tensor.numel() == 0:
        return described
    with torch.no_grad(), torch.inference_mode(False):
        flat = tensor.detach().reshape(-1)[:: max(tensor.numel() // _VALUES, 1)]
        values = flat.cpu().resolve_conj().resolve_neg().contiguous()
        return zlib.crc32(values.view(torch.uint8).numpy().tobytes(), described)


def warn_of_others(runtime: Runtime, step: StepFunction[..., Any], ours: Fingerprints, roots: Fingerprints) -> None:
    """Log a warning, once, if arguments differ from those of the first rank of the pipeline."""
    others = [name for name, checksum in ours.items() if roots.get(name, checksum) != checksum]
    if not others or step.warned_of_batches:
        return
    step.warned_of_batches = True
    runtime.logger.warning(
        "step %d (%s): %s differs on rank %d from that on rank %d, the first of its pipeline, whose batch alone is "
        "trained on. Ranks of a pipeline have to be given the same batch, or None: divide data by smp.dp_rank() of "
        "smp.dp_size(), as smp.DistributedSampler does, and not by processes; seed every rank alike%s",
        runtime.step.number,
        step.name,
        " and ".join(others),
        runtime.place.rank,
        runtime.place.pp_ranks[0],
        _OF_RAY if "ray.train" in sys.modules else "",
    )


def differing_labels(splitter: Splitter, parts: Sequence[MicrobatchArguments]) -> LabelCounts | None:
    """Return the first label tensor of which microbatches have different numbers of values to count, or None."""
    counts: dict[str, list[int]] = {}
    for args, kwargs in parts:
        for argument, value in splitter.named(args, kwargs):
            for path, leaf in () if isinstance(value, torch.nn.Module) else tree_flatten_with_path(value)[0]:
                if _is_plain(leaf) and leaf.dtype == torch.int64 and leaf.dim():
                    counts.setdefault(argument + keystr(path), []).append(int((leaf != _IGNORED).sum()))
    return next((LabelCounts(*item) for item in counts.items() if len(set(item[1])) > 1), None)


def warn_of_labels(runtime: Runtime, step: StepFunction[..., Any], labels: LabelCounts) -> None:
    """Log a warning that the mean of the microbatches' means is not the mean over the batch."""
    step.warned_of_labels = True
    shown = ", ".join(map(str, labels.counts[:8])) + (", ..." if len(labels.counts) > 8 else "")
    runtime.logger.warning(
        "step %d (%s): microbatches have different numbers of labels in %s that are not %d (%s), and each microbatch "
        "counts alike in the gradients: the mean of their means is not the mean over the batch. Write "
        "model.backward(loss, weight=(%s != %d).sum()), with the labels that the loss counts (a causal language "
        "model's leaves out the first of each sequence)",
        runtime.step.number,
        step.name,
        labels.name,
        _IGNORED,
        shown,
        labels.name,
        _IGNORED,
    )
