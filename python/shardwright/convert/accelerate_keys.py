"""What becomes of the keys of accelerate's own: processes, hosts, precision."""

from __future__ import annotations

from typing import Any

from shardwright.convert.keys import Key, Told, becomes, drop, key, lack, lacking, not_needed
from shardwright.convert.plan import Engine, Plan, Sharding
from shardwright.convert.planning import OTHERS
from shardwright.convert.values import is_off


def _distributed_type(plan: Plan, value: Any) -> Told:
    kind = str(value).upper()
    if kind in ("DATA_PARALLEL", "MODEL_PARALLEL"):
        return lack("a job of SageMaker's own libraries: scripts for model parallelism run by the old import path")
    if kind in OTHERS:
        return lack("a device that is not here, which has CPUs and CUDA: the printed lines are for these")
    if kind == "NO":
        return becomes("`--ranks 1`")
    if plan.ranks == 1:
        return becomes("`--ranks 1`, with which there are no replicas")
    if plan.engine is Engine.PLAIN:
        return becomes('`"ddp": True`')
    return becomes("`smp.init`, with the keys below")


def _num_processes(plan: Plan, value: Any) -> Told:
    text = str(value)
    if text.isdecimal() and int(text) > plan.ranks and int(text) // plan.hosts * plan.hosts == plan.ranks:
        return lack(f"not a multiple of {plan.hosts} machines: accelerate starts {plan.ranks}, as the printed command")
    each = "" if plan.hosts == 1 else f", on each of {plan.hosts} hosts"
    said = "" if text == str(plan.ranks) else f" ({plan.ranks} in all)"
    return becomes(f"`--ranks {plan.ranks // plan.hosts}`{each}{said}")


def _num_machines(plan: Plan, value: Any) -> Told:
    if plan.hosts == 1:
        return drop("one host needs no option")
    return becomes(f"`--nnodes {plan.hosts}`; a job on several hosts needs a secret, `SHARDWRIGHT_SECRET`")


def _machine_rank(plan: Plan, value: Any) -> Told:
    if plan.hosts == 1:
        return drop("one host needs no option")
    if plan.rendezvous != "static":
        return drop("hosts number themselves where they meet at `--rdzv-endpoint`")
    return becomes(f"`--node-rank {plan.host_rank}`, on this host")


def _address(option: str) -> Any:
    def read(plan: Plan, value: Any) -> Told:
        if plan.hosts == 1:
            return drop("the ranks of one host meet at a free port")
        return becomes(f"`{option}`" if plan.rendezvous == "static" else "`--rdzv-endpoint`")

    return read


def _rendezvous(plan: Plan, value: Any) -> Told:
    if plan.hosts == 1:
        return drop("the ranks of one host meet at a free port")
    if plan.rendezvous == "static":
        return becomes("`--node-rank`, `--master-addr` and `--master-port`")
    return becomes(f"`--rdzv-backend {plan.rendezvous}`")


def _devices(plan: Plan, value: Any) -> Told:
    if plan.devices is None:
        return drop("each rank takes the device of its number on its host")
    return becomes(f"`CUDA_VISIBLE_DEVICES={plan.devices}`")


def _use_cpu(plan: Plan, value: Any) -> Told:
    return becomes("`CUDA_VISIBLE_DEVICES=`, with which ranks see no GPU") if plan.is_cpu_only else drop("it is off")


def precision_text(plan: Plan) -> str:
    """Return what stands for the precision of a plan."""
    if plan.is_cast:
        return f'`"{plan.precision}": True`'
    if not plan.has_accelerator:
        return "`torch.autocast` in the step function"
    return f'`Accelerator(mixed_precision="{plan.precision}")`, and `accelerator.autocast()` in the step function'


