"""The symbols of the PyTorch interface."""

from __future__ import annotations

from tests.compat.interface.modules import MODULES
from tests.compat.interface.rows import SMP, Symbol

_START, _RANKS, _OBJECTS, _STEPS = "Start and state", "Ranks and groups", "Python objects between ranks", "Steps"
_MODEL, _OPTIMIZER = "`smp.DistributedModel`", "`smp.DistributedOptimizer`"
_PARTITION, _MEMORY, _CHECKPOINTS = "Partition", "Memory", "Checkpoints"
_TENSOR, _AMP = "Tensor parallelism", "Mixed precision and fused optimizers"
_HALF = "shardwright.optimizer.half_precision:HalfPrecision"
_KINDS = ("mp", "dp", "pp", "tp", "rdp")

SYMBOLS: tuple[Symbol, ...] = (
    Symbol("smp", _START, path=SMP, here="import shardwright as smp", differs="All of `shardwright` is there too."),
    Symbol("smp.init", _START, "(config=None)"),
    Symbol("smp.is_initialized", _START, "()"),
    Symbol("smp.is_tracing", _START, "()"),
    Symbol("smp.state", _START),
    Symbol("smp.state.cfg", _START, made="state"),
    Symbol("smp.state_mod.state", _START, here="smp.state"),
    Symbol("smp.state.module_manager.translate_functions", _START, made="state"),
    Symbol(
        "smdistributed.modelparallel.__version__",
        _START,
        path="smdistributed.modelparallel:__version__",
        here="smp.__version__",
        differs="1.15.0, the last version of the interface that is here.",
    ),
    Symbol(
        "smdistributed.modelparallel.torch.exceptions",
        _START,
        path=f"{SMP}.exceptions",
        here="smp.ShardwrightError",
        differs="See below.",
    ),
    Symbol(
        "smdistributed.modelparallel.backend.exceptions",
        _START,
        path="smdistributed.modelparallel.backend.exceptions",
        here="smp.ShardwrightError",
        differs="Both modules have all exception classes of this library; the names of the original's are not public.",
    ),
    *(Symbol(f"smp.{name}", _RANKS, "()") for name in ("rank", "size", "local_rank", "local_size")),
    *(Symbol(f"smp.{kind}_{what}", _RANKS, "()") for what in ("rank", "size") for kind in _KINDS),
    *(Symbol(f"smp.get_{kind}_group", _RANKS, "()") for kind in _KINDS),
    *(Symbol(f"smp.get_{kind}_process_group", _RANKS, "()") for kind in ("world", *_KINDS)),
    *(
        Symbol(f"smp.{prefix}{name}", _OBJECTS)
        for prefix in ("CommGroup.", "")
        for name in ("WORLD", "MP_GROUP", "DP_GROUP", "PP_GROUP", "TP_GROUP", "RDP_GROUP")
    ),
    *(Symbol(f"smp.RankType.{name}_RANK", _OBJECTS) for name in ("WORLD", "MP", "DP", "PP", "TP", "RDP")),
    Symbol("smp.broadcast", _OBJECTS, "(obj, group)"),
    Symbol("smp.send", _OBJECTS, "(obj, dest_rank, rank_type)"),
    Symbol(
        "smp.recv_from",
        _OBJECTS,
        "(src_rank, rank_type)",
        differs="Objects cross without pickle: containers, tensors and types that `smp.register_type` names.",
    ),
    Symbol("smp.allgather", _OBJECTS, "(obj, group)"),
    Symbol("smp.barrier", _OBJECTS, "(group=WORLD)"),
    Symbol("smp.dp_barrier", _OBJECTS, "()"),
    Symbol("smp.mp_barrier", _OBJECTS, "()"),
    Symbol(
        "smp.step",
        _STEPS,
        "(*, non_split_inputs=(), input_split_axes=None, detach_outputs=True)",
        differs="Arguments of the called form are keyword arguments.",
    ),
    Symbol(
        "smp_slice",
        _STEPS,
        path="shardwright.step.split:Splitter",
        differs="A method `smp_slice(num_mb, mb, axis)` of an argument splits it.",
    ),
    Symbol("smp.StepOutput.outputs", _STEPS),
    *(Symbol(f"smp.StepOutput.{name}", _STEPS, "()") for name in ("reduce_mean", "reduce_sum", "concat", "stack")),
    Symbol("smp.StepOutput.detach", _STEPS, "()", differs="Returns a `StepOutput`, also with one microbatch."),
    Symbol("smp.StepOutput.merge", _STEPS, refused="of TensorFlow only: `.concat()`, `.stack()`"),
    Symbol("smp.StepOutput.accumulate", _STEPS, refused="of TensorFlow only: `.reduce_mean()`, `.reduce_sum()`"),
    Symbol(
        "smp.DistributedModel",
        _MODEL,
        '(module, trace_device="gpu", trace_execution_times=False, overlapping_allreduce=True, '
        "backward_passes_per_step=1, average_grads_across_microbatches=True, bucket_cap_mb=25, "
        "trace_memory_usage=False, broadcast_buffers=True, find_unused_parameters=False, "
        "gradient_as_bucket_view=False)",
        differs="There may be several. Distributed modules start from the weights of those that they replace. "
        "`find_unused_parameters` has no effect: they are always found.",
    ),
    Symbol("smp.model.DistributedModel", _MODEL),
    Symbol("smp.DistributedModel.module", _MODEL, made="model"),
    Symbol("smp.DistributedModel.get_module", _MODEL, "()"),
    Symbol("smp.DistributedModel.partitioned", _MODEL),
    Symbol("smp.DistributedModel.backward", _MODEL, "(tensors, grad_tensors=None)"),
    *(
        Symbol(f"smp.DistributedModel.local_{name}", _MODEL, "()")
        for name in ("parameters", "named_parameters", "buffers", "named_buffers", "modules", "named_modules")
    ),
    Symbol("smp.DistributedModel.local_state_dict", _MODEL, "()"),
    Symbol("smp.DistributedModel.state_dict", _MODEL, "(gather_to_rank0=False)"),
    Symbol("smp.DistributedModel.load_state_dict", _MODEL, "(state_dict, strict=True, same_partition_load=False)"),
    Symbol("smp.DistributedModel.register_post_partition_hook", _MODEL, "(hook)"),
    Symbol("smp.DistributedModel.register_post_step_hook", _MODEL, "(hook)"),
    Symbol(
        "smp.DistributedModel.cpu",
        _MODEL,
        "()",
        differs="Refused for models with distributed modules or sharded parameters, which compute only together; "
        "`state_dict()` is whole for them.",
    ),
    Symbol(
        "smp.DistributedModel.join",
        _MODEL,
        "()",
        differs="Refused with `shard_optimizer_state` and `sharded_data_parallel_degree`: a rank without batches "
        "would not update its share.",
    ),
    Symbol("smp.DistributedModel.register_comm_hook", _MODEL, "(state, hook)"),
    Symbol("smp.DistributedModel._register_comm_hook", _MODEL, "(state, hook)"),
    Symbol("smp.DistributedModel.distributed_modules", _MODEL, "()"),
    *(
        Symbol(f"smp.DistributedModel.is_{what}", _MODEL, "(parameter)")
        for what in (
            "distributed_parameter",
            "distributed_buffer",
            "scaled_batch_parameter",
            "scaled_batch_buffer",
        )
    ),
    Symbol("smp.DistributedModel.default_reducer_named_parameters", _MODEL, "()"),
    Symbol("smp.DistributedModel.scaled_batch_reducer_named_parameters", _MODEL, "()"),
    *(
        Symbol(name, _MODEL, made="sharded parameter", differs=differs)
        for name, differs in (
            ("ds_shape", "Of all parameters with sharded data parallelism, between steps."),
            ("ds_numel", ""),
            ("ds_tensor", "This rank's shard; all of a parameter that stays whole."),
        )
    ),
    Symbol(
        "_smp_is_partial",
        _MODEL,
        path="shardwright.model.state_dict:PARTIAL_KEY",
        differs="A key of state dicts.",
    ),
    Symbol(
        "super()._orig_forward",
        _MODEL,
        refused="`super().forward()` works here, and modules have no other method for it",
    ),
    Symbol(
        "smp.DistributedOptimizer",
        _OPTIMIZER,
        "(optimizer, static_loss_scale=1.0, dynamic_loss_scale=False, dynamic_loss_args=None)",
        path=f"{SMP}._optimizer:wrap",
        differs="A loss scale without `fp16` has no effect, which is logged; from `shardwright` itself it is an error.",
    ),
    *(
        Symbol(
            f"dynamic_loss_args: {name}", _OPTIMIZER, path=f"shardwright.half_precision.loss_scaler:_DEFAULTS.{name}"
        )
        for name in (
            "init_scale",
            "scale_factor",
            "scale_window",
            "min_scale",
            "delayed_shift",
            "consecutive_hysteresis",
        )
    ),
    Symbol(
        "smp.DistributedOptimizer.state_dict",
        _OPTIMIZER,
        "()",
        differs="Whole with `shard_optimizer_state`, too. Refused for distributed modules, as there; "
        "`smp.save_checkpoint` saves their state.",
    ),
    Symbol("smp.DistributedOptimizer.load_state_dict", _OPTIMIZER, "(state_dict)"),
    Symbol("smp.DistributedOptimizer.local_state_dict", _OPTIMIZER, "(gather_if_shard=True)"),
    Symbol("smp.DistributedOptimizer.orig_state_dict", _OPTIMIZER, "()"),
    *(
        Symbol(f"optimizer.{name}", _OPTIMIZER, signature, path=f"{_HALF}.{name}")
        for name, signature in (
            ("optimizer", None),
            ("loss_scale", None),
            ("loss_scaler", None),
            ("clip_master_grads", "(max_norm, norm_type=2)"),
            ("zero_grad", "(set_to_none=True)"),
            ("update_master_grads", "()"),
            ("init_master_params", "()"),
            ("reload_model_params", "()"),
        )
    ),
    Symbol("optimizer.overflow", _OPTIMIZER, made="float16 optimizer"),
    *(
        Symbol(f"optimizer.{name}", _OPTIMIZER, made=made, differs=differs)
        for made in ("sharded optimizer",)
        for name, differs in (
            ("fp16_groups", "The parameters of each group on this rank, whatever their dtype."),
            ("fp16_partitioned_groups", "What this rank holds of each of them."),
            ("fp16_partitioned_groups_flat", "The same in one tensor for each group; a copy."),
            ("fp32_partitioned_groups_flat", "The same of master weights; a copy."),
        )
    ),
    Symbol(
        "optimizer._global_grad_norm",
        _OPTIMIZER,
        made="sharded optimizer",
        differs="After `optimizer.step()` with sharded data parallelism.",
    ),
    Symbol(
        "optimizer.backward",
        _OPTIMIZER,
        refused="of scripts before version 1.10, whose optimizer was the script's own: `model.backward(loss)`",
    ),
    Symbol("smp.tensor_parallelism", _TENSOR, "(enabled=True)"),
    Symbol("smp.set_tensor_parallelism", _TENSOR, "(module, enabled=True)"),
    Symbol("smp.model_creation", _TENSOR, "(tensor_parallelism=False, dtype=None)"),
    Symbol("smp.tp_register", _TENSOR, "(dist_module, init_hook=None, forward_hook=None, return_hook=None)"),
    Symbol(
        "smp.tp_register_with_module",
        _TENSOR,
        "(module_cls, dist_module, init_hook=None, forward_hook=None, return_hook=None)",
    ),
    Symbol(
        "smp.utils.get_distribution_axis",
        _TENSOR,
        "(parameter)",
        differs="None where tensor-parallel ranks have the whole tensor, or one of them has it. Not documented there.",
    ),
    Symbol(
        "smp.utils.rmsg", _OBJECTS, "(message)", differs="Not documented there: the rank stands before the message."
    ),
    *(
        Symbol(f"smp.amp.{name}", _AMP, signature)
        for name, signature in (
            ("GradScaler", "(init_scale=65536.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000)"),
        )
    ),
    *(Symbol(f"smp.optimizers.{name}", _AMP, "(params)") for name in ("FusedAdam", "FusedLamb", "FusedNovoGrad")),
    Symbol("smp.optimizers.FusedLAMB", _AMP, "(params)", here="smp.optimizers.FusedLamb"),
    Symbol("smp.partition", _PARTITION, "(i)"),
    Symbol("smp.set_partition", _PARTITION, "(module, i)"),
    Symbol(
        "smp.delay_param_initialization",
        _MEMORY,
        "(enabled=True)",
        differs="Delayed parameters get the same numbers as without a delay.",
    ),
    Symbol(
        "smp.set_activation_checkpointing",
        _MEMORY,
        '(module, preserve_rng_state=True, pack_args_as_tuple=False, strategy="each")',
    ),
    Symbol(
        "smdistributed.modelparallel.torch.patches.checkpoint.checkpoint",
        _MEMORY,
        "(module, *args, preserve_rng_state=True)",
        path=f"{SMP}.patches.checkpoint:checkpoint",
        here="smp.checkpoint",
    ),
    Symbol(
        "smdistributed.modelparallel.torch.patches.checkpoint.checkpoint_sequential",
        _MEMORY,
        '(sequential, input, strategy="each", preserve_rng_state=True, pack_args_as_tuple=False)',
        path=f"{SMP}.patches.checkpoint:checkpoint_sequential",
        here="smp.checkpoint_sequential",
    ),
    Symbol(
        "smp.save",
        _CHECKPOINTS,
        here="smp.save(obj, f, partial=True, pickle_module=None, pickle_protocol=None, *, v3=False)",
        signature="(obj, f, partial=True, pickle_module=pickle, pickle_protocol=2, v3=False)",
        differs="Files are in the format of safetensors: `pickle_protocol` has no effect, and a `pickle_module` other "
        "than `pickle` is refused. What is not data is left out with a word. In the import path "
        "of the original, a partial file has its older name `f_{mp_rank}` too.",
    ),
    Symbol(
        "smp.load",
        _CHECKPOINTS,
        here="smp.load(f, map_location=None, partial=True, *, pickle_module=None, back_compat=False, v3=False)",
        signature="(f, map_location=None, pickle_module=pickle, pickle_load_args=None, partial=True, "
        "back_compat=False)",
        differs="Reads its own files, and those of `torch.save` that `weights_only=True` takes. `pickle_load_args` "
        "are refused.",
    ),
    Symbol(
        "smp.save_checkpoint",
        _CHECKPOINTS,
        "(path, tag, partial=True, model=None, optimizer=None, user_content=None, translate_if_full=True, "
        "num_kept_partial_checkpoints=None)",
        differs="Partial checkpoints have another layout on disk, and load under other degrees and partitions.",
    ),
    Symbol(
        "smp.resume_from_checkpoint",
        _CHECKPOINTS,
        "(path, tag=None, partial=True, strict=True, load_optimizer=True, load_sharded_optimizer_state=True, "
        "translate_function=None)",
        differs="Partial checkpoints of the original library cannot be read; full ones can.",
    ),
    *(
        Symbol(
            f"smdistributed.modelparallel.test.torch.utils.{name}",
            _CHECKPOINTS,
            signature,
            path=f"smdistributed.modelparallel.test.torch.utils:{name}",
            differs="Not documented there: of a whole state dict in a file, without pickle.",
        )
        for name, signature in (("dump_model", "(model, path)"), ("verify", "(model, path)"))
    ),
    *MODULES,
)
