"""What half precision adds to the state dicts of optimizers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

#: In the state of a parameter.
MASTER_KEY = "master_weight"
SCALER_KEY = "loss_scaler"


def without_half_precision(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state dict without master weights and the loss scaler's state."""
    state, _ = taken_apart(state_dict["state"])
    return {**{key: value for key, value in state_dict.items() if key != SCALER_KEY}, "state": state}


def taken_apart(state: Mapping[Any, Any]) -> tuple[dict[Any, Any], dict[Any, torch.Tensor]]:
    """Divide an optimizer's state into that of the wrapped optimizer and the master weights, by parameter."""
    masters = {key: one[MASTER_KEY] for key, one in state.items() if isinstance(one, dict) and MASTER_KEY in one}
    kept: dict[Any, Any] = {}
    for key, entry in state.items():
        if key in masters:
            entry = {name: value for name, value in entry.items() if name != MASTER_KEY}
            if not entry:
                continue
        kept[key] = entry
    return kept, masters
