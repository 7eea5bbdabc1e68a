"""The plan of a job, of what a configuration of accelerate says."""

from __future__ import annotations

from shardwright.convert.deepspeed_planning import plan_deepspeed, plan_inline, share
from shardwright.convert.plan import Engine, Plan, Sharding
from shardwright.convert.values import Section, shortened
from shardwright.errors import ConfigError

#: What FSDP 1 calls its ways of sharding, in the order of their numbers: the stage, and whether hosts are replicas.
STRATEGIES = {
    "FULL_SHARD": (3, False),
    "SHARD_GRAD_OP": (2, False),
    "NO_SHARD": (0, False),
    "HYBRID_SHARD": (3, True),
    "HYBRID_SHARD_ZERO2": (2, True),
}
#: What FSDP 2 calls them, which accelerate takes of FSDP 1 too.
_FLAGS = {"YES": "FULL_SHARD", "TRUE": "FULL_SHARD", "NO": "SHARD_GRAD_OP", "FALSE": "SHARD_GRAD_OP"}
ENGINES = {"FSDP": Engine.FSDP, "DEEPSPEED": Engine.DEEPSPEED, "MEGATRON_LM": Engine.MEGATRON}
#: Devices that are here.
REPLICATED = ("NO", "MULTI_CPU", "MULTI_GPU")
#: Devices that are not, and the job types of SageMaker.
OTHERS = (
    *(f"MULTI_{device}" for device in ("NPU", "MLU", "SDAA", "MUSA", "XPU", "HPU", "NEURON")),
    "XLA",
    "TPU",
    "DATA_PARALLEL",
    "MODEL_PARALLEL",
)
#: In which DeepSpeed creates modules by parts.
_DELAYED_STAGE = 3
_PRECISIONS = ("no", "fp16", "bf16", "fp8")
#: What FSDP does not clip by: the library's default is 1.0, and this leaves gradients as they are.
NO_CLIPPING = 1e9


def plan_accelerate(given: Section, deepspeed: Section | None, ranks: int | None) -> Plan:
    """Return the plan of a configuration of accelerate.

    Args:
        given: The keys of its file.
        deepspeed: Those of the file of DeepSpeed that it names, if it does.
        ranks: How many processes there are, in place of what the file says.

    Raises:
        ConfigError: A value is of another kind than accelerate takes; or nothing says how many processes there are.
    """
    kind = given.text("distributed_type").upper()
    if kind not in (*ENGINES, *REPLICATED, *OTHERS):
        allowed = ", ".join((*ENGINES, *REPLICATED, *OTHERS))
        raise ConfigError(f"the key distributed_type is {shortened(given.get('distributed_type'))}; allowed: {allowed}")
    plan = Plan(ENGINES.get(kind, Engine.PLAIN))
    _plan_processes(plan, given, ranks, is_alone=kind == "NO")
    precision = precision_of(given)
    parallel = given.within("parallelism_config", "parallelism_config_")
    if plan.engine is not Engine.MEGATRON:
        plan.tensor = parallel.whole("tp_size", 1, fewest=1)
        plan.others = parallel.whole("cp_size", 1, fewest=1) * parallel.whole("sp_size", 1, fewest=1)
    if plan.engine is Engine.FSDP:
        _plan_fsdp(plan, given.within("fsdp_config", "fsdp_"), parallel, precision)
    elif plan.engine is Engine.MEGATRON:
        _plan_megatron(plan, given.within("megatron_lm_config", "megatron_lm_"), precision)
    elif plan.engine is Engine.DEEPSPEED:
        inline = given.within("deepspeed_config")
        if deepspeed is None:
            plan_inline(plan, inline, precision)
        else:
            plan_deepspeed(plan, deepspeed, precision)
        plan.is_delayed = inline.flag("zero3_init_flag") and plan.asked_stage == _DELAYED_STAGE
    else:
        plan.precision = precision
    return plan


def precision_of(given: Section) -> str:
    """Return the precision that a file asks for; of ``fp8`` what accelerate itself builds on."""
    precision = given.text("mixed_precision", "fp16" if given.flag("fp16") else "no").lower()
    if precision not in _PRECISIONS:
        allowed = ", ".join(_PRECISIONS)
        raise ConfigError(f"the key mixed_precision is {shortened(precision)}; allowed: {allowed}")
    return "bf16" if precision == "fp8" else precision


