"""Files as ``accelerate config`` writes them, of each kind of job, and what they become here."""

from __future__ import annotations

from typing import Any, NamedTuple

_OF_TPU = {"downcast_bf16": "no", "tpu_env": [], "tpu_use_cluster": False, "tpu_use_sudo": False}
_COMMON = {
    "compute_environment": "LOCAL_MACHINE",
    "debug": False,
    "enable_cpu_affinity": False,
    "machine_rank": 0,
    "main_training_function": "main",
    "mixed_precision": "no",
    "num_machines": 1,
    "rdzv_backend": "static",
    "same_network": True,
    "use_cpu": False,
    **_OF_TPU,
}
_FSDP_1 = {
    "fsdp_activation_checkpointing": False,
    "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP",
    "fsdp_backward_prefetch": "BACKWARD_PRE",
    "fsdp_cpu_ram_efficient_loading": True,
    "fsdp_forward_prefetch": False,
    "fsdp_min_num_params": 100000000,
    "fsdp_offload_params": False,
    "fsdp_reshard_after_forward": "SHARD_GRAD_OP",
    "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    "fsdp_sync_module_states": True,
    "fsdp_use_orig_params": True,
    "fsdp_version": 1,
}
_FSDP_2 = {
    "fsdp_activation_checkpointing": True,
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_cpu_ram_efficient_loading": True,
    "fsdp_offload_params": False,
    "fsdp_reshard_after_forward": True,
    "fsdp_state_dict_type": "FULL_STATE_DICT",
    "fsdp_transformer_layer_cls_to_wrap": "GPT2Block",
    "fsdp_version": 2,
}
_INLINE = {
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 0.5,
    "offload_optimizer_device": "cpu",
    "offload_param_device": "none",
    "zero3_init_flag": False,
    "zero3_save_16bit_model": True,
    "zero_stage": 3,
}
#: A file of DeepSpeed as guides of transformers have it, with numbers in place of some "auto".
ZERO_3: dict[str, Any] = {
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "none", "pin_memory": True},
        "overlap_comm": True,
        "reduce_bucket_size": 5e8,
        "stage3_max_live_parameters": 1e9,
        "stage3_param_persistence_threshold": 1e6,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": 2,
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": 3,
    "wall_clock_breakdown": False,
}
_MEGATRON = {
    "megatron_lm_gradient_clipping": 1.0,
    "megatron_lm_num_micro_batches": 4,
    "megatron_lm_pp_degree": 2,
    "megatron_lm_recompute_activations": True,
    "megatron_lm_sequence_parallelism": True,
    "megatron_lm_tp_degree": 2,
    "megatron_lm_use_distributed_optimizer": True,
}


class Case(NamedTuple):
    """A file, and what it becomes."""

    file: dict[str, Any]
    config: dict[str, Any]
    command: str
    lines: tuple[str, ...] = ()
    deepspeed: dict[str, Any] | None = None
    status: int = 0


