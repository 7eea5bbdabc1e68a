"""What a script has set on parameters, by which some optimizers choose, for those that take their places."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from shardwright.delayed.materialise import is_delayed

#: Attributes that libraries set on a parameter, which say something of its own memory.
_OF_LIBRARIES = frozenset({"ds_shape", "ds_numel", "ds_tensor", "_is_param"})
#: Of a parameter whose values are not computed yet.
_OF_DELAYED = frozenset({"value", "meta"})
_OURS = "_shardwright"


def user_attributes(parameter: torch.Tensor) -> dict[str, Any]:
    """Return the attributes that a script has set on a parameter, such as ``parameter.no_decay = True``."""
    found = getattr(parameter, "__dict__", None)
    if not found:
        return {}
    hidden = _OF_LIBRARIES | _OF_DELAYED if is_delayed(parameter) else _OF_LIBRARIES
    return {name: value for name, value in found.items() if name not in hidden and not name.startswith(_OURS)}


def carry_attributes(found: Mapping[str, Any], to: torch.Tensor) -> None:
    """Have a parameter have these attributes, and no other ones of a script.

    Args:
        found: What `user_attributes` has returned of the one that it stands for.
        to: The parameter.
    """
    own = vars(to)
    for name in user_attributes(to).keys() - found.keys():
        del own[name]
    own.update(found)
