"""What comes of a configuration by the documents of the interface and of this library, stated by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tests.compat.cells.cell import REFUSED, SAID, WORKS

Config = Mapping[str, Any]
Rule = tuple[str, Callable[[Config, int], bool], str]

_OF_SHARDING = {
    "sdp_reduce_bucket_size": 500_000_000,
    "sdp_param_persistence_threshold": 1_000_000,
    "sdp_max_live_parameters": 1_000_000_000,
    "sdp_hierarchical_allgather": True,
    "sdp_gradient_clipping": 1.0,
}


def _pp(config: Config) -> int:
    return int(config.get("pipeline_parallel_degree", config.get("partitions", 1)))


def _tp(config: Config) -> int:
    return int(config.get("tensor_parallel_degree", 1))


def _sdp(config: Config) -> int:
    return int(config.get("sharded_data_parallel_degree", 1))


def _on(key: str) -> Callable[[Config, int], bool]:
    return lambda config, _: config.get(key) is True


def _sharded_with(key: str) -> Rule:
    return key, lambda config, ranks: _sdp(config) > 1 and bool(config.get(key)), "sharded_data_parallel_degree"


def _asks(key: str, *nothing: Any) -> Rule:
    words = "the second version of the interface"
    return key, lambda config, _: key in config and config[key] not in nothing, words


def _limit(config: Config) -> bool:
    active = config.get("active_microbatches")
    return (
        active is not None
        and config.get("pipeline") == "simple"
        and active < config.get("microbatches", 1)
        and active != _pp(config) + 2
    )


#: What is refused: a key, when, and a part of the reason. The first that applies is what an error names.
REFUSALS: tuple[Rule, ...] = (
    _asks("hybrid_shard_degree", 0, 1),
    _asks("context_parallel_degree", 1),
    _asks("expert_parallel_degree", 1),
    _asks("sm_activation_offloading", False),
    _asks("fsdp_cache_flush_warnings", False),
    _asks("allow_empty_shards", False, True),
    _asks("random_seed", 12345),
    ("horovod", _on("horovod"), "TensorFlow-only"),
    ("ddp_port", lambda config, _: config.get("ddp_port") == 0, "from 1 to 65535"),
    (
        "partitions",
        lambda config, _: len({config[key] for key in ("partitions", "pipeline_parallel_degree") if key in config}) > 1,
        "two names of one key",
    ),
    (
        "default_partition",
        lambda config, _: config.get("auto_partition") is False and "default_partition" not in config,
        "must be supplied",
    ),
    (
        "default_partition",
        lambda config, _: config.get("default_partition", 0) >= max(_pp(config), 1) and config["default_partition"] > 0,
        "below pipeline_parallel_degree",
    ),
    ("active_microbatches", lambda config, _: _pp(config) > 1 and _limit(config), "keeps all microbatches in flight"),
    (
        "load_partition",
        lambda config, _: _pp(config) > 1 and config.get("load_partition") is True and "partition_file" not in config,
        "partition_file",
    ),
    ("fp16", lambda config, _: bool(config.get("fp16") and config.get("bf16")), "different dtypes"),
    ("fp16_params", lambda config, _: bool(config.get("fp16_params") and config.get("bf16")), "different dtypes"),
    ("tensor_parallel_degree", lambda config, _: _tp(config) > 1 and not config.get("ddp"), "ddp"),
    ("sharded_data_parallel_degree", lambda config, _: _sdp(config) > 1 and not config.get("ddp"), "ddp"),
    (
        "tensor_parallel_degree",
        lambda config, _: _sdp(config) > 1 and _tp(config) > 1,
        "sharded_data_parallel_degree",
    ),
    *(_sharded_with(key) for key in ("shard_optimizer_state", "fp16", "fp16_params")),
    (
        "_fp32_grad_accumulation",
        lambda config, _: _sdp(config) > 1 and bool(config.get("_fp32_grad_accumulation") and config.get("bf16")),
        "sharded_data_parallel_degree",
    ),
    ("pipeline_parallel_degree", lambda config, ranks: ranks % (_pp(config) * _tp(config)) > 0, "world"),
    ("ddp", lambda config, ranks: ranks > _pp(config) * _tp(config) and not config.get("ddp"), "ddp"),
    (
        "sharded_data_parallel_degree",
        lambda config, ranks: ranks // (_pp(config) * _tp(config)) % _sdp(config) > 0,
        "sharded_data_parallel_degree",
    ),
    (
        "ddp_dist_backend",
        lambda config, ranks: bool(config.get("ddp")) and config.get("ddp_dist_backend") == "nccl" and ranks > 1,
        "have no GPU",
    ),
)

#: What switches nothing on.
IDLE: tuple[Rule, ...] = (
    *(
        (key, lambda config, _, key=key: key in config and not config.get("ddp"), "one replica")
        for key in ("ddp_port", "shard_optimizer_state", "ddp_dist_backend")
    ),
    *(
        (
            key,
            lambda config, _, key=key, default=default: config.get(key, default) != default and _sdp(config) == 1,
            '"sharded_data_parallel_degree" is 1',
        )
        for key, default in _OF_SHARDING.items()
    ),
    ("fast_mode", lambda config, _: bool(config.get("fast_mode")) and not config.get("static_mode"), "static_mode"),
    (
        "_fp32_grad_accumulation",
        lambda config, _: (
            bool(config.get("_fp32_grad_accumulation")) and not (config.get("fp16") or config.get("bf16"))
        ),
        "float32 anyway",
    ),
    ("active_microbatches", lambda config, _: _pp(config) == 1 and _limit(config), "pipeline_parallel_degree"),
    (
        "load_partition",
        lambda config, _: _pp(config) == 1 and config.get("load_partition") is True and "partition_file" not in config,
        "pipeline_parallel_degree",
    ),
    ("contiguous", lambda config, _: config.get("contiguous") is False, "TensorFlow"),
    *(
        (key, lambda config, _, key=key: key in config, "")
        for key in (
            "hybrid_shard_degree",
            "context_parallel_degree",
            "expert_parallel_degree",
            "sm_activation_offloading",
            "fsdp_cache_flush_warnings",
            "allow_empty_shards",
            "random_seed",
        )
    ),
)
#: Values with which a key of ``IDLE`` is as if it was not given.
_AS_IF_NOT_GIVEN = {"shard_optimizer_state": False, "ddp_dist_backend": "auto", "ddp_port": None}


def expected(config: Config, ranks: int) -> tuple[str, str]:
    """Return what comes of a configuration in a job of so many ranks, and a part of what is said."""
    for _, applies, words in REFUSALS:
        if applies(config, ranks):
            return REFUSED, words
    for key, applies, words in IDLE:
        if applies(config, ranks) and not (key in _AS_IF_NOT_GIVEN and config[key] == _AS_IF_NOT_GIVEN[key]):
            return SAID, words
    return WORKS, ""
