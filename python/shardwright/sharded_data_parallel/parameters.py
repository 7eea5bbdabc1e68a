"""Sharded parameters, as others see them: this rank's shard as a plain tensor, and whole tensors."""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from shardwright.errors import ShardwrightError
from shardwright.job.runtime import Runtime
from shardwright.sharded_data_parallel.communication import ShardCollectives
from shardwright.tensor_parallel.attributes import carry_attributes, user_attributes


def shard_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a sharded tensor; any other tensor itself."""
    found: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return found


class ShardedParameters:
    """The sharded parameters of a rank's models.

    Outside modules that run, a sharded parameter is a ``DTensor``; the parameter in its place before knows it.
    """

    def __init__(self, runtime: Runtime) -> None:
        """Start without sharded parameters."""
        self.collectives = ShardCollectives(runtime)
        self._locals: Any = WeakIdKeyDictionary()
        self._sharded: Any = WeakIdKeyDictionary()
        self._storages: Any = WeakIdKeyDictionary()
        self._names: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()
        self.mesh: Any = None

    def __bool__(self) -> bool:
        """Whether any parameter is sharded."""
        return len(self._locals) > 0

    def add(self, original: nn.Parameter, sharded: nn.Parameter, places: Iterable[tuple[nn.Module, str]]) -> None:
        """Record that a sharded parameter has taken the place of a whole one in some modules, under some names."""
        for module, name in places:
            self._names.setdefault(module, set()).add(name)
        self._sharded[original] = sharded
        self._storages[sharded] = sharded.untyped_storage()
        self._locals[sharded] = local = nn.Parameter(shard_of(sharded).detach(), requires_grad=sharded.requires_grad)
        vars(sharded).update(user_attributes(original))
        _name(sharded, local)

    def add_whole(self, parameter: nn.Parameter) -> None:
        """Let a parameter that stays whole on every rank say so as sharded ones do."""
        _name(parameter, parameter.detach())

    def now(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return what has taken the place of a parameter; the parameter itself if nothing has."""
        found: torch.Tensor = self._sharded.get(parameter, parameter)
        return found

    def names(self, module: nn.Module) -> Set[str]:
        """Return under which names a module holds a sharded parameter, or the gathered one while it runs."""
        return self._names.get(module, frozenset())

    def is_sharded(self, parameter: torch.Tensor) -> bool:
        """Whether this is a sharded parameter."""
        return parameter in self._locals

    def local(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return a plain parameter in the memory of this rank's shard, always the same; another parameter itself."""
        found: nn.Parameter | None = self._locals.get(parameter)
        if found is None:
            return parameter
        shard = shard_of(parameter).detach()
        if found.data_ptr() != shard.data_ptr():  # it was moved
            found.data = shard
        found.requires_grad_(parameter.requires_grad)
        carry_attributes(user_attributes(parameter), found)
        return found

    def sizes(self) -> dict[int, int]:
        """Return how many rows each sharded parameter has on all ranks, by the ``id`` of what `local` returns of it."""
        return {id(local): parameter.shape[0] for parameter, local in self._locals.items()}

    def check(self, parameter: torch.Tensor, name: str) -> None:
        """Check that nothing was assigned to a sharded parameter's ``data``, which has no effect on its shard.

        Args:
            parameter: The parameter.
            name: Its name in the model.

        Raises:
            ShardwrightError: Something was.
        """
        if parameter.untyped_storage()._cdata != self._storages[parameter]._cdata:
            raise ShardwrightError(
                f"a tensor was assigned to the `data` of parameter {name!r}. With sharded_data_parallel_degree it is a "
                "DTensor, whose shard PyTorch leaves as it was then. Write to the parameter instead: "
                "`with torch.no_grad(): parameter.copy_(...)`, or load a state dict into the model"
            )

    @torch.no_grad()
    def whole(self, parameter: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
        """Return the whole of what has a sharded parameter's shape, given this rank's shard of it.

        The ranks among which it is sharded must all call this.
        """
        return self.joined(shard, parameter.shape[0])

    @torch.no_grad()
    def joined(self, shard: torch.Tensor, size: int) -> torch.Tensor:
        """Return all of a tensor with so many rows, in new memory, given this rank's of them.

        The ranks among which parameters are sharded must all call this.
        """
        rest = shard.shape[1:]
        rows = _rows(size, self.collectives.size)
        gathered = shard.new_zeros(self.collectives.size * rows, *rest)
        first = self.collectives.place * rows
        gathered[first : first + shard.shape[0]].copy_(shard)
        self.collectives.gather(gathered.view(-1))
        self.collectives.finish()
        return gathered[:size]

    def first_row(self, parameter: torch.Tensor) -> int:
        """Return the first row of a sharded parameter that is in this rank's shard."""
        size = parameter.shape[0]
        return min(self.collectives.place * _rows(size, self.collectives.size), size)

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """Return a copy of this rank's shard of a whole tensor."""
        rows = _rows(whole.shape[0], self.collectives.size)
        first = self.collectives.place * rows
        return whole[first : first + rows].detach().clone()

    def distributed(self, whole: torch.Tensor) -> torch.Tensor:
        """Return a whole tensor as a sharded one, without communication."""
        from torch.distributed.tensor import DTensor, Shard

        return DTensor.from_local(
            self.cut(whole).to(torch.device(self.mesh.device_type)),
            self.mesh,
            [Shard(0)],
            run_check=False,
            shape=whole.shape,
            stride=torch.empty(whole.shape, device="meta").stride(),
        )


def _name(parameter: Any, held: Any) -> None:
    """Name the whole shape of a parameter, and what this rank holds of it, as scripts that know DeepSpeed's read it."""
    parameter.ds_shape, parameter.ds_numel, parameter.ds_tensor = parameter.shape, parameter.numel(), held
    held.ds_numel = held.numel()


def _rows(size: int, ranks: int) -> int:
    return -(-size // ranks)
