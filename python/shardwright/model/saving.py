"""The methods of ``smp.DistributedModel`` that save, load and gather the values of a model."""

from __future__ import annotations

import functools
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Self

from torch import nn

from shardwright.errors import ConfigError
from shardwright.job.ranks import MP_GROUP, WORLD
from shardwright.model.gather import on_every_rank
from shardwright.model.hooks import versions
from shardwright.model.placement import Placement
from shardwright.model.pretrained import PretrainedFolders
from shardwright.model.sharded_state import load_whole_state_dict, whole_state_dict
from shardwright.model.state_dict import (
    PARTIAL_KEY,
    Asked,
    IncompatibleKeys,
    asked,
    load_state_dict,
    local_state_dict,
    make_whole_on_cpu,
    state_dict,
)
from shardwright.model.translation import as_distributed
from shardwright.model.updates import Updates


class Saving(nn.Module):
    """Saves and loads a model that may be divided. Names are those of the wrapped module."""

    module: nn.Module
    placement: Placement
    _updates: Updates

    def local_state_dict(self) -> dict[str, Any]:
        """Return this rank's part of the state dict, marked by the key ``_smp_is_partial``, without communication.

        With ``sharded_data_parallel_degree`` it has whole parameters, on the CPU, which are gathered: the ranks that
        shard them must all call this method.
        """
        self._updates.check_whole("model.local_state_dict")
        self.placement.deferred_loads.run(self.module)
        self.placement.reset_shards()
        return local_state_dict(self.module, self.placement.ownership)

    def state_dict(  # type: ignore[override]
        self,
        gather_to_rank0: bool = False,
        *,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
    ) -> dict[str, Any]:
        """Return the state dict of the whole model, on the CPU.

        Every rank of a model replica (MP_GROUP: the pipeline and, with distributed modules, its tensor-parallel ranks)
        must call this method; one replica (``smp.rdp_rank() == 0``) is enough, but with
        ``sharded_data_parallel_degree`` every rank must. Tensors of distributed modules, and sharded parameters, are
        whole in the result. Before the model is divided over pipeline ranks, and without distributed modules and
        sharded parameters, nothing is sent or moved.

        Args:
            gather_to_rank0: Return it on the first rank of the replica only, and ``{}`` on the others.
            destination: A dict to fill and return. A module around the model passes its own.
            prefix: The prefix of each name.
            keep_vars: Keep tensors attached to the autograd graph. Not supported when tensors are gathered from several
                ranks.

        Raises:
            ConfigError: `keep_vars` is set for a model that is divided.
            RemoteError: It failed on another rank of the replica, such as in ``get_extra_state`` of a module there.
        """
        if keep_vars and (self._is_sharded or self.placement.ownership or self.placement.sharding):
            raise ConfigError(
                "model.state_dict(keep_vars=True) of a model that is divided over ranks: what is gathered are copies, "
                "with no part in the autograd graph; use keep_vars=False, or model.local_named_parameters()"
            )

        def prepare() -> None:
            self._updates.check_whole("model.state_dict")
            for before in self._state_dict_pre_hooks.values():
                before(self, prefix, keep_vars)
            self.placement.deferred_loads.run(self.module)

        found = self._gathered(gather_to_rank0, keep_vars, prepare)
        metadata = getattr(found, "_metadata", {"": {"version": self._version}})
        if destination is None:
            destination = OrderedDict()
            destination._metadata = OrderedDict()  # type: ignore[attr-defined]
        destination.update((f"{prefix}{name}", value) for name, value in found.items())
        if hasattr(destination, "_metadata"):
            destination._metadata.update((f"{prefix}{path}".rstrip("."), each) for path, each in metadata.items())
        for after in self._state_dict_hooks.values():
            changed = after(self, destination, prefix, metadata.get("", {}))
            if changed is not None and not getattr(after, "_from_public_api", False):
                destination = changed
        return destination

    def _gathered(self, gather_to_rank0: bool, keep_vars: bool, prepare: Callable[[], None]) -> dict[str, Any]:
        if not self._is_sharded and self.placement.ownership is None and self.placement.sharding is None:
            prepare()
            return self.module.state_dict(keep_vars=keep_vars)

        def ask() -> Asked:
            prepare()
            self.placement.reset_shards()
            told = asked(self.module, self.placement.ownership)
            told.check_sendable()
            return told

        group = WORLD if self.placement.runtime.place.shards_parameters else MP_GROUP
        told = on_every_rank(group, "state_dict", ask)
        if self._is_sharded:
            shardings = self.placement.sharded.by_name()
            return whole_state_dict(self.module, self.placement.ownership, shardings, told, to_first=gather_to_rank0)
        return state_dict(self.module, self.placement.ownership, to_first=gather_to_rank0, told=told)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, same_partition_load: bool = False
    ) -> IncompatibleKeys:
        """Load a state dict, before or after the model is divided. Every rank must call this method.

        Args:
            state_dict: The state dict of a whole model, of which each rank takes its part; or what `local_state_dict`
                returned on a rank of the same place. In that case the parts of all ranks of the pipeline are merged.
                Where modules were replaced for tensor parallelism, a whole one may have the weights of the modules that
                they replaced: these are translated, unless it has the entry ``_smp_is_partial`` with the value False.
            strict: Whether missing and unexpected keys, counted over the whole model, are errors.
            same_partition_load: `state_dict` is this rank's own part under this same partition, so nothing is merged.
                If the model is not divided yet, the part is kept and loaded once it is.

        Returns:
            Missing and unexpected keys of the whole model; none for a deferred load.

        Raises:
            RuntimeError: Shapes differ, or keys differ and `strict` is set. The message is that of PyTorch.
        """
        if same_partition_load and not self.placement.partitioned:
            load = functools.partial(self._load_part, state_dict, strict)
            self.placement.deferred_loads.add("a rank's part of a state dict", None, self.module, load)
            return IncompatibleKeys([], [])
        before = versions(self.module)
        try:
            found = self.load_values(state_dict, strict, same_partition_load)
        except BaseException as error:
            if versions(self.module) != before:
                self._updates.loaded_in_part("weights", error)
            raise
        self._updates.loaded("weights")
        return found

    def _load_part(self, state_dict: Mapping[str, Any], strict: bool) -> None:
        """Load this rank's part into the model that was divided; refused, it leaves weights that were not to be."""
        try:
            self.load_state_dict(state_dict, strict, same_partition_load=True)
        except BaseException as error:
            self._updates.loaded_in_part("weights", error)
            raise

    def load_values(
        self, state_dict: Mapping[str, Any], strict: bool, same_partition_load: bool = False
    ) -> IncompatibleKeys:
        """Load a state dict as :meth:`load_state_dict` does, into whatever the model's tensors are now."""
        ownership = self.placement.ownership
        self.placement.deferred_loads.run(self.module)  # before, so that what is given here counts
        self.placement.reset_shards()
        if self._is_sharded and not same_partition_load and not state_dict.get(PARTIAL_KEY, False):
            if state_dict.get(PARTIAL_KEY) is not False:
                state_dict = as_distributed(self.module, state_dict)
            tp_ranks = self.placement.runtime.place.tp_ranks
            return load_whole_state_dict(
                self.module,
                ownership,
                state_dict,
                self.placement.sharded.by_name(),
                tp_ranks.index(self.placement.runtime.place.rank),
                len(tp_ranks),
                lambda parts: load_state_dict(self.module, parts, strict, ownership=ownership),
                strict,
            )
        return load_state_dict(self.module, state_dict, strict, same_partition_load, ownership=ownership)

    def save_pretrained(self, folder: str | os.PathLike[str], *, max_shard_size: int | str = "5GB") -> None:
        """Write the model in the layout of ``transformers``, for ``from_pretrained``. Every rank must call this.

        The folder gets safetensors files, an index if there are several, ``config.json`` and ``generation_config.json``
        of models that have these. No rank has the whole model in memory. Meanwhile the disk holds the model twice.

        Args:
            folder: The folder, to which all ranks have access. Files of an earlier model are replaced, others stay.
            max_shard_size: The largest size of a file, in bytes or as ``"5GB"``; a larger tensor is in one by itself.

        Raises:
            CheckpointError: It failed on a rank.
        """
        self._folders().save(self, folder, max_shard_size)  # type: ignore[arg-type]

    def load_pretrained(self, folder: str | os.PathLike[str], *, strict: bool = True) -> None:
        """Load what ``save_pretrained`` of ``transformers`` or of this class has written. Every rank must call this.

        Each rank reads the bytes of what it holds. A model that is not divided yet gets its values when it is. Values
        are converted to the dtypes of the model.

        Args:
            folder: The folder with ``model.safetensors``, or with the files of ``model.safetensors.index.json``.
            strict: Refuse missing and unexpected names, except those that the model's class says do not matter.

        Raises:
            CheckpointError: It failed on a rank: there is no such folder, a file is damaged, or names or shapes differ.
        """
        self._folders().load(self, folder, strict=strict)  # type: ignore[arg-type]

    def _folders(self) -> PretrainedFolders:
        return self.placement.runtime[PretrainedFolders]  # type: ignore[type-abstract]

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Load the model's part of a state dict given to an enclosing module. PyTorch calls this on every module."""
        if local_metadata.get("assign_to_params_buffers", False):
            error_msgs.append(
                f"a smp.DistributedModel ({prefix.rstrip('.')!r}) takes values, and not other parameters: leave out "
                "assign=True"
            )
            return
        given = {name.removeprefix(prefix): value for name, value in state_dict.items() if name.startswith(prefix)}
        try:
            found = self.load_state_dict(given, strict=False)
        except RuntimeError as error:  # raised by PyTorch for different shapes
            error_msgs.append(str(error))
        else:
            missing_keys += [prefix + name for name in found.missing_keys]
            unexpected_keys += [prefix + name for name in found.unexpected_keys]
        # PyTorch then visits the children, and reports their keys as missing under names that no state dict has.
        self.__dict__["_known_missing"] = len(missing_keys)

    def _forget_children(self, incompatible: Any) -> None:
        """Remove the keys that PyTorch has reported as missing for the module under its name in the wrapper."""
        known = self.__dict__.pop("_known_missing", None)
        if known is not None:
            del incompatible.missing_keys[known:]

    def cpu(self) -> Self:
        """Gather all parameters and buffers of the pipeline on every rank of it, in host memory.

        Intended for the end of a run: `get_module` then returns the whole model. A divided model cannot be called again
        afterwards.

        Raises:
            ConfigError: Modules are divided over tensor-parallel ranks, and can only run together.
        """
        if self.placement.runtime.place.shards_parameters:
            raise ConfigError(
                "model.cpu() with sharded_data_parallel_degree: its modules gather parameters, which are shards; load "
                "model.state_dict(), which is whole, into a module of one process"
            )
        if self._is_sharded:
            raise ConfigError(
                f"model.cpu() with tensor_parallel_degree {len(self.placement.runtime.place.tp_ranks)}: "
                "distributed modules compute only with all their ranks; load model.state_dict(), which is "
                "whole, into a module of one"
            )
        make_whole_on_cpu(self.module)
        return self

    @property
    def _is_sharded(self) -> bool:
        return self.placement.is_sharded