def _plan_processes(plan: Plan, given: Section, ranks: int | None, is_alone: bool) -> None:
    hosts = 1 if is_alone else given.whole("num_machines", 1, fewest=1)
    asked = -1 if given.text("num_processes") == "-1" else given.whole("num_processes", -1, fewest=1)
    number = ranks if ranks is not None else 1 if is_alone else asked
    if number < 1:
        raise ConfigError("the file does not say how many processes there are: give --num-processes")
    if number < hosts:
        raise ConfigError(f"there are {number} processes for {hosts} machines; allowed: one on each, or more")
    plan.ranks, plan.hosts = number // hosts * hosts, hosts
    plan.host_rank = given.whole("machine_rank", 0)
    plan.address = given.text("main_process_ip") or None
    plan.port = given.whole("main_process_port", 0) or None
    plan.rendezvous = given.text("rdzv_backend", "static")
    devices = given.text("gpu_ids", "all")
    plan.devices = None if devices == "all" else devices
    plan.is_cpu_only = given.flag("use_cpu")


def strategy_of(fsdp: Section) -> tuple[int, bool]:
    """Return the stage that FSDP is asked for, and whether hosts are replicas of one another."""
    if fsdp.whole("version", 1) >= 2:
        return (3 if fsdp.flag("reshard_after_forward", True) else 2), False
    # `accelerate config` writes the strategy of FSDP 1 by the name of the flag of FSDP 2.
    key = "sharding_strategy" if fsdp.get("sharding_strategy") is not None else "reshard_after_forward"
    name = fsdp.text(key, "FULL_SHARD").upper()
    name = _FLAGS.get(name, name)
    if name.isdecimal() and 1 <= int(name) <= len(STRATEGIES):
        name = list(STRATEGIES)[int(name) - 1]
    if name not in STRATEGIES:
        allowed = ", ".join(STRATEGIES)
        raise ConfigError(f"the key fsdp_config.fsdp_{key} is {shortened(name)}; allowed: {allowed}, 1 to 5")
    return STRATEGIES[name]


def _plan_fsdp(plan: Plan, fsdp: Section, parallel: Section, precision: str) -> None:
    stage, is_hybrid = strategy_of(fsdp)
    plan.precision = precision
    shards = plan.replicas // plan.hosts if is_hybrid else plan.replicas
    if parallel.entries:
        shards = parallel.whole("dp_shard_size", 1, fewest=1)
        plan.is_uneven = parallel.whole("dp_replicate_size", 1, fewest=1) * shards != plan.replicas
    share(plan, stage if shards > 1 else 0, shards)
    plan.is_cast = precision == "bf16"
    if plan.sharding is Sharding.PARAMETERS:
        plan.threshold = 0  # FSDP shards parameters of any size
    plan.offload_optimizer = fsdp.flag("offload_params")
    if fsdp.flag("activation_checkpointing"):
        plan.checkpointed = tuple(
            name.strip() for name in fsdp.text("transformer_layer_cls_to_wrap").split(",") if name.strip()
        )
        plan.offload_activations = fsdp.flag("activation_checkpointing_offload")


def _plan_megatron(plan: Plan, megatron: Section, precision: str) -> None:
    plan.tensor = megatron.whole("tp_degree", 1, fewest=1)
    plan.pipeline = megatron.whole("pp_degree", 1, fewest=1)
    plan.others = megatron.whole("context_parallel_size", 1, fewest=1)
    plan.microbatches = megatron.whole("num_micro_batches", 1, fewest=1)
    plan.precision, plan.is_cast = precision, precision != "no"
    if megatron.flag("use_distributed_optimizer") and plan.replicas > 1:
        plan.sharding = Sharding.STATE
    plan.offload_optimizer = megatron.flag("optimizer_cpu_offload")
    if megatron.get("recompute_activations") is not None:
        plan.checkpoint_attentions = megatron.flag("recompute_activations")
    if megatron.get("gradient_clipping") is None:
        key = "megatron_lm_config.megatron_lm_gradient_clipping"
        plan.unsaid[key] = "accelerate clips by 1.0 where the file does not say it"
    plan.clipping = megatron.number("gradient_clipping", 1.0) or None
