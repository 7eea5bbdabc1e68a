"""``smp.nn.utils``: functions for writing custom distributed modules (paper, appendices E.4 and I.6)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import nn

from shardwright.creation import default_dtype
from shardwright.errors import ConfigError
from shardwright.tensor_parallel.communicators import (
    bwd_allreduce_for_tp,
    fused_allgather_for_tp,
    fwd_allreduce_for_tp,
    reduce_scatter_for_tp,
    scatter_and_merge_for_tp,
)
from shardwright.tensor_parallel.module import DistributedModule, parameter_dtype
from shardwright.tensor_parallel.sharding import Sharding

__all__ = [
    "bwd_allreduce_for_tp",
    "fused_allgather_for_tp",
    "fwd_allreduce_for_tp",
    "initialize_with_input_partition",
    "initialize_with_output_partition",
    "parameter_creation_scope",
    "reduce_scatter_for_tp",
    "scatter_and_merge_for_tp",
]


@contextmanager
def parameter_creation_scope(
    module: DistributedModule,
    scaled_batch: bool = True,
    dtype: torch.dtype | None = None,
    use_normal: bool = False,
    initializer_range: float = 0.02,
) -> Iterator[None]:
    """Context manager in which a distributed module creates its parameters (paper, appendix I.6).

    Parameters, buffers and submodules that are created in it and assigned to the module are added to its
    ``shardings``. At the end of the scope, parameters are drawn again: each as a whole, of which every rank keeps its
    part, so that one seed gives the same numbers at every degree. A submodule with ``reset_parameters``, as those of
    torch have, is drawn by that, with the sizes of the whole; any other parameter of two or more dims like the weight
    of ``nn.Linear``. Other ones of one dim keep the values they were made with.

    Args:
        module: The module that is being made, after its ``super().__init__``.
        scaled_batch: Whether the parameters are applied to the samples of the whole group, so that their gradients are
            complete within it; otherwise they are applied to this rank's own samples.
        dtype: The default dtype inside; None for the current one.
        use_normal: Whether numbers that are drawn at random are normal, with mean 0, instead of what modules draw by
            default. Constants, such as the ones of a norm or the zeros of a padding id, stay.
        initializer_range: The standard deviation of normal numbers.

    Raises:
        ConfigError: ``module`` is no ``DistributedModule``, or another one is made inside, which makes its own.
    """
    if not isinstance(module, DistributedModule):
        raise ConfigError(f"parameter_creation_scope: module is a {type(module).__name__}; needed a DistributedModule")
    scope = _Scope(module, scaled_batch)
    token = _SCOPES.set((*_SCOPES.get(), scope))
    try:
        # Values that modules draw for this rank's sizes are discarded, and do not change the generators' states.
        devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
        with torch.random.fork_rng(devices), default_dtype(dtype):
            yield
    finally:
        _SCOPES.reset(token)
    scope.enter(None)
    scope.draw(initializer_range if use_normal else None)


@contextmanager
def initialize_with_input_partition(module: DistributedModule) -> Iterator[None]:
    """Parameters made inside are divided over input channels (paper, appendix I.6).

    They are made with the sizes that one rank has, as ``nn.Linear(in_features // smp.tp_size(), out_features)``. Of a
    weight dim 1 is divided, of an embedding's the rows. A ``bias`` beside it belongs to the sum of the ranks' products:
    it is on tp rank 0, and None on the others.

    Args:
        module: The module that is being made, in its :func:`parameter_creation_scope`.

    Raises:
        ConfigError: It is in no such scope.
    """
    yield from _partition(module, "input")


@contextmanager
def initialize_with_output_partition(module: DistributedModule) -> Iterator[None]:
    """Parameters made inside are divided over output channels (paper, appendix I.6).

    They are made with the sizes that one rank has, as ``nn.Linear(in_features, out_features // smp.tp_size())``. Of a
    weight and of its bias dim 0 is divided, of an embedding's the channels.

    Args:
        module: The module that is being made, in its :func:`parameter_creation_scope`.

    Raises:
        ConfigError: It is in no such scope.
    """
    yield from _partition(module, "output")


def _partition(module: DistributedModule, kind: str) -> Iterator[None]:
    scope = next((one for one in reversed(_SCOPES.get()) if one.module is module), None)
    if scope is None:
        raise ConfigError(
            f"initialize_with_{kind}_partition: {type(module).__name__} is in no parameter_creation_scope of its own; "
            "its parameters are made within one"
        )
    scope.enter(None)
    yield
    scope.enter(kind)


class _Scope:
    """One parameter creation scope: the names that were made in it, in order, and all tensors known so far."""

    def __init__(self, module: DistributedModule, scaled_batch: bool) -> None:
        self.module = module
        self.scaled_batch = scaled_batch
        self.known = {id(tensor): tensor for _, tensor in _tensors(module)}
        self.made: list[str] = []

    def enter(self, partition: str | None) -> None:
        """Enter what was made since the last time, as divided in one way or whole."""
        entered: dict[int, Sharding] = {}
        for name, tensor in list(_tensors(self.module)):
            if id(tensor) in self.known:
                continue
            path, _, last = name.rpartition(".")
            owner = self.module.get_submodule(path)
            if any(isinstance(one, DistributedModule) for one in _between(self.module, path)):
                raise ConfigError(
                    f"{type(self.module).__name__}.{name} was made by another distributed module; make that outside of "
                    "the parameter_creation_scope"
                )
            if id(tensor) not in entered:  # a tied one lies as it does where it is first
                entered[id(tensor)] = _sharding(owner, last, tensor, partition, self.scaled_batch)
            self.module.shardings[name] = entered[id(tensor)]
            self.made.append(name)
        self.known.update({id(tensor): tensor for _, tensor in _tensors(self.module)})

    @torch.no_grad()
    def draw(self, deviation: float | None) -> None:
        """Draw what was made, as a whole, and keep this rank's parts."""
        owners: dict[str, list[str]] = {}
        drawn: set[int] = set()
        for name in self.made:
            path, _, last = name.rpartition(".")
            parameter = self.module.get_submodule(path)._parameters.get(last)
            if parameter is not None and id(parameter) not in drawn:  # buffers and tied parameters are not drawn again
                drawn.add(id(parameter))
                owners.setdefault(path, []).append(last)
        for path, names in owners.items():
            self._draw_module(path, names, deviation)

    def _draw_module(self, path: str, names: list[str], deviation: float | None) -> None:
        owner, group = self.module.get_submodule(path), self.module.tp_group
        shardings = self.module.shardings
        kept = {name: one for name, one in owner._parameters.items() if one is not None}
        of = {name: shardings.get(f"{path}.{name}" if path else name, Sharding()) for name in kept}
        for name, one in kept.items():  # all of them, since reset_parameters knows no others
            whole = one.new_empty(of[name].global_shape(one.shape, group.size))
            owner._parameters[name] = nn.Parameter(whole, requires_grad=False)
        try:
            drawn = _drawn(owner, names, deviation)
        finally:
            owner._parameters.update(kept)
        for name in names:
            if of[name].owner not in (None, group.rank):
                owner._parameters[name] = None
            elif name in drawn:
                shard = of[name].shard(drawn[name], group.rank, group.size)
                assert shard is not None
                kept[name].copy_(shard)
            kept[name].data = kept[name].data.to(parameter_dtype(kept[name].dtype))


def _drawn(owner: nn.Module, names: list[str], deviation: float | None) -> dict[str, torch.Tensor]:
    """Return new values for a module's parameters, which have the sizes of the whole now."""
    parameters: dict[str, torch.Tensor] = {
        name: one for name, one in owner._parameters.items() if name in names and one is not None
    }
    reset = None if isinstance(owner, DistributedModule) else getattr(owner, "reset_parameters", None)
    if reset is None:
        parameters = {name: one for name, one in parameters.items() if one.dim() > 1}
        for one in parameters.values():
            nn.init.kaiming_uniform_(one, math.sqrt(5)) if deviation is None else nn.init.normal_(one, std=deviation)
    else:
        reset()
        if deviation is not None:
            before = {name: one.clone() for name, one in parameters.items()}
            reset()
            for name, one in parameters.items():
                if not torch.equal(one, before[name]):  # values that differ between two draws are random
                    nn.init.normal_(one, std=deviation)
            padding = getattr(owner, "padding_idx", None)
            if padding is not None:
                parameters["weight"][padding].zero_()
    return parameters


def _sharding(owner: nn.Module, name: str, tensor: torch.Tensor, partition: str | None, scaled_batch: bool) -> Sharding:
    """Return the sharding of a parameter or buffer that was created in a partition, or in none."""
    if partition is None or not tensor.dim():
        return Sharding(scaled_batch=scaled_batch)
    by_input = partition == "input"
    if isinstance(owner, (nn.Embedding, nn.EmbeddingBag)):
        if by_input and owner.padding_idx is not None:
            raise ConfigError(
                f"initialize_with_input_partition: an embedding divided over its rows has padding_idx "
                f"{owner.padding_idx}, which is no id of all ranks; it has to be None"
            )
        return Sharding(dim=0 if by_input else 1, scaled_batch=scaled_batch)
    weight = owner._parameters.get("weight")
    if by_input and name == "bias" and weight is not None and weight.dim() > 1:
        return Sharding(owner=0, scaled_batch=scaled_batch)
    second = by_input != getattr(owner, "transposed", False)  # the weight of a transposed convolution begins with input
    return Sharding(dim=int(tensor.dim() > 1 and second), scaled_batch=scaled_batch)


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _between(module: nn.Module, path: str) -> Iterator[nn.Module]:
    """Yield the submodules on the path to a submodule, itself included."""
    names = path.split(".") if path else []
    for end in range(1, len(names) + 1):
        yield module.get_submodule(".".join(names[:end]))


_SCOPES: ContextVar[tuple[_Scope, ...]] = ContextVar("parameter creation scopes", default=())
