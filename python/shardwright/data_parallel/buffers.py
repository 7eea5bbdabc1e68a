"""What replicas broadcast: their parameters and buffers, in a layout that all of them have agreed on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from shardwright.contents import put_values
from shardwright.data_parallel.collectives import CHUNK_BYTES, Collectives
from shardwright.errors import ConfigError, ShardwrightError

if TYPE_CHECKING:
    from shardwright.data_parallel.participants import ModelPart

#: How many buffers an error names.
_MOST_NAMES = 3


class Spec(NamedTuple):
    """A tensor that replicas have alike."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str

    def __str__(self) -> str:
        """What it is, in words."""
        return f"{self.name!r} {self.dtype} of shape {self.shape} ({self.device})"


class SharedBuffers:
    """The buffers of a model that one replica sends to the others before training steps.

    What is sent is what all replicas had at the end of the last training step, when they have compared it. So messages
    have the same size on all ranks, whatever a rank has done to its buffers since. A rank that has others by then takes
    part with zeros in the place of those that it lacks, and the comparison at the end of that step finds the difference
    where it is not the same on all ranks.
    """

    def __init__(self, placement: ModelPart) -> None:
        """Start without any."""
        self._placement = placement
        self._keys: list[Any] = []
        self._specs: list[Spec] = []
        self._now: tuple[list[Spec], list[Spec]] = ([], [])
        self._noted = self._agreed = self._now
        self._digests = ("", "")
        self._changes = ""

    def see(self) -> dict[Spec, torch.Tensor]:
        """Look at the buffers that there are now.

        Raises:
            ConfigError: One cannot be sent.
        """
        owned = self._placement.owned_buffers()
        tensors = [module._buffers[name] for module, name in owned]
        keys = [
            (id(module), name, tensor.shape, tensor.dtype, tensor.device.type, tensor.layout)
            for (module, name), tensor in zip(owned, tensors, strict=True)
            if tensor is not None
        ]
        if keys != self._keys:
            self._change(owned)
            self._keys = keys
        return dict(zip(self._specs, (tensor for tensor in tensors if tensor is not None), strict=True))

    def _change(self, owned: Iterable[tuple[nn.Module, str]]) -> None:
        paths = {id(module): path for path, module in self._placement.module.named_modules()}
        over_rdp = self._placement.over_rdp if self._placement.is_sharded else ()
        now: tuple[list[Spec], list[Spec]] = ([], [])
        self._specs = []
        for module, name in owned:
            tensor = module._buffers[name]
            if tensor is not None:
                full_name = f"{paths.get(id(module), '')}.{name}".removeprefix(".")
                refuse_unsendable("buffer", full_name, tensor)
                self._specs.append(spec_of(full_name, tensor))
                now[id(tensor) in over_rdp].append(self._specs[-1])
        before, after = ({str(one) for part in parts for one in part} for parts in (self._now, now))
        pairs = (("no longer", before - after), ("now", after - before))
        self._changes = " and ".join(f"{how} {_listed(specs)}" for how, specs in pairs if specs)
        self._now = now
        first, second = (_digest(part) for part in now)
        self._digests = (first, second)

    def note(self) -> tuple[tuple[str, str], str]:
        """Return what this rank has, over DP_GROUP and RDP_GROUP, in a form that ranks compare; and the last change.

        Further changes count for the next note.
        """
        self.see()
        self._noted = self._now
        return self._digests, self._changes

    def agree(self) -> None:
        """Broadcast from now on what was noted last, because all other ranks have noted the same."""
        self._agreed = self._noted

    def over(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return what is broadcast over DP_GROUP, and over RDP_GROUP."""
        here = self.see()
        dp, rdp = ([here[spec] if spec in here else _stand_in(spec) for spec in part] for part in self._agreed)
        return dp, rdp


def spec_of(name: str, tensor: torch.Tensor) -> Spec:
    """Describe a tensor."""
    return Spec(name, tuple(tensor.shape), tensor.dtype, tensor.device.type)


def refuse_unsendable(kind: str, name: str, tensor: torch.Tensor) -> None:
    """Raise :class:`ConfigError` for a tensor that replicas cannot send to one another, byte by byte."""
    if tensor.layout is not torch.strided or tensor.is_quantized:
        what = f"quantized ({tensor.dtype})" if tensor.is_quantized else f"of layout {tensor.layout}"
        raise ConfigError(
            f"{kind} {name!r} is {what}, and data-parallel ranks send one another the values of dense tensors only: "
            "make it dense, or keep it outside the model's parameters and buffers"
        )


def check_alike(specs: list[Spec], source: int, collectives: Collectives, device: torch.device) -> None:
    """Raise :class:`ShardwrightError` on a rank that would receive other tensors than it has from a rank."""
    text = "\n".join(map(str, specs)).encode()
    length = torch.tensor([len(text)], dtype=torch.int64, device=device)
    _receive(length, source, collectives)
    theirs = torch.zeros(int(length), dtype=torch.uint8, device=device)
    if text and collectives.own_rank == source:  # a rank may hold none
        theirs.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    _receive(theirs, source, collectives)
    there, here = bytes(theirs.tolist()).decode().splitlines(), text.decode().splitlines()
    if there != here:
        only = [(f"rank {source} has", set(there) - set(here)), ("this rank has", set(here) - set(there))]
        said = " and ".join(f"{who} {_listed(some)}" for who, some in only if some) or "the order differs"
        raise ShardwrightError(
            f"rank {collectives.own_rank} was to receive the parameters and buffers of rank {source}, which are not "
            f"those that it has itself: {said}. Have all data-parallel ranks make and change their model alike"
        )


def _receive(tensor: torch.Tensor, source: int, collectives: Collectives) -> None:
    if tensor.numel():
        collectives.wait_on_host(collectives.start_broadcast(tensor, source))


def broadcast(tensors: Sequence[torch.Tensor], source: int, collectives: Collectives) -> None:
    """Broadcast tensors from one rank, several at once, as bytes: backends do not know all dtypes."""
    lists: list[list[torch.Tensor]] = []
    open_lists: dict[torch.device, list[torch.Tensor]] = {}
    filled: dict[torch.device, int] = {}
    # Elements of the largest size first, so that each has an address that its size divides.
    for tensor in sorted((tensor.data for tensor in tensors), key=lambda one: -one.element_size()):
        device, size = tensor.device, tensor.numel() * tensor.element_size()
        if device not in open_lists or filled[device] + size > CHUNK_BYTES:
            open_lists[device] = []
            filled[device] = 0
            lists.append(open_lists[device])
        open_lists[device].append(tensor)
        filled[device] += size
    with torch.no_grad():
        for together in lists:
            parts = [_bytes_of(tensor) for tensor in together]
            flat = torch.cat(parts)
            collectives.broadcast(flat, source)
            for tensor, part in zip(together, torch.split(flat, [part.numel() for part in parts]), strict=True):
                put_values(tensor, part.view(tensor.dtype).view(tensor.shape))


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def _stand_in(spec: Spec) -> torch.Tensor:
    return torch.zeros(spec.shape, dtype=spec.dtype, device=spec.device)


def _digest(specs: Iterable[Spec]) -> str:
    return hashlib.blake2b("\n".join(map(str, specs)).encode(), digest_size=8).hexdigest()


def _listed(some: Iterable[str]) -> str:
    found = sorted(some)
    more = f" and {len(found) - _MOST_NAMES} more" if len(found) > _MOST_NAMES else ""
    return ", ".join(found[:_MOST_NAMES]) + more
