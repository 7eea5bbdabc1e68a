"""Trains GPT-2 with every option of the original library on the command line, by its import path."""

import argparse
import json

import smdistributed.modelparallel.torch as smp
import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel


def flag(text: str) -> bool:
    """0 or 1, as launchers pass booleans."""
    return bool(int(text))


#: The keys of the configuration, and how the command line has them.
CONFIGURATION = {
    "pipeline_parallel_degree": int,
    "partitions": int,
    "microbatches": int,
    "pipeline": str,
    "optimize": str,
    "placement_strategy": str,
    "auto_partition": flag,
    "default_partition": int,
    "memory_weight": float,
    "ddp": flag,
    "ddp_port": int,
    "ddp_dist_backend": str,
    "active_microbatches": int,
    "deterministic_server": flag,
    "tensor_parallel_degree": int,
    "fp16": flag,
    "bf16": flag,
    "fp16_params": flag,
    "shard_optimizer_state": flag,
    "offload_activations": flag,
    "activation_loading_horizon": int,
    "prescaled_batch": flag,
    "skip_tracing": flag,
    "sharded_data_parallel_degree": int,
    "sdp_reduce_bucket_size": int,
    "sdp_param_persistence_threshold": int,
    "sdp_max_live_parameters": int,
    "sdp_hierarchical_allgather": flag,
    "sdp_gradient_clipping": float,
    "delayed_parameter_initialization": flag,
    "static_mode": flag,
    "fast_mode": flag,
    "checkpoint_attentions": flag,
    "load_partition": flag,
    "partition_file": str,
    "overlapping_allreduce": flag,
    "_match_weights": flag,
    "_fp32_grad_accumulation": flag,
    "_prescaled_batch": flag,
}
#: The arguments of smp.DistributedModel.
MODEL = {
    "trace_device": str,
    "trace_execution_times": flag,
    "backward_passes_per_step": int,
    "average_grads_across_microbatches": flag,
    "bucket_cap_mb": int,
    "trace_memory_usage": flag,
    "broadcast_buffers": flag,
    "find_unused_parameters": flag,
    "gradient_as_bucket_view": flag,
}
#: Options of distributed transformer layers.
LAYERS = {
    "attention_in_fp32": flag,
    "fp32_residual_addition": flag,
    "fused_softmax": flag,
    "fused_bias_gelu": flag,
    "fused_dropout": flag,
    "flash_attention": flag,
    "query_key_layer_scaling": flag,
    "distribute_embedding": flag,
    "zero_init": flag,
}


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, kind in {**CONFIGURATION, **MODEL, **LAYERS}.items():
        parser.add_argument(f"--{name}", type=kind)
    parser.add_argument("--max_context_width", type=int, default=32)
    parser.add_argument("--hidden_width", type=int, default=32)
    parser.add_argument("--num_layers", type=int, default=4)
    parser.add_argument("--num_heads", type=int, default=4)
    parser.add_argument("--vocab_size", type=int, default=64)
    parser.add_argument("--train_batch_size", type=int, default=16, help="sequences of a step, of all ranks together")
    parser.add_argument("--max_steps", type=int, default=6)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--weight_decay", type=float, default=0.1)
    parser.add_argument("--grad_clip", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--activation_checkpointing", type=flag, default=False)
    parser.add_argument("--activation_strategy", default="each", help="each, contiguous or group_2, group_3, ...")
    parser.add_argument("--manual_partition", type=flag, default=False)
    parser.add_argument("--static_loss_scale", type=float)
    parser.add_argument("--dynamic_loss_scale", type=flag, default=True)
    parser.add_argument("--init_loss_scale", type=float, default=2.0**16)
    parser.add_argument("--checkpoint_dir", help="where checkpoints are")
    parser.add_argument("--checkpoint_freq", type=int, default=0, help="save after every so many steps")
    parser.add_argument("--num_kept_checkpoints", type=int, default=2)
    parser.add_argument("--load_partial", type=flag, default=False, help="resume from the newest partial checkpoint")
    parser.add_argument("--load_full", help="start from the weights of this full checkpoint")
    parser.add_argument("--save_final_full_model", type=flag, default=False)
    return parser.parse_args(arguments)


def given(args: argparse.Namespace, names: dict) -> dict:
    """The options of these names that the command line has."""
    return {name: getattr(args, name) for name in names if getattr(args, name) is not None}


def make_model(args: argparse.Namespace) -> torch.nn.Module:
    config = GPT2Config(
        vocab_size=args.vocab_size,
        n_positions=args.max_context_width,
        n_embd=args.hidden_width,
        n_layer=args.num_layers,
        n_head=args.num_heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
        loss_type="ForCausalLM",
    )
    return GPT2LMHeadModel(config)


def batch_of_step(args: argparse.Namespace, step: int) -> torch.Tensor:
    """Sequences that count on by a stride of their own; the same on all ranks, which take their parts."""
    random = torch.Generator().manual_seed(1000 * args.seed + step)
    first, stride = torch.randint(args.vocab_size, (2, args.train_batch_size, 1), generator=random)
    return (first + (stride % 4 + 1) * torch.arange(args.max_context_width)) % args.vocab_size


def parameter_groups(model: torch.nn.Module, args: argparse.Namespace) -> list[dict]:
    parameters = list(model.named_parameters())
    # Distributed layers call a normalization "layernorm", those of transformers "ln_1".
    others = [each for name, each in parameters if name.endswith("bias") or "ln_" in name or "layernorm" in name]
    known = {id(each) for each in others}
    decayed = [each for _, each in parameters if id(each) not in known]
    return [{"params": decayed, "weight_decay": args.weight_decay}, {"params": others, "weight_decay": 0.0}]


def learning_rate(step: int) -> float:
    """The factor of the learning rate, which rises at first."""
    return min(1.0, (step + 1) / 4)


@smp.step
def train_step(model, ids, attention_mask):
    loss = model(input_ids=ids, attention_mask=attention_mask, labels=ids)["loss"]
    model.backward(loss)
    return loss


@smp.step
def eval_step(model, ids, attention_mask):
    return model(input_ids=ids, attention_mask=attention_mask, labels=ids)["loss"]


def over_replicas(loss: torch.Tensor) -> float:
    """The mean of a loss over the ranks that have different samples."""
    loss = loss.detach().clone()
    if smp.state.cfg.ddp:
        dist.all_reduce(loss, group=smp.get_dp_process_group())
        loss /= smp.dp_size()
    return loss.item()


def main() -> None:
    args = parse_arguments()
    # Values of the environment's SM_HP_MP_PARAMETERS go before these.
    smp.init(given(args, CONFIGURATION))
    cuda = torch.cuda.is_available()
    torch.manual_seed(args.seed)
    with smp.model_creation(
        tensor_parallelism=smp.tp_size() > 1,
        dtype=torch.float16 if args.fp16_params else torch.get_default_dtype(),
        **given(args, LAYERS),
    ):
        model = make_model(args)
    if cuda:
        torch.cuda.set_device(smp.local_rank())
    device = torch.device("cuda" if cuda else "cpu")

    model = smp.DistributedModel(model, **given(args, MODEL))
    module = model.get_module()
    # Layers that tensor parallelism has replaced have the name of those of smp.nn.DistributedTransformer.
    distributed = smp.tp_size() > 1
    layers = module.transformer.seq_layers if distributed else module.transformer.h
    if args.manual_partition:
        per_stage = -(-len(layers) // smp.pp_size())
        for index, layer in enumerate(layers.children()):
            smp.set_partition(layer, index // per_stage)
    if args.activation_checkpointing and distributed:
        smp.set_activation_checkpointing(layers, strategy=args.activation_strategy)
    elif args.activation_checkpointing:
        for layer in layers.children():
            smp.set_activation_checkpointing(layer, preserve_rng_state=True)
    optimizer = torch.optim.AdamW(parameter_groups(model, args), lr=args.lr, betas=(0.9, 0.95))
    half = smp.state.cfg.fp16 or smp.state.cfg.bf16
    if smp.state.cfg.fp16:
        dynamic = args.static_loss_scale is None and args.dynamic_loss_scale
        optimizer = smp.DistributedOptimizer(
            optimizer,
            static_loss_scale=args.static_loss_scale,
            dynamic_loss_scale=dynamic,
            dynamic_loss_args={
                "init_scale": args.init_loss_scale,
                "scale_window": 1000,
                "min_scale": 1,
                "delayed_shift": 2,
            }
            if dynamic
            else None,
        )
    else:
        optimizer = smp.DistributedOptimizer(optimizer)
    scheduled = optimizer.optimizer if half else optimizer
    schedule = torch.optim.lr_scheduler.LambdaLR(scheduled, learning_rate)

    first_step = 0
    if args.load_partial:
        content = smp.resume_from_checkpoint(args.checkpoint_dir, partial=True)
        first_step = content["total_steps"]
        schedule.load_state_dict(content["lr_scheduler"])
    elif args.load_full:
        smp.resume_from_checkpoint(args.checkpoint_dir, tag=args.load_full, partial=False)

    # With a prescaled batch, the ranks of a TP_GROUP have the same samples.
    prescaled = smp.state.cfg.prescaled_batch
    place, places = (smp.rdp_rank(), smp.rdp_size()) if prescaled else (smp.dp_rank(), smp.dp_size())
    losses, norms = [], []
    for step in range(first_step, args.max_steps):
        ids = batch_of_step(args, step).chunk(places)[place].to(device)
        attention_mask = torch.ones_like(ids)
        optimizer.zero_grad(set_to_none=True)
        loss = train_step(model, ids, attention_mask).reduce_mean()
        losses.append(over_replicas(loss))
        if half and smp.state.cfg.sharded_data_parallel_degree == 1:
            norms.append(optimizer.clip_master_grads(args.grad_clip))
        optimizer.step()
        if not (smp.state.cfg.fp16 and optimizer.overflow):
            schedule.step()
        if args.checkpoint_freq and (step + 1) % args.checkpoint_freq == 0:
            smp.save_checkpoint(
                args.checkpoint_dir,
                tag=f"total_steps{step + 1}",
                partial=True,
                model=model,
                optimizer=optimizer,
                user_content={"total_steps": step + 1, "lr_scheduler": schedule.state_dict()},
                num_kept_partial_checkpoints=args.num_kept_checkpoints,
            )

    model.eval()
    with torch.no_grad():
        ids = batch_of_step(args, args.max_steps).chunk(places)[place].to(device)
        evaluated = over_replicas(eval_step(model, ids, torch.ones_like(ids)).reduce_mean())
    if args.save_final_full_model:
        smp.save_checkpoint(args.checkpoint_dir, tag="fullmodel.pt", partial=False, model=model)
    smp.barrier()

    own = sum(parameter.numel() for parameter in model.local_parameters())
    report = {
        "losses": losses,
        "evaluated": evaluated,
        "parameters_of_ranks": smp.allgather(own, smp.WORLD),
        "distributed_modules": len(list(model.distributed_modules())),
        "grad_norms": norms,
    }
    if smp.rank() == 0:
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
