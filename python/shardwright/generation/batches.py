"""The arguments of ``generate``, divided by sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from shardwright.caches import is_cache
from shardwright.generation.draws import Rows

#: Arguments that look at all sequences together, or at which one they are called for.
_WHOLE = (
    "assistant_model",
    "custom_generate",
    "logits_processor",
    "prefix_allowed_tokens_fn",
    "prompt_lookup_num_tokens",
    "return_dict_in_generate",
    "stopping_criteria",
    "streamer",
    "synced_gpus",
    "watermarking_config",
)


class Part:
    """The arguments for the sequences of a microbatch, and the state of the random numbers that all of them draw."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], rows: Rows, drawn: torch.Tensor) -> None:
        """Of these arguments and sequences."""
        self.drawn = drawn
        self.args = args
        self.kwargs = kwargs
        self.rows = rows


class Parts:
    """The arguments of ``generate``, which a step divides into those of its microbatches."""

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Of all sequences."""
        self._drawn = torch.get_rng_state()
        self._args = args
        self._kwargs = dict(kwargs)
        sizes = {tensor.shape[0] for tensor in _tensors((args, self._kwargs)) if tensor.dim()}
        self.total = sizes.pop() if len(sizes) == 1 else 1

    def most(self, module: nn.Module) -> int:
        """Return the largest number of parts that are generated as the whole batch is."""
        config = self._kwargs.get("generation_config", getattr(module, "generation_config", None))
        options = [self._kwargs.get(name) or getattr(config, name, None) for name in _WHOLE]
        others = any(isinstance(value, (nn.Module, Callable)) or is_cache(value) for value in self._kwargs.values())  # type: ignore[arg-type]
        return 1 if any(options) or others or len(self._args) > 2 else self.total

    def smp_slice(self, num_mb: int, mb: int, axis: int) -> Part:
        """Return the part of a microbatch."""
        counts = [self.total // num_mb + (part < self.total % num_mb) for part in range(num_mb)]
        rows = Rows(sum(counts[:mb]), counts[mb], self.total)
        if num_mb == 1:
            return Part(self._args, self._kwargs, rows, self._drawn)
        own = slice(rows.first, rows.first + rows.count)
        args, kwargs = _map((self._args, self._kwargs), lambda tensor: tensor[own] if tensor.dim() else tensor)
        return Part(args, kwargs, rows, self._drawn)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _map(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a value with other tensors, in containers of Python and outputs of ``transformers``."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, Mapping):
        items = {name: _map(item, function) for name, item in value.items()}
        return items if type(value) is dict else type(value)(**items)
    if isinstance(value, (list, tuple)):
        return type(value)(_map(item, function) for item in value)
    return value


def joined(results: list[torch.Tensor], padding: int) -> torch.Tensor:
    """Return the sequences of all microbatches, each as long as the longest."""
    length = max(result.shape[1] for result in results)
    return torch.cat(
        [torch.nn.functional.pad(result, (0, length - result.shape[1]), value=padding) for result in results]
    )


def padding_of(module: nn.Module, kwargs: Mapping[str, Any]) -> int:
    """Return the token that follows the end of a sequence in the result."""
    configs = [kwargs.get("generation_config"), getattr(module, "generation_config", None)]

    def option(name: str) -> Any:
        given = [kwargs.get(name), *[getattr(config, name, None) for config in configs]]
        value = next((one for one in given if one is not None), None)
        return value[0] if isinstance(value, (list, tuple)) else value

    padding, end = option("pad_token_id"), option("eos_token_id")
    if (option("num_beams") or 1) > 1:  # which takes a padding of 0 for none
        return int((padding or end) if end is not None else -1)
    return int(next((token for token in (padding, end) if token is not None), 0))
