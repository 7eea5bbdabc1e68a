"""Checks before a collective: the ranks of a tensor-parallel group exchange metadata of their tensors."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from shardwright.errors import ConfigError

#: Dtypes that every backend sums, directly or in a wider dtype.
SUMMED = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
)


@dataclass(frozen=True)
class Rule:
    """The requirements of a collective on the tensors of all ranks.

    Attributes:
        operation: The name of the primitive or distributed module, for error messages.
        dims: The dims given by the caller; negative ones count from the end.
        free_dim: The dim of these in which shapes may differ between ranks, or None.
        divided_dim: The dim of these that is divided into slices of equal size, or None.
        sums: Whether the collective adds elements; dtypes without a sum are then refused.
        site: The name in its model of the calling module; empty for other callers.
    """

    operation: str
    dims: tuple[int, ...] = ()
    free_dim: int | None = None
    divided_dim: int | None = None
    sums: bool = False
    site: str = ""


@dataclass(frozen=True)
class Signature:
    """The metadata of one rank's tensors for a collective.

    Dtypes are strings that include the layout unless it is strided. The seed is a random number drawn by the rank, or
    0.
    """

    operation: str
    dims: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    needs_grad: bool
    parameters_need_grad: bool
    grad_enabled: bool
    seed: int = 0

    @staticmethod
    def of(rule: Rule, tensors: Sequence[torch.Tensor], parameters_need_grad: bool = False, seed: int = 0) -> Signature:
        """Return the signature of the calling rank."""
        enabled = torch.is_grad_enabled()
        return Signature(
            operation=rule.operation,
            dims=rule.dims,
            shapes=tuple(tuple(tensor.shape) for tensor in tensors),
            dtypes=tuple(_dtype(tensor) for tensor in tensors),
            needs_grad=enabled and any(tensor.requires_grad for tensor in tensors),
            parameters_need_grad=enabled and parameters_need_grad,
            grad_enabled=enabled,
            seed=seed,
        )

    def encode(self) -> bytes:
        """Encode the signature as bytes."""
        return json.dumps(
            [list(value) if isinstance(value, tuple) else value for value in vars(self).values()]
        ).encode()

    @staticmethod
    def decode(data: bytes) -> Signature:
        """Decode a signature from bytes."""
        operation, dims, shapes, dtypes, *others = json.loads(data)
        return Signature(operation, tuple(dims), tuple(tuple(shape) for shape in shapes), tuple(dtypes), *others)


@dataclass(frozen=True)
class Agreement:
    """The signatures of all ranks of the group, in the order of tp ranks; the same on every rank."""

    signatures: tuple[Signature, ...]

    def sizes(self, dim: int, tensor: int = 0) -> list[int]:
        """Return the size in ``dim`` of the tensor with index ``tensor`` on each tp rank."""
        return [signature.shapes[tensor][dim] for signature in self.signatures]

    @property
    def needs_grad(self) -> bool:
        """Whether a tensor of any rank needs a gradient; all ranks then take part in the backward."""
        return any(signature.needs_grad for signature in self.signatures)

    @property
    def parameters_need_grad(self) -> bool:
        """Whether a parameter of the module needs a gradient on any rank."""
        return any(signature.parameters_need_grad for signature in self.signatures)

    @property
    def seed(self) -> int:
        """The seed of random numbers that all ranks share, which is tp rank 0's."""
        return self.signatures[0].seed


