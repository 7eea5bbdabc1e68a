"""The command line of the language models' script, the keys that it always gives, and the models' configuration."""

import argparse

from transformers import GPT2Config, GPTNeoConfig

MODELS = ("gpt2", "gptneo")


def parse_args(arguments=None):
    parser = argparse.ArgumentParser()
    models = parser.add_argument_group("model")
    models.add_argument("--model_type", default="gpt2", choices=MODELS)
    models.add_argument("--vocab_size", type=int, default=64)
    models.add_argument("--max_context_width", type=int, default=16)
    models.add_argument("--hidden_width", type=int, default=32)
    models.add_argument("--num_layers", type=int, default=4)
    models.add_argument("--num_heads", type=int, default=4)
    models.add_argument("--resid_pdrop", type=float, default=0.0)
    models.add_argument("--embd_pdrop", type=float, default=0.0)
    models.add_argument("--attn_pdrop", type=float, default=0.0)
    models.add_argument("--beta1", type=float, default=0.9)
    models.add_argument("--beta2", type=float, default=0.95)
    models.add_argument("--initializer_range", type=float, default=0.02)
    training = parser.add_argument_group("training")
    training.add_argument("--seed", type=int, default=12345)
    training.add_argument("--same_seed", type=int, default=0)
    training.add_argument("--fp16", type=int, default=0)
    training.add_argument("--bf16", type=int, default=0)
    training.add_argument("--grad_clip", type=float, default=1.0)
    training.add_argument("--max_steps", type=int, default=6)
    training.add_argument("--train_batch_size", type=int, default=8, help="of all data-parallel ranks together")
    training.add_argument("--gradient_accumulation", type=int, default=1)
    training.add_argument("--lr", type=float, default=0.01)
    training.add_argument("--min_lr", type=float, default=0.001)
    training.add_argument("--warmup", type=float, default=0.1)
    training.add_argument("--weight_decay", type=float, default=0.1)
    training.add_argument("--activation_checkpointing", type=int, default=1)
    training.add_argument("--activation_strategy", type=str, default="each")
    training.add_argument("--validation_batches", type=int, default=2)
    training.add_argument("--logging_freq", type=int, default=1)
    io = parser.add_argument_group("io")
    io.add_argument("--checkpoint_dir", type=str, required=True)
    io.add_argument("--checkpoint_freq", type=int, default=3)
    io.add_argument("--num_kept_checkpoints", type=int, default=5)
    io.add_argument("--load_partial", type=int, default=0)
    io.add_argument("--load_full", type=int, default=0)
    io.add_argument("--save_final_full_model", type=int, default=1)
    library = parser.add_argument_group("library")
    library.add_argument("--pipeline_parallel_degree", type=int, default=1)
    library.add_argument("--tensor_parallel_degree", type=int, default=1)
    library.add_argument("--sharded_data_parallel_degree", type=int, default=1)
    library.add_argument("--microbatches", type=int, default=1)
    library.add_argument("--active_microbatches", type=int, default=None)
    library.add_argument("--optimize", type=str, default="speed")
    library.add_argument("--placement_strategy", type=str, default="cluster")
    library.add_argument("--prescaled_batch", type=int, default=0)
    library.add_argument("--shard_optimizer_state", type=int, default=0)
    library.add_argument("--offload_activations", type=int, default=0)
    library.add_argument("--activation_loading_horizon", type=int, default=4)
    library.add_argument("--skip_tracing", type=int, default=0)
    library.add_argument("--query_key_layer_scaling", type=int, default=1)
    library.add_argument("--fused_softmax", type=int, default=1)
    library.add_argument("--fused_dropout", type=int, default=0)
    library.add_argument("--fused_bias_gelu", type=int, default=1)
    library.add_argument("--static_mode", type=int, default=0)
    library.add_argument("--fast_mode", type=int, default=0)
    library.add_argument("--delayed_param", type=int, default=1)
    library.add_argument("--use_distributed_transformer", type=int, default=1)
    library.add_argument("--checkpoint_sublayers", type=int, default=0)
    library.add_argument("--match_weights", type=int, default=0)
    library.add_argument("--manual_partition", type=int, default=0)
    library.add_argument("--attention_in_fp32", type=int, default=0)
    library.add_argument("--residual_addition_in_fp32", type=int, default=0)
    library.add_argument("--flash_attention", type=int, default=1)
    library.add_argument("--ddp_dist_backend", type=str, default="auto")
    library.add_argument("--sdp_reduce_bucket_size", type=int, default=100000000)
    library.add_argument("--sdp_param_persistence_threshold", type=int, default=64)
    library.add_argument("--sdp_max_live_parameters", type=int, default=10000000)
    library.add_argument("--sdp_hierarchical_allgather", type=int, default=0)
    library.add_argument("--sdp_gradient_clipping", type=float, default=1.0)
    return parser.parse_args(arguments)


