"""Other interfaces of the original library, which are not here, and what surrounds a job of it."""

from __future__ import annotations

from tests.compat.interface.rows import Symbol

_TENSORFLOW = "TensorFlow, `smdistributed.modelparallel.tensorflow`"
_VERSION_2 = "The second version, `torch.sagemaker`"
_PYTORCH_ONLY = "this library is for PyTorch; importing the module says so"


def _of_tensorflow(name: str) -> Symbol:
    return Symbol(name, _TENSORFLOW, refused=_PYTORCH_ONLY)


def _of_version_2(name: str, instead: str) -> Symbol:
    return Symbol(name, _VERSION_2, refused=instead)


_ATTENTION = "`smp.nn.FlashAttentionLayer`, and PyTorch's attention in distributed layers"
_ASYNCHRONOUS = "`smp.save_checkpoint(asynchronous=True)`"

OLD_VERSIONS: tuple[Symbol, ...] = (
    *(
        _of_tensorflow(f"tensorflow.{name}")
        for name in (
            "DistributedModel",
            "DistributedModel.save_model",
            "step",
            "StepOutput.merge",
            "StepOutput.accumulate",
            "partition",
            "register_post_partition_hook",
            "CheckpointManager",
            "CheckpointManager.save",
            "CheckpointManager.restore",
        )
    ),
    _of_version_2("tsm.init", "`smp.init`; jobs there are FSDP's, and scripts import `torch.sagemaker`"),
    _of_version_2("tsm.transform", "`smp.set_tensor_parallelism`"),
    _of_version_2("delayed_param.DelayedParamIniter", "`smp.delay_param_initialization`"),
    _of_version_2("get_param_init_fn", "`smp.delay_param_initialization`"),
    _of_version_2("get_post_param_init_fn", "`smp.delay_param_initialization`"),
    _of_version_2("validate_params_and_buffers_inited", "`smp.delay_param_initialization` checks it itself"),
    _of_version_2("moe.moe_config.MoEConfig", "`smp.set_tensor_parallelism`, which divides experts of Mixtral"),
    _of_version_2("nn.attn.FlashSelfAttention", _ATTENTION),
    _of_version_2("nn.attn.FlashGroupedQueryAttention", _ATTENTION),
    _of_version_2("nn.huggingface.llama_flashattn.LlamaFlashAttention", _ATTENTION),
    _of_version_2("grad_norm.clip_grad_norm_", "`smp.clip_grad_norm_`"),
    *(
        _of_version_2(f"distributed.checkpoint.{name}", _ASYNCHRONOUS)
        for name in (
            "state_dict_saver.async_save",
            "state_dict_saver.maybe_finalize_async_calls",
            "state_dict_utils.sm_state_dict_type",
            "state_dict_utils.SMStateDictType.SM_LOCAL_STATE_DICT",
            "state_dict_utils.init_optim_state",
            "filesystem.DistributedFileSystemReader",
            "async_utils.AsyncCallsQueue",
        )
    ),
    _of_version_2("distributed.checkpoint.state_dict_loader.load", "`smp.resume_from_checkpoint`"),
    _of_version_2("tsm.state.tp_rank", "`smp.tp_rank`"),
    _of_version_2("tsm.state.ep_rank", "there are no expert-parallel ranks"),
    _of_version_2("tsm.state.cp_rank", "there are no context-parallel ranks"),
    _of_version_2("tsm.state.cp_size", "there are no context-parallel ranks"),
    _of_version_2("tsm.state.tensor_parallel_degree", "`smp.tp_size`"),
    _of_version_2("tsm.state.ranker.get_rep_groups", "`smp.get_rdp_group`"),
    _of_version_2("tsm.state.tp_process_group", "`smp.get_tp_process_group`"),
    _of_version_2("tsm.state.world_process_group", "`smp.get_world_process_group`"),
    _of_version_2("tsm.state.get_rng_state_tracker", "`reproducible_rng`"),
)

#: What the launcher passed to a job, and what of it is read here.
ENVIRONMENT: tuple[tuple[str, str], ...] = (
    ("SM_HP_MP_PARAMETERS", "The configuration, as JSON; goes before that of the script. Read by `smp.init`."),
    ("SM_HPS", "Not read: its `mp_parameters` are those of `SM_HP_MP_PARAMETERS`."),
    ("SM_FRAMEWORK_PARAMS", "Not read here: the Trainer of `transformers` reads its `sagemaker_mpi_enabled`."),
    ("MASTER_PORT", "Where ranks meet, unless `ddp_port` is given."),
    ("SMP_DISABLE_D2D", "1: no tensor is copied from device to device."),
    ("SMP_D2D_GPU_BUFFER_SIZE_BYTES", "The size of the device buffer out of which tensors are copied."),
    ("SMP_NCCL_THROTTLE_LIMIT", "No effect, which `smp.init` logs: collectives under way are not limited."),
    ("SMDDP_AG_SCRATCH_BUFFER_SIZE_BYTES", "No effect, which `smp.init` logs: SMDDP's collectives are not used."),
    ("SMDDP_AG_SORT_BUFFER_SIZE_BYTES", "No effect, which `smp.init` logs: SMDDP's collectives are not used."),
    (
        "FI_PROVIDER, FI_EFA_USE_DEVICE_RDMA, RDMAV_FORK_SAFE, NCCL_PROTO, NCCL_ALGO",
        "Not read here: NCCL, libfabric and libibverbs read them.",
    ),
)

#: What was said to the launcher, and what does it here.
LAUNCHER: tuple[tuple[str, str], ...] = (
    ("distribution, smdistributed, modelparallel, enabled", "Start the script by a launcher; see the guide."),
    ("parameters", "`SM_HP_MP_PARAMETERS`, or the argument of `smp.init`."),
    ("mpi, processes_per_host", "`torchrun --nproc-per-node`, or `mpirun -np`."),
    ("custom_mpi_options", "Options of `mpirun`."),
    ("python -m mpi4py", "Not needed: a rank that raises ends the job on all ranks. It does no harm."),
    ("smddpmprun", "Not used: there are no collectives of SMDDP."),
)
