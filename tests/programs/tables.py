"""Functions of tensors, by the names under which programs have them."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

_MAX_ROWS = 100


class Scaled(torch.autograd.Function):
    """A function with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tensor)
        return tensor * tensor.sin()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (tensor,) = ctx.saved_tensors
        result: torch.Tensor = gradient * (tensor.sin() + tensor * tensor.cos())
        return result


class Both(torch.autograd.Function):
    """A function of two tensors with two results, one of which it marks as written to."""

    @staticmethod
    def forward(ctx: Any, one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.mark_dirty(one)
        return one.mul_(2), other + 1

    @staticmethod
    def backward(ctx: Any, first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return first * 2, second


class Labelled(torch.Tensor):
    """A subclass with nothing of its own."""


def fit(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A tensor in another's shape, or a scalar."""
    return tensor if tensor.shape == like.shape else tensor.mean()


def fit_width(tensor: torch.Tensor, width: int) -> torch.Tensor:
    """A tensor of at least one dimension with a last dimension of this size: a part of it, or repetitions."""
    tensor = tensor if tensor.dim() else tensor.reshape(1)
    size = tensor.shape[-1]
    if size >= width:
        return tensor if size == width else tensor.narrow(-1, 0, width)
    return torch.cat([tensor] * -(-width // max(size, 1)), -1).narrow(-1, 0, width)


def matrix(tensor: torch.Tensor, width: int) -> torch.Tensor:
    """A tensor as rows of this width, two of them at least and not too many for products of each with each."""
    rows = fit_width(tensor, width).reshape(-1, width)[:_MAX_ROWS]
    return rows if len(rows) > 1 else rows.expand(2, width)


UNARY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "relu": torch.relu,
    "double": lambda t: t * 2,
    "square": lambda t: t * t,
    "clone": torch.clone,
    "detach": torch.Tensor.detach,
    "softmax": lambda t: t.softmax(-1) if t.dim() else t.sigmoid(),
    "sorted": lambda t: t.sort(-1).values if t.dim() else t.clone(),
    "scaled": lambda t: Scaled.apply(t),  # type: ignore[no-untyped-call]
}
VIEW: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "first": lambda t: t[0] if t.dim() else t.view_as(t),
    "row": lambda t: t[:1] if t.dim() else t,
    "rest": lambda t: t[1:] if t.dim() and len(t) > 1 else t.view_as(t),
    "flat": lambda t: t.reshape(-1),
    "transposed": lambda t: t.transpose(0, 1) if t.dim() > 1 else t.unsqueeze(0),
    "columns": lambda t: t.narrow(-1, 0, 1) if t.dim() else t.view_as(t),
    "same": lambda t: t.view_as(t),
    "expanded": lambda t: t.unsqueeze(0).expand(2, *t.shape),
    "diagonal": lambda t: t.diagonal() if t.dim() > 1 else t,
}
WRITE: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "add": lambda t, u: t.add_(u),
    "mul": lambda t, u: t.mul_(u),
    "copy": lambda t, u: t.copy_(u),
    "tanh": lambda t, u: t.tanh_(),
    "zero": lambda t, u: t.zero_(),
    "relu": lambda t, u: torch.relu_(t),
    "row": lambda t, u: t[:1].mul_(2) if t.dim() else t.mul_(2),
    "alias": lambda t, u: t.detach().mul_(1.5),
}


def _few(tensor: torch.Tensor) -> torch.Tensor:
    """A few rows of four, whose products with others are small."""
    return matrix(tensor, 4)[:16]


def _counted(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    with FlopCounterMode(display=False) as counted:
        product = _few(one) @ _few(other).t()
    return product.tanh() * (1 if counted.get_total_flops() else 2)


def _saved(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(other.detach(), file)
    file.seek(0)
    loaded: torch.Tensor = torch.load(file)
    return one + loaded.mean()


def _set_rows(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    one = one.clone()
    one[...] = fit(other, one) * 0.5
    return one


def _cast(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        product = _few(one).float() @ _few(other).float().t()
    return product.double().tanh()


def _dual(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    value, along = torch.func.jvp(lambda t: t.sin() * fit(other, t), (one,), (torch.ones_like(one),))
    return value + along


def _pulled(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    value, pull = torch.func.vjp(lambda t: (t.tanh() * fit(other, t)).sum(), one)
    return pull(torch.ones_like(value))[0] + value


def _saving_hooks(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        return one * fit(other, one)


def _default_dtype(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return one * torch.tensor(0.5, dtype=other.dtype) + torch.zeros((), dtype=one.dtype, device=other.device)


#: Those uses that are transforms of functions.
TRANSFORMS = ("vmap", "vmapped", "grad", "jacobian", "dual", "pull")

#: What code does with tensors at their first sight, which those of another rank have to stand.
USES: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "where": lambda t, u: torch.where(t > 0, t, fit(u, t)),
    "mask": lambda t, u: t[t > 0].sum() + u.sum() * 0.1,
    "index": lambda t, u: t[..., : max(1, len(u) if u.dim() else 1)] if t.dim() else t * 1,
    "gather": lambda t, u: t.reshape(-1)[u.detach().reshape(-1).argmax() % t.numel()] * u.mean(),
    "item": lambda t, u: t * float(u.detach().mean()),
    "list": lambda t, u: t * (len(u.tolist()) if u.dim() else 1),
    "numpy": lambda t, u: t + float(u.detach().numpy().mean()),
    "iterate": lambda t, u: t + sum(row.mean() for row in u) if u.dim() else t * 1,
    "unpack": lambda t, u: t * [*u.unbind(0)][-1].mean() if u.dim() else t * 1,
    "stack": lambda t, u: torch.stack([t, fit(u, t).expand_as(t)]),
    "concatenate": lambda t, u: torch.cat([t.reshape(-1), u.reshape(-1)]),
    "out": lambda t, u: torch.add(t.detach(), fit(u, t).detach(), out=torch.empty_like(t)),
    "einsum": lambda t, u: torch.einsum("ab,cb->ac", _few(t), _few(u)).tanh(),
    "data": lambda t, u: t * u.data.mean(),
    "deepcopy": lambda t, u: t + copy.deepcopy(u.detach()).mean(),
    "save": _saved,
    "subclass": lambda t, u: (u.as_subclass(Labelled).mean() * t).as_subclass(torch.Tensor),  # type: ignore[arg-type]
    "size": lambda t, u: t * (u.numel() + u.dim()) / (1 + u.numel()),
    "compare": lambda t, u: t * 2 if bool((u.detach() > 0).any()) else t * 3,
    "text": lambda t, u: t * (1 + len(repr(u.shape)) % 3),
    "float": lambda t, u: (t.float() * fit(u, t).float()).double(),
    "fourier": lambda t, u: torch.fft.rfft(fit_width(t, 4)).abs() + u.mean(),
    "norm": lambda t, u: t / (1 + torch.linalg.vector_norm(u)),
    "cumulate": lambda t, u: t.cumsum(-1) / (1 + t.numel()) if t.dim() else t * u.mean(),
    "normalise": lambda t, u: functional.layer_norm(fit_width(t, 4), (4,)) + u.mean(),
    "attend": lambda t, u: functional.scaled_dot_product_attention(
        *(_few(v).unsqueeze(0) for v in (t, u, u))  # type: ignore[arg-type]
    ),
    "set": _set_rows,
    "flops": _counted,
    "autocast": _cast,
    "vmap": lambda t, u: torch.vmap(lambda row: (row * u.mean()).sum())(_few(t)),
    "vmapped": lambda t, u: torch.vmap(torch.sin)(u if u.dim() else u.reshape(1)),
    "grad": lambda t, u: torch.func.grad(lambda v: (v.sin() * fit(u, v)).sum())(t),
    "jacobian": lambda t, u: torch.func.jacrev(lambda v: v * u.mean())(matrix(t, 3)[0, :3]),
    "dual": _dual,
    "pull": _pulled,
    "saving": _saving_hooks,
    "dtype": _default_dtype,
    "both": lambda t, u: sum(
        part.mean()
        for part in Both.apply(t * 1, u)  # type: ignore[no-untyped-call]
    ),
    "conjugate": lambda t, u: torch.complex(t, fit(u, t).expand_as(t)).conj().imag,
    "storage": lambda t, u: t * (1 if u.untyped_storage().nbytes() else 2),
    "strided": lambda t, u: torch.as_strided(u, (2,), (1,)).sum() * t if u.numel() > 1 and u.is_contiguous() else t * 1,
}
