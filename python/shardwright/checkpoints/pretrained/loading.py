"""``smp.DistributedModel.load_pretrained``."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from shardwright.checkpoints.places import check_on_disk
from shardwright.checkpoints.pretrained.folder import Folder
from shardwright.checkpoints.tensors import MODEL, ModelTensors
from shardwright.checkpoints.together import on_all_ranks, outside_steps
from shardwright.errors import CheckpointError
from shardwright.job.runtime import Runtime
from shardwright.model import DistributedModel
from shardwright.model.updates import Updates

_OPERATION = "model.load_pretrained"
_MAX_LISTED = 40


def load_pretrained(runtime: Runtime, model: DistributedModel, folder: str | os.PathLike[str], *, strict: bool) -> None:
    """Load a folder in the layout of ``transformers``; all ranks call this.

    Each rank reads the bytes of what it holds, out of files that are mapped into memory. A model that is not divided
    yet is compared with the files now, and gets its values when it is divided.
    """
    outside_steps(_OPERATION)
    check_on_disk(_OPERATION, folder)
    found: list[_Loading] = []

    def look() -> tuple[str, str]:
        found.append(_Loading(runtime, model, os.path.abspath(folder)))
        return json.dumps([found[0].wanted(), found[0].aliases]), found[0].fingerprint()

    told = on_all_ranks(_OPERATION, look)
    (own,) = found
    differing = next((rank for rank, (_, files) in enumerate(told) if files != told[0][1]), None)
    if differing is not None:
        raise CheckpointError(f"{_OPERATION}: ranks 0 and {differing} find other files in {own.path!r}")
    wanted = [json.loads(text) for text, _ in told]
    own.compare([shapes for shapes, _ in wanted], [aliases for _, aliases in wanted], strict=strict)
    with runtime[Updates].loading("weights"):
        on_all_ranks(_OPERATION, own.load_or_defer)


class _Loading:
    """What one rank loads."""

    def __init__(self, runtime: Runtime, model: DistributedModel, path: str) -> None:
        self.path = path
        self._runtime = runtime
        self._model = model
        self._folder = Folder(path)
        self._tensors = ModelTensors(runtime, model)
        self._tensors.refuse_few_bits(_OPERATION)
        #: By name in the model, the name in the files.
        self._names: dict[str, str] = {}
        self._is_loaded = False

    def wanted(self) -> dict[str, Sequence[int]]:
        """The shape of each tensor of which this rank's model has a part, by name."""
        return {name.removeprefix(MODEL): shape for name, (_, shape) in self._tensors.wanted().items()}

    @property
    def aliases(self) -> dict[str, str]:
        """Further names of tensors, and the names of these."""
        return self._tensors.aliases

    def fingerprint(self) -> str:
        """What files hold, to compare over ranks."""
        return json.dumps(
            [[name, list(place.shape), place.begin] for name, place in sorted(self._folder.places.items())]
        )

    def compare(
        self, wanted: Iterable[Mapping[str, Sequence[int]]], aliases: Iterable[Mapping[str, str]], *, strict: bool
    ) -> None:
        """Compare the files with the model of all ranks.

        Raises:
            CheckpointError: Shapes differ; or names differ, and ``strict`` is set.
        """
        shapes = {name: tuple(shape) for one in wanted for name, shape in one.items()}
        places = self._folder.places
        others: dict[str, dict[str, None]] = {}
        for alias, name in (pair for one in aliases for pair in one.items()):
            others.setdefault(name, {})[alias] = None
        used: set[str] = set()
        missing, shaped, untied = [], [], []
        for name, shape in shapes.items():
            candidates = [theirs for one in (name, *others.get(name, ())) for theirs in self._called(one)]
            there = [one for one in candidates if one in places]
            used.update(there)
            if not there:
                missing.append(name)
                continue
            self._names[name] = there[0]
            if places[there[0]].shape != shape:
                shaped.append(f"{name}: shape {list(places[there[0]].shape)} in the files, wanted {list(shape)}")
            untied += [
                f"one tensor in the model, two in the files: {there[0]} and {other}"
                for other in there[1:]
                if not self._are_equal(there[0], other)
            ]
        names = untied + [
            f"missing in the files: {name}" for name in sorted(missing) if not self._ignored("missing", name)
        ]
        names += [
            f"unexpected in the files: {name}"
            for name in sorted(places.keys() - used)
            if not self._ignored("unexpected", name)
        ]
        if shaped or (names and strict):
            every = [*sorted(shaped), *names]
            listed = "\n  ".join(every[:_MAX_LISTED])
            more = f"\n  and {len(every) - _MAX_LISTED} more" if len(every) > _MAX_LISTED else ""
            hint = "" if shaped else " strict=False would load what is in both."
            raise CheckpointError(
                f"{_OPERATION}: {self.path!r} is not of this model; nothing was loaded.{hint} Differences:"
                f"\n  {listed}{more}"
            )
        if names and self._runtime.place.rank == 0:
            self._runtime.logger.warning(
                "%s: %d differences between files and model, which are left out: %s",
                _OPERATION,
                len(names),
                "; ".join(names[:5]),
            )

    def _are_equal(self, name: str, other: str) -> bool:
        """Whether two tensors of the files have the same shape, dtype and bytes."""
        first, second = (self._folder.tensor(one) for one in (name, other))
        if first.shape != second.shape or first.dtype != second.dtype:
            return False
        return torch.equal(first.reshape(-1).view(torch.uint8), second.reshape(-1).view(torch.uint8))

    def _called(self, name: str) -> list[str]:
        """What a tensor may be called in files: those of a model without its head, or with one, differ in a prefix."""
        prefix = getattr(self._model.module, "base_model_prefix", "")
        if not prefix:
            return [name]
        without = [name.removeprefix(f"{prefix}.")] if name.startswith(f"{prefix}.") else []
        return [name, *without, f"{prefix}.{name}"]

    def _ignored(self, kind: str, name: str) -> bool:
        """Whether ``transformers`` does not mind that a name is missing or unexpected, as that of a constant."""
        patterns = getattr(self._model.module, f"_keys_to_ignore_on_load_{kind}", None) or ()
        return any(re.search(pattern, name) for pattern in patterns)

    def load_or_defer(self) -> None:
        """Load now, or once the model is divided."""
        if self._model.placement.partitioned:
            self._load()
        else:
            self._model.placement.deferred_loads.add(repr(self.path), self._load, self._model.module)
            self._model.register_post_partition_hook(lambda *_: self._load_divided())

    def _load_divided(self) -> None:
        if self._is_loaded:
            return
        try:
            self._load()
        except BaseException as error:
            self._runtime[Updates].loaded_in_part("weights", error)
            error.add_note(f"while {_OPERATION} loaded {self.path!r} into the model that was divided")
            raise

    def _load(self) -> None:
        # The first step may be an evaluation in inference mode, with training to follow.
        with torch.inference_mode(False), torch.no_grad():
            for named in ModelTensors(self._runtime, self._model).every:
                for piece in named.pieces("") if named.is_here else ():
                    theirs = self._names.get(piece.name)
                    if theirs is None:
                        continue
                    values: Any = self._folder.tensor(theirs)
                    for dim, (begin, size) in enumerate(zip(piece.offset, piece.size, strict=True)):
                        values = values.narrow(dim, begin, size)
                    piece.view.copy_(values)
        self._is_loaded = True
