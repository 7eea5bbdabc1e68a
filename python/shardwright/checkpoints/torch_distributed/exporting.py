"""``smp.export_torch_checkpoint``."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict_saver import save as torch_save

from shardwright.checkpoints.boxes import Piece
from shardwright.checkpoints.decoding import Decoder
from shardwright.checkpoints.places import check_on_disk
from shardwright.checkpoints.saved import Saved
from shardwright.checkpoints.saving import USER
from shardwright.checkpoints.tensors import MASTERS, MODEL, OPTIMIZER
from shardwright.checkpoints.torch_distributed.importing import LOSS_SCALER, MASTER_WEIGHTS, USER_CONTENT
from shardwright.checkpoints.torch_distributed.metadata import METADATA_NAME
from shardwright.checkpoints.torch_distributed.reading import alone
from shardwright.errors import CheckpointError


def export_checkpoint(
    path: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    tag: str | None,
    *,
    model_key: str,
    optimizer_key: str,
    flatten_optimizer_state_dict: bool,
    replace: bool,
) -> None:
    """Export a checkpoint; see :func:`shardwright.export_torch_checkpoint`."""
    check_on_disk("smp.export_torch_checkpoint", folder)
    if not replace and os.path.lexists(os.path.join(folder, METADATA_NAME)):
        raise CheckpointError(f"{os.fspath(folder)!r} has a checkpoint already: replace=True would replace it")
    saved = Saved(path, tag)
    state = _State(saved, model_key, optimizer_key, flatten=flatten_optimizer_state_dict)
    writer = FileSystemWriter(folder)
    with alone(f"cannot write {os.fspath(folder)!r}"):
        torch_save(state.nested, storage_writer=writer, planner=_Planner(state), no_dist=True)


class _State:
    """The state dict of a checkpoint, with tensors that are read when they are written.

    Attributes:
        nested: The state dict; its tensors have no values.
    """

    def __init__(self, saved: Saved, model_key: str, optimizer_key: str, *, flatten: bool) -> None:
        self._saved = saved
        self._names: dict[str, str] = {}
        decoder = Decoder(saved.tensors(USER), plain=True)
        content = saved.content
        model = {
            name.removeprefix(MODEL): self._tensor(name, model_key, name.removeprefix(MODEL))
            for name in saved.kinds
            if name.startswith(MODEL)
        }
        for module, value in content["extra_states"].items():
            model[f"{module}._extra_state".removeprefix(".")] = decoder.decode(value)
        self.nested: dict[str, Any] = {model_key: model}
        optimizer = content["optimizer"]
        if optimizer is not None:
            self.nested[optimizer_key] = self._optimizer(optimizer, decoder, optimizer_key, flatten=flatten)
            scaler = decoder.decode(optimizer["loss_scaler"])
            if scaler is not None:
                self.nested[LOSS_SCALER] = scaler
        masters = {
            name.removeprefix(MASTERS): self._tensor(name, MASTER_WEIGHTS, name.removeprefix(MASTERS))
            for name in saved.kinds
            if name.startswith(MASTERS)
        }
        if masters:
            self.nested[MASTER_WEIGHTS] = masters
        user = decoder.decode(content["content"])
        if user is not None:
            self.nested[USER_CONTENT] = user

    def _tensor(self, name: str, *path: str) -> torch.Tensor:
        """A tensor without values, and a note by which name it is read when torch asks for it at a path."""
        dtype, shape = self._saved.kinds[name]
        self._names[".".join(path)] = name
        return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")

    def _optimizer(self, saved: dict[str, Any], decoder: Decoder, top: str, *, flatten: bool) -> dict[str, Any]:
        state: dict[str, dict[str, Any]] = {
            name: {key: decoder.decode(value) for key, value in values.items()}
            for name, values in saved["values"].items()
        }
        for name in self._saved.kinds:
            if name.startswith(OPTIMIZER):
                of, _, key = name.removeprefix(OPTIMIZER).rpartition("/")
                state.setdefault(of, {})[key] = self._tensor(name, top, "state", of, key)
        options = decoder.decode(saved["options"])
        groups = [{"params": names, **group} for names, group in zip(saved["groups"], options, strict=True)]
        if not flatten:
            return {"state": state, "param_groups": groups}
        flat = {
            f"param_groups.{name}.{key}": value
            for group in groups
            for name in group["params"]
            for key, value in group.items()
            if key != "params"
        }
        return {"state": state, **flat}

    def read(self, name: str) -> torch.Tensor:
        """Read a tensor by its name in the flat state dict."""
        ours = self._names[name]
        dtype, shape = self._saved.kinds[ours]
        values = torch.empty(shape, dtype=getattr(torch, dtype))
        self._saved.read([Piece(ours, shape, (0,) * len(shape), values)])
        return values


class _Planner(DefaultSavePlanner):
    """torch's planner, which reads a tensor when it is to be written."""

    def __init__(self, state: _State) -> None:
        super().__init__()
        self._state = state

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return the tensor or the value that is to be written."""
        found = super().lookup_object(index)
        is_to_be_read = isinstance(found, torch.Tensor) and found.is_meta
        return self._state.read(index.fqn) if is_to_be_read else found