_UNCLIPPED = {"sdp_gradient_clipping": 1e9}
CASES: dict[str, Case] = {
    "alone": Case(
        {**_COMMON, "distributed_type": "NO", "num_processes": 1, "gpu_ids": "all", "mixed_precision": "fp16"},
        {},
        "shardwright run --ranks 1 train.py",
        ('accelerator = Accelerator(mixed_precision="fp16")',),
    ),
    "processors": Case(
        {**_COMMON, "distributed_type": "MULTI_CPU", "num_processes": 4, "use_cpu": True},
        {"ddp": True},
        "CUDA_VISIBLE_DEVICES= shardwright run --ranks 4 train.py",
    ),
    "two hosts": Case(
        {
            **_COMMON,
            "distributed_type": "MULTI_GPU",
            "num_processes": 8,
            "num_machines": 2,
            "machine_rank": 1,
            "main_process_ip": "10.0.0.7",
            "main_process_port": 29501,
            "gpu_ids": "0,1,2,3",
            "mixed_precision": "bf16",
        },
        {"ddp": True},
        "CUDA_VISIBLE_DEVICES=0,1,2,3 shardwright run --ranks 4 --nnodes 2 --node-rank 1 --master-addr 10.0.0.7 "
        "--master-port 29501 train.py",
        ('accelerator = Accelerator(mixed_precision="bf16")',),
    ),
    "hosts that meet": Case(
        {
            **_COMMON,
            "distributed_type": "MULTI_GPU",
            "num_processes": 4,
            "num_machines": 2,
            "main_process_ip": "first",
            "main_process_port": 29500,
            "rdzv_backend": "c10d",
            "same_network": False,
        },
        {"ddp": True},
        "shardwright run --ranks 2 --nnodes 2 --rdzv-backend c10d --rdzv-endpoint first:29500 train.py",
    ),
    "FSDP 1": Case(
        {**_COMMON, "distributed_type": "FSDP", "num_processes": 4, "fsdp_config": _FSDP_1},
        {
            "ddp": True,
            "sharded_data_parallel_degree": 4,
            "sdp_stage": 2,
            "sdp_param_persistence_threshold": 0,
            **_UNCLIPPED,
        },
        "shardwright run --ranks 4 train.py",
    ),
    "FSDP 2": Case(
        {
            **_COMMON,
            "distributed_type": "FSDP",
            "num_processes": 4,
            "mixed_precision": "bf16",
            "fsdp_config": _FSDP_2,
            "parallelism_config": {
                "parallelism_config_dp_replicate_size": 2,
                "parallelism_config_dp_shard_size": 2,
                "parallelism_config_tp_size": 1,
                "parallelism_config_cp_size": 1,
            },
        },
        {
            "ddp": True,
            "sharded_data_parallel_degree": 2,
            "sdp_stage": 3,
            "sdp_param_persistence_threshold": 0,
            **_UNCLIPPED,
            "bf16": True,
        },
        "shardwright run --ranks 4 train.py",
        ("accelerator = Accelerator()", '    if type(module).__name__ in ["GPT2Block"]:'),
    ),
    "DeepSpeed": Case(
        {**_COMMON, "distributed_type": "DEEPSPEED", "num_processes": 2, "deepspeed_config": _INLINE},
        {
            "ddp": True,
            "sharded_data_parallel_degree": 2,
            "sdp_stage": 3,
            "sdp_param_persistence_threshold": 100000,
            "sdp_gradient_clipping": 0.5,
            "offload_optimizer": True,
        },
        "shardwright run --ranks 2 train.py",
        ("accelerator = Accelerator(gradient_accumulation_steps=4)",),
    ),
    "a file of DeepSpeed": Case(
        {
            **_COMMON,
            "distributed_type": "DEEPSPEED",
            "num_processes": 8,
            "mixed_precision": "bf16",
            "deepspeed_config": {"deepspeed_config_file": "zero3.json", "zero3_init_flag": True},
        },
        {
            "ddp": True,
            "sharded_data_parallel_degree": 8,
            "sdp_stage": 3,
            "sdp_param_persistence_threshold": 1000000,
            "sdp_reduce_bucket_size": 500000000,
            "sdp_max_live_parameters": 1000000000,
            "sdp_gradient_clipping": 1.0,
            "bf16": True,
            "delayed_parameter_initialization": True,
        },
        "shardwright run --ranks 8 train.py",
        (
            "accelerator = Accelerator(gradient_accumulation_steps=2)",
            "optimizer = torch.optim.AdamW("
            "model.parameters(), lr=0.0001, betas=(0.9, 0.95), eps=1e-08, weight_decay=0.1)",
        ),
        ZERO_3,
    ),
    "Megatron-LM": Case(
        {
            **_COMMON,
            "distributed_type": "MEGATRON_LM",
            "num_processes": 8,
            "mixed_precision": "fp16",
            "megatron_lm_config": _MEGATRON,
        },
        {
            "pipeline_parallel_degree": 2,
            "tensor_parallel_degree": 2,
            "prescaled_batch": True,
            "microbatches": 4,
            "ddp": True,
            "shard_optimizer_state": True,
            "fp16": True,
            "checkpoint_attentions": True,
        },
        "shardwright run --ranks 8 train.py",
        ("    accelerator.clip_grad_norm_(model.parameters(), 1.0)",),
    ),
}
