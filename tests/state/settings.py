"""A module that computes under settings of torch and of the process; for ranks that are processes."""

import contextlib
import io
import sys
import warnings
from collections.abc import Callable

import torch
from torch import nn

#: Settings of torch that a script can read.
TORCH_SETTINGS: list[tuple[Callable[[], bool], Callable[[bool], None]]] = [
    (torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled),
    (torch.is_warn_always_enabled, torch.set_warn_always),
    (torch._C._check_sparse_tensor_invariants, torch._C._set_check_sparse_tensor_invariants),
    (torch._C._get_deterministic_fill_uninitialized_memory, torch._C._set_deterministic_fill_uninitialized_memory),
    (
        torch.__future__.get_overwrite_module_params_on_conversion,
        torch.__future__.set_overwrite_module_params_on_conversion,
    ),
    (torch.__future__.get_swap_module_params_on_conversion, torch.__future__.set_swap_module_params_on_conversion),
    (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    (torch._C._is_multithreading_enabled, torch._C._set_multithreading_enabled),
    (torch._C._is_view_replay_enabled, torch._C._set_view_replay_enabled),
]


def torch_settings() -> list[bool]:
    return [get() for get, _ in TORCH_SETTINGS]


class Looks(nn.Linear):
    """Computes otherwise under each setting."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 + sum(2**-n for n, on in enumerate(torch_settings()) if on))


class Settings(nn.Module):
    """Calls a child under settings of the process, and looks whether they are still there; for ranks in processes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.child = Looks(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        enabled = torch.backends.mkldnn.enabled
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()) as output:
            warnings.simplefilter("ignore", ResourceWarning)
            torch._C._set_mkldnn_enabled(False)
            x = self.child(x)
            assert sys.stdout is output
            assert warnings.filters[0][::2] == ("ignore", ResourceWarning, 0)
            assert not torch.backends.mkldnn.enabled
            torch._C._set_mkldnn_enabled(enabled)
        before = torch_settings()
        for number, (get, put) in enumerate(TORCH_SETTINGS):
            put(not before[number])
            x = self.child(x)
            assert get() != before[number]
            put(before[number])
        return x
