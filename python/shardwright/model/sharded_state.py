"""State dicts of models with distributed modules: builds whole tensors from tensor-parallel parts, and divides them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from shardwright.job.ranks import PP_GROUP, TP_GROUP
from shardwright.model.gather import gather_over, on_cpu
from shardwright.model.ownership import Ownership
from shardwright.model.state_dict import (
    PARTIAL_KEY,
    Asked,
    IncompatibleKeys,
    asking_owners,
    local_state_dict,
    merged,
)
from shardwright.tensor_parallel.sharding import Sharding


def whole_state_dict(
    module: nn.Module,
    ownership: Ownership | None,
    shardings: Mapping[str, Sharding],
    told: Asked,
    *,
    to_first: bool,
) -> OrderedDict[str, Any]:
    """Return the whole model's state dict on the CPU. Every rank of MP_GROUP must call this function.

    First the tp ranks of a stage combine what is divided over them, as `shardings` tells by name; then the stages are
    combined. With `to_first`, only the first rank of MP_GROUP gets it, and the others an empty dict. `told` is what
    modules say of their state.
    """
    part = on_cpu(local_state_dict(module, ownership, part=told.part))
    part.pop(PARTIAL_KEY)
    divided = {name for name, sharding in shardings.items() if sharding.is_divided}
    own = {"names": told.names, "shards": {name: part[name] for name in part if name in divided}}
    every = gather_over(TP_GROUP, own, "state_dict", to_first=to_first)
    if not every:
        return OrderedDict()
    # A tensor that is on one tp rank only, such as a bias, is missing from the names of the others.
    order = dict.fromkeys(name for one in every for name in one["names"])
    for name in dict.fromkeys(name for one in every for name in one["shards"]):
        part[name] = shardings[name].whole([one["shards"].get(name) for one in every])
    parts = gather_over(PP_GROUP, part, "state_dict", to_first=to_first)
    return merged(parts, order) if parts else OrderedDict()


def load_whole_state_dict(
    module: nn.Module,
    ownership: Ownership | None,
    state: Mapping[str, Any],
    shardings: Mapping[str, Sharding],
    rank: int,
    degree: int,
    load: Callable[[dict[str, Any]], IncompatibleKeys],
    strict: bool,
) -> IncompatibleKeys:
    """Load this tp rank's parts of a whole state dict by `load`. All ranks of TP_GROUP must call this function.

    Returns missing and unexpected keys of the whole model. Errors are PyTorch's, raised on every rank.
    """
    with asking_owners(module, ownership):
        own = module.state_dict()
    given = dict(state)
    problems, missing = [], []
    for name, sharding in shardings.items():
        elsewhere = sharding.owner is not None and sharding.owner != rank
        whole = given.pop(name, None) if elsewhere else given.get(name)
        if elsewhere and whole is None:
            missing.append(name)
        elif isinstance(whole, torch.Tensor) and name in own:
            expected = sharding.global_shape(own[name].shape, degree)
            if tuple(whole.shape) != expected:
                problems.append(
                    f"size mismatch for {name}: copying a param with shape {whole.shape} from checkpoint, the shape in "
                    f"current model is {torch.Size(expected)}."
                )
            else:
                given[name] = sharding.shard(whole, rank, degree)
    if missing and strict:
        problems.append(f"Missing key(s) in state_dict: {', '.join(map(repr, missing))}.")
    every = gather_over(TP_GROUP, problems, "load_state_dict")
    found = list(dict.fromkeys(problem for of_rank in every for problem in of_rank))
    if found:
        raise RuntimeError(f"Error(s) in loading state_dict for {type(module).__name__}:\n\t" + "\n\t".join(found))
    loaded = load(given)
    return IncompatibleKeys([*loaded.missing_keys, *missing], loaded.unexpected_keys)
