"""``smp.init``, which also says what of the environment has no effect."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

import shardwright
from shardwright.logs import logger

#: Variables that the original library read, and why they have no effect.
WITHOUT_EFFECT = {
    "SMP_NCCL_THROTTLE_LIMIT": "collectives under way are not limited",
    "SMDDP_AG_SCRATCH_BUFFER_SIZE_BYTES": "SMDDP's collectives are not used",
    "SMDDP_AG_SORT_BUFFER_SIZE_BYTES": "SMDDP's collectives are not used",
}


def init(config: Mapping[str, Any] | None = None, **keys: Any) -> None:
    """Make this process a rank of the job; see ``shardwright.init``.

    Without arguments, the configuration is that of the environment variable ``SM_HP_MP_PARAMETERS``, which also goes
    before that of the script.

    Args:
        config: Configuration keys and values.
        **keys: Further configuration keys as keyword arguments.
    """
    is_first = not shardwright.is_initialized()
    shardwright.init(config, **keys)
    if is_first and shardwright.rank() == 0:
        for name in WITHOUT_EFFECT.keys() & os.environ.keys():
            logger.warning("the environment variable %s has no effect here: %s", name, WITHOUT_EFFECT[name])
    transformers = sys.modules.get("transformers.utils.import_utils")
    if transformers is not None and transformers.is_sagemaker_mp_enabled():  # which calls this when it is imported
        from smdistributed.modelparallel.torch._trainer import take_part

        take_part()
