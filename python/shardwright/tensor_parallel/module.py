"""The base of all distributed modules: parameters that are made whole and kept in part."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import nn

from shardwright.errors import ConfigError
from shardwright.tensor_parallel.agreement import Agreement, Rule
from shardwright.tensor_parallel.group import TensorGroup, current_tensor_group
from shardwright.tensor_parallel.sharding import Sharding

Initialize = Callable[[torch.Tensor], object]


class DistributedModule(nn.Module):
    """A module whose parameters are divided over the ranks of TP_GROUP (paper, section 5.2 and appendix E.1).

    Parameters are drawn whole and then cut, so that ranks with one seed hold parts of the same numbers whatever the
    degree. Subclasses make them by :meth:`make_parameter`, or inside ``smp.nn.utils.parameter_creation_scope``.

    Attributes:
        tp_group: The ranks that divide it.
        shardings: How each of its own parameters and buffers lies over them, by its name in this module; those of
            submodules that are not distributed themselves have dotted names. What is not listed meets only this rank's
            own samples, and is the same on all ranks.
    """

    def __init__(self, group: TensorGroup | None = None) -> None:
        """Make a module without parameters.

        Args:
            group: The ranks that divide it; by default the running job's TP_GROUP.

        Raises:
            ShardwrightError: No group was given and ``smp.init`` was not called.
        """
        super().__init__()
        self.tp_group = current_tensor_group() if group is None else group
        self.shardings: dict[str, Sharding] = {}
        #: Its name in the model that ``smp.DistributedModel`` wraps.
        self.name_in_model = ""

    @property
    def operation(self) -> str:
        """What errors call it, and what ranks compare before its collectives."""
        name = type(self).__name__
        return f"{name} {self.name_in_model!r}" if self.name_in_model else name

    def agree(
        self,
        tensors: Sequence[torch.Tensor],
        words: Iterable[str] = (),
        *,
        free_dim: int | None,
        dims: tuple[int, ...] = (0,),
        divided_dim: int | None = None,
        sums: bool = False,
        seed: int = 0,
        known: bool = False,
    ) -> Agreement:
        """What all ranks bring to a call of this module; see ``TensorGroup.agree`` and ``Rule``.

        Args:
            tensors: What this rank brings.
            words: What they are, where calls may differ in that.
            free_dim: The dim in which shapes may differ between ranks, or None.
            dims: See ``Rule``.
            divided_dim: See there.
            sums: See there.
            seed: See ``TensorGroup.agree``.
            known: See there.

        Raises:
            ConfigError: They do not fit together; all ranks raise it.
        """
        listed = ", ".join(words)
        operation = f"{self.operation}({listed})" if listed else self.operation
        rule = Rule(operation, dims, free_dim, divided_dim, sums, site=self.name_in_model)
        parameters_need_grad = any(parameter.requires_grad for parameter in self.parameters())
        return self.tp_group.agree(rule, tensors, parameters_need_grad, seed, known)

    def make_parameter(
        self,
        name: str,
        shape: tuple[int, ...],
        sharding: Sharding,
        initialize: Initialize,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Make a parameter, and keep this rank's part of it; None where this rank has none.

        Args:
            name: Its name in this module, without dots.
            shape: Of the whole.
            sharding: How it lies over tp ranks.
            initialize: Fills the whole in place.
            device: Of the parameter.
            dtype: Of the parameter.

        Raises:
            ConfigError: A size does not divide by the tensor parallelism degree.
        """
        sharding.check(f"{type(self).__name__}.{name}", shape, self.tp_group.size)
        whole = torch.empty(shape, device=device, dtype=dtype)
        with torch.no_grad():
            initialize(whole)
        shard = sharding.shard(whole, self.tp_group.rank, self.tp_group.size)
        self.register_parameter(name, None if shard is None else nn.Parameter(shard))
        self.shardings[name] = sharding

    @torch.no_grad()
    def load_whole_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take this rank's parts of whole parameters and buffers; every other entry stays as it is.

        Args:
            state: Tensors by their names in this module and its submodules, as they are on one rank.

        Raises:
            ConfigError: A name is unknown here, or a shape is another one.
        """
        shardings = named_shardings(self)
        own = {
            **dict(self.named_parameters(remove_duplicate=False)),
            **dict(self.named_buffers(remove_duplicate=False)),
        }
        known = {*own, *shardings}
        for name, whole in state.items():
            if name not in known:
                raise ConfigError(f"{type(self).__name__} has no {name!r}; it has {', '.join(sorted(known))}")
            sharding = shardings.get(name, Sharding())
            sharding.check(f"{type(self).__name__}.{name}", whole.shape, self.tp_group.size)
            shard = sharding.shard(whole, self.tp_group.rank, self.tp_group.size)
            if shard is None:
                continue
            if shard.shape != own[name].shape:
                expected = sharding.global_shape(own[name].shape, self.tp_group.size)
                raise ConfigError(
                    f"{type(self).__name__}.{name} has shape {expected}, but the weight to load {tuple(whole.shape)}"
                )
            own[name].copy_(shard)


def distributed_modules(module: nn.Module, *, each_once: bool = True) -> Iterator[tuple[str, DistributedModule]]:
    """The distributed modules in a module, itself included, with their first names in it, or with all of them."""
    for name, one in module.named_modules(remove_duplicate=each_once):
        if isinstance(one, DistributedModule):
            yield name, one


def named_shardings(module: nn.Module) -> dict[str, Sharding]:
    """How parameters and buffers of distributed modules in a module lie over tp ranks, by all their names in it."""
    return ShardedTensors(module).by_name()


class ShardedTensors:
    """Which parameters and buffers of a model lie over tp ranks, and how."""

    def __init__(self, module: nn.Module) -> None:
        """For a model whose modules have been replaced."""
        self._modules = list(distributed_modules(module))
        #: State dicts have what a module that is used at several places holds under each of its names.
        self._named = list(distributed_modules(module, each_once=False)) if self._modules else []

    def name_modules(self) -> None:
        """Tell the modules their names in the model."""
        for name, one in self._modules:
            one.name_in_model = name

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._modules)

    def by_id(self) -> dict[int, Sharding]:
        """How each lies over tp ranks, by the tensor's ``id``; a rank's own tensors only."""
        return {
            id(tensor): sharding
            for _, one in self._modules
            for name, sharding in one.shardings.items()
            if (tensor := _tensor(one, name)) is not None
        }

    def by_name(self) -> dict[str, Sharding]:
        """How each lies over tp ranks, by all its names in the model."""
        return {
            f"{prefix}.{name}" if prefix else name: sharding
            for prefix, one in self._named
            for name, sharding in one.shardings.items()
        }


def _tensor(module: nn.Module, name: str) -> torch.Tensor | None:
    path, _, last = name.rpartition(".")
    owner = module.get_submodule(path)
    found = owner._parameters.get(last)
    return owner._buffers.get(last) if found is None else found