def smp_config_of(args):
    """Always all of the keys, whatever the degrees are."""
    if args.fp16 and args.bf16:
        raise ValueError("FP16 and BF16 cannot be simultaneously enabled.")
    config = {
        "ddp": True,
        "ddp_dist_backend": args.ddp_dist_backend,
        "tensor_parallel_degree": args.tensor_parallel_degree,
        "pipeline_parallel_degree": args.pipeline_parallel_degree,
        "microbatches": args.microbatches,
        "shard_optimizer_state": args.shard_optimizer_state > 0,
        "prescaled_batch": args.prescaled_batch > 0,
        "_match_weights": args.match_weights > 0,
        "fp16": args.fp16 > 0,
        "bf16": args.bf16 > 0,
        "offload_activations": args.offload_activations > 0,
        "delayed_parameter_initialization": args.delayed_param > 0,
        "optimize": args.optimize,
        "placement_strategy": args.placement_strategy,
        "activation_loading_horizon": args.activation_loading_horizon,
        "skip_tracing": args.skip_tracing > 0,
        "auto_partition": not args.manual_partition,
        "default_partition": 0,
        "static_mode": args.static_mode > 0,
        "fast_mode": args.fast_mode > 0,
        "sharded_data_parallel_degree": args.sharded_data_parallel_degree,
        "sdp_reduce_bucket_size": args.sdp_reduce_bucket_size,
        "sdp_param_persistence_threshold": args.sdp_param_persistence_threshold,
        "sdp_max_live_parameters": args.sdp_max_live_parameters,
        "sdp_hierarchical_allgather": args.sdp_hierarchical_allgather > 0,
        "sdp_gradient_clipping": args.sdp_gradient_clipping,
    }
    if args.active_microbatches is not None:
        config["active_microbatches"] = args.active_microbatches
    if args.checkpoint_sublayers:
        config["checkpoint_attentions"] = False
    return config


def model_config_of(args):
    """The configuration of the model, of transformers."""
    if args.model_type == "gpt2":
        return GPT2Config(
            vocab_size=args.vocab_size,
            n_positions=args.max_context_width,
            n_embd=args.hidden_width,
            n_layer=args.num_layers,
            n_head=args.num_heads,
            n_inner=None,
            activation_function="gelu_new",
            resid_pdrop=args.resid_pdrop,
            embd_pdrop=args.embd_pdrop,
            attn_pdrop=args.attn_pdrop,
            layer_norm_epsilon=1e-05,
            initializer_range=args.initializer_range,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
        )
    return GPTNeoConfig(
        vocab_size=args.vocab_size,
        max_position_embeddings=args.max_context_width,
        hidden_size=args.hidden_width,
        num_layers=args.num_layers,
        num_heads=args.num_heads,
        attention_types=[[["global", "local"], args.num_layers // 2]],
        window_size=args.max_context_width // 2,
        activation_function="gelu_new",
        resid_dropout=args.resid_pdrop,
        embed_dropout=args.embd_pdrop,
        attention_dropout=args.attn_pdrop,
        layer_norm_epsilon=1e-05,
        initializer_range=args.initializer_range,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
