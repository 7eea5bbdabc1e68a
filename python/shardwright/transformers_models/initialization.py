"""Scripts that leave the initialization of a model of ``transformers`` to the library.

Those for the original library replace ``PreTrainedModel.init_weights`` by a function that does nothing, since that
library made and initialized the modules that it divided. Here these have the weights of the model's own modules, so
that the model is initialized, and its heads are tied, as ``transformers`` would have done it.
"""

from __future__ import annotations

import dis
import sys
import types
from typing import Any

from torch import nn

#: What a function is made of that does nothing.
_NOTHING = {"RESUME", "NOP", "LOAD_CONST", "LOAD_FAST", "LOAD_FAST_BORROW", "RETURN_VALUE", "RETURN_CONST"}


def initialize_where_left(module: nn.Module) -> None:
    """Let a model initialize itself at the end of its creation although the script has switched that off.

    Args:
        module: A module that is being created: none of its own attributes are set yet.
    """
    models: Any = sys.modules.get("transformers.modeling_utils")
    if models is None or not isinstance(module, models.PreTrainedModel):
        return
    given = models.PreTrainedModel.init_weights
    if type(module).init_weights is not given or not _does_nothing(given):  # a function of its own does what it does
        return

    def init_weights() -> None:
        del module.__dict__["init_weights"]
        if not any(parameter.is_meta for parameter in module.parameters()):
            module.initialize_weights()
        module.tie_weights(recompute_mapping=False)

    module.__dict__["init_weights"] = init_weights  # found before that of the class


def _does_nothing(function: Any) -> bool:
    return isinstance(function, types.FunctionType) and all(
        each.opname in _NOTHING for each in dis.get_instructions(function)
    )