def check(rule: Rule, agreement: Agreement, num_slices: int) -> None:
    """Check the signatures of all ranks against the rule of a collective.

    Every rank has the same agreement and therefore raises the same error, so that no rank waits in the collective. The
    message names the value, the tp rank and what is allowed.
    """
    name = rule.operation
    signatures = agreement.signatures

    def refuse(problem: str, value: Callable[[Signature], object]) -> ConfigError:
        return ConfigError(f"{name}: {problem}, but there {_told(signatures, value)}")

    def differ(value: Callable[[Signature], object]) -> bool:
        return any(value(signature) != value(signatures[0]) for signature in signatures)

    if differ(lambda s: (s.operation, s.dims)):
        told = _told(signatures, lambda s: f"{s.operation} with dims {list(s.dims)}")
        raise ConfigError(f"all tp ranks have to call the same collective or module together, but there {told}")
    if differ(lambda s: len(s.shapes)) or not signatures[0].shapes:
        raise refuse("all tp ranks have to bring one number of tensors, at least one", lambda s: len(s.shapes))
    if differ(lambda s: s.dtypes):
        raise refuse("dtypes have to be the same on all tp ranks", lambda s: ", ".join(s.dtypes))
    for dtype in signatures[0].dtypes:
        if " " in dtype:
            raise ConfigError(f"{name}: a tensor is {dtype}; only strided tensors are allowed")
        if rule.sums and getattr(torch, dtype) not in SUMMED:
            allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in SUMMED)
            raise ConfigError(f"{name}: {dtype} cannot be summed over ranks; allowed: {allowed}")
    if differ(lambda s: [len(shape) for shape in s.shapes]):
        raise refuse("tensors need the same number of dims on all tp ranks", _shapes)
    _check_shapes(rule, agreement, num_slices)
    if (agreement.needs_grad or agreement.parameters_need_grad) and differ(lambda s: s.grad_enabled):
        raise refuse(
            "gradients have to be enabled on all tp ranks or on none, since backward is a collective too",
            lambda s: "enabled" if s.grad_enabled else "disabled (torch.no_grad)",
        )


def _check_shapes(rule: Rule, agreement: Agreement, num_slices: int) -> None:
    """Check shapes, which have the same number of dims on all ranks, against each other and the rule."""
    name = rule.operation
    for number, shape in enumerate(agreement.signatures[0].shapes):
        for dim in rule.dims:
            if not -len(shape) <= dim < len(shape):
                raise ConfigError(
                    f"{name}: dim {dim} is out of range for a tensor of shape {shape}; "
                    + (f"allowed: {-len(shape)} to {len(shape) - 1}" if shape else "it has no dim")
                )
        free = None if rule.free_dim is None else rule.free_dim % len(shape)
        if rule.divided_dim is not None and rule.divided_dim % len(shape) == free:
            free = None  # slices of equal size from all ranks need tensors of equal size
        for dim in range(len(shape)):
            if dim != free and len(set(agreement.sizes(dim, number))) > 1:
                where = "" if free is None else f" but in dim {free}"
                told = _told(agreement.signatures, _shapes)
                raise ConfigError(f"{name}: shapes have to be the same on all tp ranks{where}, but there {told}")
        if rule.divided_dim is not None and shape[rule.divided_dim] % num_slices:
            raise ConfigError(
                f"{name}: dim {rule.divided_dim} of a tensor of shape {shape} has size {shape[rule.divided_dim]}, "
                f"which does not divide into {num_slices} slices of one size, one for each tp rank"
            )


def check_sizes(operation: str, sizes: Sequence[int], num_ranks: int, dim: int, rank: int | None, size: int) -> None:
    """Check the sizes that a caller passed for each tp rank against this rank's tensor, which has ``size`` in the dim.

    The tensor has ``sizes[rank]`` there, or the sum of all sizes if the rank is None.
    """
    if len(sizes) != num_ranks or any(number < 0 for number in sizes):
        raise ConfigError(
            f"{operation}: sizes are {list(sizes)}; expected one for each of {num_ranks} tp ranks, none negative"
        )
    expected = sum(sizes) if rank is None else sizes[rank]
    if expected != size:
        which = "together" if rank is None else f"on tp rank {rank}"
        raise ConfigError(
            f"{operation}: sizes {list(sizes)} say {expected} {which}, but the tensor has {size} in dim {dim}"
        )


def _dtype(tensor: torch.Tensor) -> str:
    layout = "" if tensor.layout is torch.strided else f" {str(tensor.layout).removeprefix('torch.')}"
    return str(tensor.dtype).removeprefix("torch.") + layout


def _shapes(signature: Signature) -> str:
    return ", ".join(str(shape) for shape in signature.shapes)


def _told(signatures: Sequence[Signature], value: Callable[[Signature], object]) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, signature in enumerate(signatures):
        ranks.setdefault(str(value(signature)), []).append(rank)
    parts = [f"{text} on tp rank{'s' if len(of) > 1 else ''} {', '.join(map(str, of))}" for text, of in ranks.items()]
    return f"{'are' if len(parts) > 1 else 'is'} {'; '.join(parts)}"
