"""What steps log: values of microbatches and ranks, which become values of the whole batch."""

from __future__ import annotations

import contextlib
import json
import math
import numbers
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from torchmetrics import Metric

from shardwright.partition import is_tracing

#: Positional arguments of ``LightningModule.log`` after the value.
_POSITIONAL = ("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx", "enable_graph", "sync_dist", "sync_dist_group")
#: What the replay leaves out, since values are those of all ranks by then.
_NEEDLESS = ("enable_graph", "sync_dist", "sync_dist_group", "rank_zero_only", "reduce_fx")
_REDUCTIONS = ("mean", "sum", "max", "min")

Record = dict[str, Any]


class Recorder(threading.local):
    """Takes the place of ``LightningModule.log``: in a step it keeps what is logged, elsewhere it logs.

    Attributes:
        records: What the microbatch that this thread runs has logged; None outside a step.
    """

    records: list[Record] | None = None
    samples = 1
    weight = 1.0

    @contextlib.contextmanager
    def of_microbatch(self, samples: int, weight: float) -> Iterator[list[Record]]:
        """Keep what is logged inside the block, of a microbatch with so many samples, which counts so much."""
        self.records, self.samples, self.weight = [], samples, weight
        try:
            yield self.records
        finally:
            self.records = None

    def log(self, module: LightningModule, name: str, value: Any, *args: Any, **options: Any) -> None:
        """Log a value; see ``LightningModule.log``."""
        if isinstance(value, Metric):
            raise MisconfigurationException(
                f"`self.log({name!r}, ...)` of a torchmetrics.Metric with `ShardwrightStrategy`, whose ranks have "
                "parts of the batch: log values, such as `metric.compute()` in `on_validation_epoch_end`"
            )
        options |= dict(zip(_POSITIONAL, args, strict=False))
        if options.get("sync_dist_group") is not None:
            raise MisconfigurationException(
                f"`self.log({name!r}, sync_dist_group=...)` with `ShardwrightStrategy`, which reduces values over the "
                "ranks with different samples: leave it out"
            )
        if self.records is None:
            if options.pop("sync_dist", False):
                value = module.trainer.strategy.reduce(torch.as_tensor(value), reduce_op=_reduction(options))
            LightningModule.log(module, name, value, **options)
        elif not is_tracing():
            self.records.append(self._record(name, value, options))

    def _record(self, name: str, value: Any, options: dict[str, Any]) -> Record:
        kept = {key: one for key, one in options.items() if key not in _NEEDLESS}
        dtype = None
        if isinstance(value, torch.Tensor):
            if value.numel() != 1:
                raise ValueError(
                    f"`self.log({name}, {value})` was called, but the tensor must have a single element."
                    f" You can try doing `self.log({name}, {value}.mean())`"
                )
            dtype = str(value.dtype).removeprefix("torch.") if value.is_floating_point() else None
            value = value.item()
        elif not isinstance(value, numbers.Real):
            raise ValueError(
                f"`self.log({name}, {value})` was called, but `{type(value).__name__}` values cannot be logged"
            )
        size = kept.pop("batch_size", None)
        return {
            "name": name,
            "value": float(value),
            "dtype": dtype,
            "reduction": _reduction(options),
            "samples": self.samples if size is None else int(size),
            "weight": self.weight if size is None else float(size),
            "options": kept,
        }


def _reduction(options: Mapping[str, Any]) -> str:
    given = options.get("reduce_fx", "mean")
    name: str = given.lower() if isinstance(given, str) else getattr(given, "__name__", "")
    name = {"avg": "mean", "amax": "max", "amin": "min"}.get(name, name)
    if name not in _REDUCTIONS:
        raise MisconfigurationException(
            f"Only `self.log(..., reduce_fx={{min,max,mean,sum}})` are supported. Found: {given}"
        )
    return name


def as_text(records: list[Record]) -> str:
    """Return records as one value, which steps return as it is; numbers are exact."""
    return json.dumps(records)


def from_texts(texts: str | Sequence[str], microbatches: int) -> list[list[Record]]:
    """Return the records of each microbatch, from what a step has returned: one text, if all are equal."""
    each = [texts] * microbatches if isinstance(texts, str) else texts
    return [json.loads(text) for text in each]


def merged(several: Sequence[Sequence[Record]]) -> list[Record]:
    """Merge the records of microbatches, of all ranks with different samples, into those of the whole batch.

    What is logged several times under a name stays so. A name that only some microbatches log is that of these.
    """
    same: dict[tuple[str, int], list[Record]] = {}
    for records in several:
        seen: dict[str, int] = {}
        for record in records:
            number = seen[record["name"]] = seen.get(record["name"], 0) + 1
            same.setdefault((record["name"], number), []).append(record)
    return [_merged(records) for records in same.values()]


def _merged(records: Sequence[Record]) -> Record:
    first, values = records[0], [record["value"] for record in records]
    reduction = first["reduction"]
    if len(records) == 1:
        value = values[0]
    elif reduction == "mean":
        value = weighted_mean(values, [record["weight"] for record in records])
    elif reduction == "sum":
        value = math.fsum(values)
    else:  # as torch does, and not Python: what is no number wins
        value = float(getattr(torch.tensor(values, dtype=torch.float64), reduction)())
    return {**first, "value": value, "samples": sum(record["samples"] for record in records)}


def weighted_mean(values: Sequence[Any], weights: Sequence[float]) -> Any:
    """Return the mean of numbers or tensors; what has weight 0 does not count, whatever it is."""
    total = math.fsum(weights)
    terms = [value * (weight / total) for value, weight in zip(values, weights, strict=True) if weight]
    return sum(terms[1:], start=terms[0]) if terms else values[0] * math.nan


def replay(module: LightningModule, records: Sequence[Record]) -> None:
    """Log records of the whole batch, on a rank."""
    for record in records:
        value = record["value"]
        if record["dtype"] is not None:
            value = torch.tensor(value, dtype=getattr(torch, record["dtype"]), device=module.device)
        LightningModule.log(
            module,
            record["name"],
            value,
            reduce_fx=record["reduction"],
            batch_size=record["samples"],
            **record["options"],
        )