def _mixed_precision(plan: Plan, value: Any) -> Told:
    name = str(value).lower()
    if name == "fp8":
        return lack(f"float8 is not here; the printed lines compute in bfloat16: {precision_text(plan)}")
    if is_off(value):
        return drop("float32 is the default" if plan.precision == "no" else "DeepSpeed's file says it")
    if plan.precision != name:
        return lack(f"DeepSpeed's file says {plan.precision}; accelerate refuses both")
    if name == "fp16" and plan.sharding is Sharding.PARAMETERS:
        return becomes(f"{precision_text(plan)}: float16 parameters cannot be sharded, those that are have float32")
    return becomes(precision_text(plan))


def _fp16(plan: Plan, value: Any) -> Told:
    if is_off(value):
        return drop("it is off")
    return becomes(precision_text(plan)) if plan.precision == "fp16" else drop("`mixed_precision` says it")


_TPU = "only TPUs have it"
_SAGEMAKER = "it starts a job of SageMaker, which `shardwright run` does not: give its estimator the printed command"

#: The keys of a file of accelerate, but for those of its mappings.
ACCELERATE: tuple[Key, ...] = (
    lacking("compute_environment", _SAGEMAKER, ["LOCAL_MACHINE"]),
    key(
        "distributed_type",
        '`"ddp": True` for `MULTI_CPU` and `MULTI_GPU`; for `FSDP`, `DEEPSPEED` and `MEGATRON_LM` see their keys; '
        "no counterpart for devices other than CPU and CUDA",
        _distributed_type,
    ),
    key("num_processes", "`--ranks`, which is the number on each host", _num_processes),
    key("num_machines", "`--nnodes`", _num_machines),
    key("machine_rank", "`--node-rank`", _machine_rank),
    key("main_process_ip", "`--master-addr` on several hosts; not needed on one", _address("--master-addr")),
    key("main_process_port", "`--master-port` on several hosts; not needed on one", _address("--master-port")),
    key("rdzv_backend", "`--rdzv-backend` and `--rdzv-endpoint`, where it is not `static`", _rendezvous),
    not_needed("same_network", "`rdzv_backend` says how hosts meet"),
    key("gpu_ids", "`CUDA_VISIBLE_DEVICES`; not needed for `all`", _devices),
    key("use_cpu", "`CUDA_VISIBLE_DEVICES=`", _use_cpu),
    key(
        "mixed_precision",
        "`bf16` and `fp16` with FSDP, DeepSpeed and Megatron-LM, which cast parameters; else (and `fp16` with sharded "
        "parameters) `Accelerator(mixed_precision=...)`, which is autocast; no counterpart for `fp8`",
        _mixed_precision,
    ),
    key("fp16", "as `mixed_precision: fp16`", _fp16),
    not_needed("debug", "ranks compare what they are given, and nothing hangs"),
    not_needed("enable_cpu_affinity", "it changes speed only; bind the command with `numactl`"),
    not_needed("main_training_function", "only notebooks and TPUs use it; ranks run the whole script"),
    not_needed("downcast_bf16", _TPU),
    *(
        not_needed(name, _TPU)
        for name in (
            "tpu_name",
            "tpu_zone",
            "tpu_use_cluster",
            "tpu_use_sudo",
            "command_file",
            "commands",
            "tpu_vm",
            "tpu_env",
        )
    ),
    not_needed("mpirun_config", "`shardwright run` starts ranks itself; `mpirun` works too"),
    not_needed("dynamo_config", "it changes speed only; compile modules that lie on one rank by `module.compile()`"),
    not_needed("dynamo_backend", "it changes speed only; compile modules that lie on one rank by `module.compile()`"),
    key(
        "fp8_config",
        "see `mixed_precision`",
        lambda plan, value: drop("`mixed_precision` says it"),
    ),
)

#: Those of a file for SageMaker.
SAGEMAKER: tuple[Key, ...] = tuple(
    not_needed(name, "it starts a job of SageMaker")
    for name in (
        "ec2_instance_type",
        "iam_role_name",
        "image_uri",
        "profile",
        "region",
        "base_job_name",
        "pytorch_version",
        "transformers_version",
        "py_version",
        "sagemaker_inputs_file",
        "sagemaker_metrics_file",
        "additional_args",
    )
)
