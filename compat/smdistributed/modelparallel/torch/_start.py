"""``smp.init``, which takes what switches nothing on, and says so."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import Any

import shardwright
from shardwright import ConfigError, _core
from shardwright.config import ENVIRONMENT_VARIABLE, merged
from shardwright.job.runtime import current_runtime
from shardwright.logs import logger
from shardwright.start import start_in
from shardwright.tensor_parallel.replacement import ReplacesAlone

#: Variables that the original library read, and why they have no effect.
WITHOUT_EFFECT = {
    "SMP_NCCL_THROTTLE_LIMIT": "collectives under way are not limited",
    "SMDDP_AG_SCRATCH_BUFFER_SIZE_BYTES": "SMDDP's collectives are not used",
    "SMDDP_AG_SORT_BUFFER_SIZE_BYTES": "SMDDP's collectives are not used",
}


def init(config: Mapping[str, Any] | None = None, **keys: Any) -> None:
    """Make this process a rank of the job; see ``shardwright.init``.

    Without arguments, the configuration is that of the environment variable ``SM_HP_MP_PARAMETERS``, which also goes
    before that of the script. Keys that switch nothing on beside the others are taken, and rank 0 logs them.

    Args:
        config: Configuration keys and values.
        **keys: Further configuration keys as keyword arguments.

    Raises:
        ConfigError: A key is unknown, or its value is not allowed, or would switch on what this library does not have.
    """
    is_first = not shardwright.is_initialized()
    given, idle = taken(config, keys, os.environ)
    start_in(given, {}, {**os.environ, ENVIRONMENT_VARIABLE: ""})
    if is_first:
        current_runtime().add(ReplacesAlone())
        if shardwright.rank() == 0:
            for text in idle:
                logger.warning("%s", text)
            for name in WITHOUT_EFFECT.keys() & os.environ.keys():
                logger.warning("the environment variable %s has no effect here: %s", name, WITHOUT_EFFECT[name])
    transformers = sys.modules.get("transformers.utils.import_utils")
    if transformers is not None and transformers.is_sagemaker_mp_enabled():  # which calls this when it is imported
        from smdistributed.modelparallel.torch._trainer import take_part

        take_part()


def taken(
    config: Mapping[str, Any] | None, keys: Mapping[str, Any], environ: Mapping[str, str]
) -> tuple[dict[str, Any], list[str]]:
    """Return the given configuration without the keys that switch nothing on, and a sentence for each of those.

    Raises:
        ConfigError: What is given is no configuration.
    """
    given = merged(config, keys, environ)
    try:
        idle = _core.Config.without_effect(json.dumps(given))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the configuration is no JSON: {error}") from None
    said = [f"the configuration key {name!r} is {value}, which has no effect here: {why}" for name, value, why in idle]
    for name, _, _ in idle:
        del given[name]
    return given, said
