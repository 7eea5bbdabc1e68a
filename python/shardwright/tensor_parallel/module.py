"""The base class of all distributed modules, whose parameters are drawn whole and kept in part."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypedDict

import torch
from torch import nn

from shardwright.errors import ConfigError
from shardwright.job.runtime import find_runtime
from shardwright.tensor_parallel.agreement import Agreement, Rule
from shardwright.tensor_parallel.group import TensorGroup, current_tensor_group
from shardwright.tensor_parallel.sharding import Origin, Sharding

Initialize = Callable[[torch.Tensor], object]


class Placed(TypedDict, total=False):
    """Keyword arguments that say where a distributed module is.

    Attributes:
        group: The ranks that divide the module; by default the running job's TP_GROUP.
        device: The device of the parameters.
        dtype: The dtype of the parameters.
    """

    group: TensorGroup | None
    device: torch.device | str | None
    dtype: torch.dtype | None


class DistributedModule(nn.Module):
    """A module whose parameters are divided over the ranks of TP_GROUP (paper, section 5.2 and appendix E.1).

    Parameters are drawn whole and then divided, so that ranks with the same seed hold parts of the same values at any
    degree. Subclasses create them by :meth:`make_parameter`, or inside ``smp.nn.utils.parameter_creation_scope``.

    Attributes:
        tp_group: The ranks that divide the module.
        shardings: The sharding of each of its own parameters and buffers, by its name in this module; those of
            submodules that are not distributed themselves have dotted names. Tensors that are not listed are the same
            on all ranks and are applied to this rank's own samples only.
        origins: Of a module that has replaced another whose weights have other names or layouts: what its parameters
            and buffers were made of, by their names in this module.
    """

    def __init__(
        self,
        group: TensorGroup | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Create a module without parameters; arguments are those of :class:`Placed`."""
        super().__init__()
        self.tp_group = current_tensor_group() if group is None else group
        #: For modules inside this one.
        self.placed: Placed = {"group": self.tp_group, "device": device, "dtype": dtype}
        self.shardings: dict[str, Sharding] = {}
        self.origins: Mapping[str, Sequence[Origin]] = {}
        #: The module's name in the model that ``smp.DistributedModel`` wraps.
        self.name_in_model = ""

    @property
    def operation(self) -> str:
        """The name used in error messages, which ranks compare before the module's collectives."""
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
        """Exchange the shapes and dtypes of a call's tensors with all ranks; see ``TensorGroup.agree`` and ``Rule``.

        The ``words`` are the names of the tensors, if calls may differ in which tensors they have.
        """
        listed = ", ".join(words)
        operation = f"{self.operation}({listed})" if listed else self.operation
        rule = Rule(operation, dims, free_dim, divided_dim, sums, site=self.name_in_model)
        parameters_need_grad = any(parameter.requires_grad for parameter in self.parameters())
        return self.tp_group.agree(rule, tensors, parameters_need_grad, seed, known)

    def make_parameter(self, name: str, shape: tuple[int, ...], sharding: Sharding, initialize: Initialize) -> None:
        """Create a parameter and keep this rank's part of it; register None if this rank has no part.

        Args:
            name: The parameter's name in this module, without dots.
            shape: The shape of the whole parameter.
            sharding: The sharding over tp ranks.
            initialize: Fills the whole parameter in place.
        Raises:
            ConfigError: A size is not divisible by the tensor parallelism degree.
        """
        sharding.check(f"{type(self).__name__}.{name}", shape, self.tp_group.size)
        whole = torch.empty(shape, device=self.placed["device"], dtype=self.placed["dtype"])
        with torch.no_grad():
            initialize(whole)
            whole = whole.to(parameter_dtype(whole.dtype))
        shard = sharding.shard(whole, self.tp_group.rank, self.tp_group.size)
        self.register_parameter(name, None if shard is None else nn.Parameter(shard))
        self.shardings[name] = sharding

    @torch.no_grad()
    def load_whole_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load this rank's parts of whole parameters and buffers, by name; those that are not given keep their values.

        Raises:
            ConfigError: A name is unknown, or a shape does not match.
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


def parameter_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a distributed module's parameter, asked for in a dtype: float16 with ``fp16_params``."""
    runtime = find_runtime()
    is_float16 = runtime is not None and runtime.place.cfg.fp16_params and dtype.is_floating_point
    return torch.float16 if is_float16 else dtype


def distributed_modules(module: nn.Module, *, each_once: bool = True) -> Iterator[tuple[str, DistributedModule]]:
    """Yield the distributed modules in a module, itself included, with their first names in it, or with all names."""
    for name, one in module.named_modules(remove_duplicate=each_once):
        if isinstance(one, DistributedModule):
            yield name, one


def named_shardings(module: nn.Module) -> dict[str, Sharding]:
    """Return the shardings of parameters and buffers of distributed modules in a module, by all their names in it."""
    return ShardedTensors(module).by_name()


class ShardedTensors:
    """The parameters and buffers of a model that are sharded over tp ranks, with their shardings."""

    def __init__(self, module: nn.Module) -> None:
        """Find the distributed modules of a model in which marked modules have been replaced."""
        self._modules = list(distributed_modules(module))
        #: State dicts contain the tensors of a module that is used at several places under each of its names.
        self._named = list(distributed_modules(module, each_once=False)) if self._modules else []

    def name_modules(self) -> None:
        """Set the modules' names in the model."""
        for name, one in self._modules:
            one.name_in_model = name

    def __bool__(self) -> bool:
        """Return whether there are any."""
        return bool(self._modules)

    def by_id(self) -> dict[int, Sharding]:
        """Return the sharding of each of this rank's tensors, by the tensor's ``id``."""
        return {
            id(tensor): sharding
            for _, one in self._modules
            for name, sharding in one.shardings.items()
            if (tensor := _tensor(one, name)) is not None
        }

    def made_of(self) -> dict[int, Sequence[Origin]]:
        """Return what each of this rank's tensors was made of, by the tensor's ``id``, where that is known."""
        return {
            id(tensor): origins
            for _, one in self._modules
            for name, origins in one.origins.items()
            if (tensor := _tensor(one, name)) is not None
        }

    def by_name(self) -> dict[str, Sharding]:
        """Return the sharding of each tensor, by all its names in the model."""
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
