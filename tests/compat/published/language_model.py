"""Trains GPT-2 or GPT-Neo as the public examples do, with their arguments always given; of an old import path."""

import json
import math
import os

import numpy as np
import smdistributed.modelparallel
import smdistributed.modelparallel.torch as smp
import torch
import torch.distributed as dist
import transformers
from smdistributed.modelparallel.torch.nn import FusedLayerNorm as LayerNorm
from smdistributed.modelparallel.torch.nn.huggingface.gpt2 import (
    translate_hf_state_dict_to_smdistributed_gpt2,
    translate_state_dict_to_hf_gpt2,
)
from smdistributed.modelparallel.torch.nn.huggingface.gptneo import (
    translate_hf_state_dict_to_smdistributed_gptneo,
    translate_state_dict_to_hf_gptneo,
)
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import AutoModelForCausalLM, set_seed

from tests.compat.published.arguments import model_config_of, parse_args, smp_config_of

TRANSLATIONS = {
    "gpt2": (translate_state_dict_to_hf_gpt2, translate_hf_state_dict_to_smdistributed_gpt2),
    "gptneo": (translate_state_dict_to_hf_gptneo, translate_hf_state_dict_to_smdistributed_gptneo),
}


class Sequences(Dataset):
    """Sequences that count on by a stride of their own."""

    def __init__(self, args, seed, samples):
        random = torch.Generator().manual_seed(seed)
        first, stride = torch.randint(args.vocab_size, (2, samples, 1), generator=random)
        self.ids = (first + (stride % 4 + 1) * torch.arange(args.max_context_width)) % args.vocab_size

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return self.ids[index], torch.ones(len(self.ids[index]), dtype=torch.long)


class DummyDataset(Dataset):
    """What the later stages of a pipeline get, which never look at it."""

    def __init__(self, length, width):
        self.batch = (torch.zeros(width, dtype=torch.long), torch.ones(width, dtype=torch.long))
        self.length = length

    def __getitem__(self, index):
        return self.batch

    def __len__(self):
        return self.length


def create_dataloader(args, seed, batches):
    """Each replica reads its part of every batch; only the first stage of a pipeline reads it."""
    prescaled = args.prescaled_batch > 0
    rank, size = (smp.rdp_rank(), smp.rdp_size()) if prescaled else (smp.dp_rank(), smp.dp_size())
    own = args.train_batch_size // size
    if smp.pp_rank() == 0:
        data = Sequences(args, seed, batches * args.train_batch_size)
        if smp.pp_size() > 1:
            smp.broadcast(len(data), smp.PP_GROUP)
    else:
        data = DummyDataset(smp.recv_from(0, smp.RankType.PP_RANK), args.max_context_width)
    indices = [batch * args.train_batch_size + rank * own + place for batch in range(batches) for place in range(own)]
    return DataLoader(
        torch.utils.data.Subset(data, indices), batch_size=own, num_workers=0, pin_memory=False, drop_last=True
    )


def get_param_groups_by_weight_decay(module):
    """Parameters that decay, and those that do not: of normalizations, and biases."""
    weight_decay, no_weight_decay = {"params": []}, {"params": [], "weight_decay": 0.0}
    known = set()
    for part in module.modules():
        if isinstance(part, (nn.LayerNorm, LayerNorm, smp.nn.DistributedLayerNorm)):
            for parameter in part._parameters.values():
                if parameter is not None and id(parameter) not in known:
                    no_weight_decay["params"].append(parameter)
                    known.add(id(parameter))
        else:
            for name, parameter in part._parameters.items():
                if parameter is not None and id(parameter) not in known:
                    (no_weight_decay if name == "bias" else weight_decay)["params"].append(parameter)
                    known.add(id(parameter))
    return weight_decay, no_weight_decay


class AnnealingLR:
    """A learning rate that rises and then falls, which is set in the groups."""

    def __init__(self, optimizer, args):
        self.optimizer, self.args, self.num_iters = optimizer, args, 0
        self.step(0)

    def get_lr(self):
        args, warm = self.args, max(1, int(self.args.warmup * 20))
        if self.num_iters < warm:
            return args.lr * (self.num_iters + 1) / warm
        return args.min_lr + (args.lr - args.min_lr) * 0.5 * (1 + math.cos(math.pi * self.num_iters / 40))

    def step(self, num_iters=None):
        self.num_iters = self.num_iters + 1 if num_iters is None else num_iters
        for group in self.optimizer.param_groups:
            group["lr"] = self.get_lr()

    def state_dict(self):
        return {"num_iters": self.num_iters, "lr": self.args.lr}

    def load_state_dict(self, state):
        self.step(state["num_iters"])


@smp.step
def train_step(model, input_ids, attention_mask, args):
    loss = model(input_ids=input_ids, attention_mask=attention_mask, labels=input_ids)["loss"]
    model.backward(loss)
    return loss


@smp.step
def test_step(model, input_ids, attention_mask):
    return model(input_ids=input_ids, attention_mask=attention_mask, labels=input_ids)["loss"]


def eval_model(model, loader, num_batches, device):
    model.eval()
    losses = []
    with torch.no_grad():
        for batch, (ids, mask) in enumerate(loader):
            if batch >= num_batches:
                break
            losses.append(test_step(model, ids.to(device), mask.to(device)).reduce_mean())
    loss = torch.stack(losses).mean()
    dist.all_reduce(loss, group=smp.get_dp_process_group())
    model.train()
    return loss.item() / smp.dp_size()


def buffer_sizes(optimizer):
    """What the examples' helpers read of sharded parameters: offsets in the flat buffers, and the buffers' sizes."""
    offsets, sizes = {}, []
    for number, group in enumerate(optimizer.fp16_groups):
        offset = 0
        for parameter in group:
            offsets[id(parameter)] = (number, offset)
            offset += parameter.ds_tensor.numel()
        sizes.append(offset)
    assert sizes == [flat.numel() for flat in optimizer.fp32_partitioned_groups_flat]
    assert sum(parameter.ds_numel for group in optimizer.fp16_groups for parameter in group) >= sum(sizes)
    return sizes


def main():
    args = parse_args()
    config = smp_config_of(args)
    if args.manual_partition:
        config["auto_partition"] = False
    smp.init(config)
    assert smdistributed.modelparallel.__version__ >= "1.1"
    if smp.rank() == 0:
        print("Arguments:", vars(args), flush=True)
        print("Transformers version:", transformers.__version__, flush=True)
        print(f"smp config: fp16 {smp.state.cfg.fp16}, partitions {smp.state.cfg.partitions}", flush=True)
    model_config = model_config_of(args)
    if args.model_type == "gpt2" and hasattr(smp.state.cfg, "fp16"):
        assert smp.state.cfg.fp16 == (args.fp16 > 0)
    # The data's seed is one for all; the weights' is that of a replica.
    set_seed(args.seed)
    if args.fp16:
        dtype = torch.float16
    elif args.bf16:
        dtype = torch.bfloat16
    else:
        dtype = torch.get_default_dtype()
    with smp.model_creation(
        tensor_parallelism=smp.tp_size() > 1 or args.use_distributed_transformer > 0,
        dtype=dtype,
        attention_in_fp32=args.attention_in_fp32 > 0,
        query_key_layer_scaling=args.query_key_layer_scaling > 0 and args.fp16 > 0,
        fused_softmax=args.fused_softmax > 0,
        fused_dropout=args.fused_dropout > 0,
        fused_bias_gelu=args.fused_bias_gelu > 0,
        flash_attention=args.flash_attention > 0,
    ):
        model = AutoModelForCausalLM.from_config(model_config)
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(smp.local_rank())
    device = torch.device("cuda" if cuda else "cpu")
    if not args.same_seed:
        set_seed(args.seed + smp.tp_rank())
    model = smp.DistributedModel(
        model,
        trace_device="gpu",
        backward_passes_per_step=args.gradient_accumulation,
        average_grads_across_microbatches=True,
    )
    m = model.get_module()
    transformer_layers = m.transformer.seq_layers if args.use_distributed_transformer else m.transformer.h
    if args.manual_partition:
        per_stage = -(-len(transformer_layers) // smp.pp_size())
        for number, layer in enumerate(transformer_layers.children()):
            smp.set_partition(layer, number // per_stage)
    if not args.same_seed:
        set_seed(args.seed)
    param_groups = get_param_groups_by_weight_decay(m)
    optimizer = torch.optim.AdamW(
        param_groups, betas=(args.beta1, args.beta2), lr=args.lr, weight_decay=args.weight_decay
    )
    if args.activation_checkpointing:
        if args.use_distributed_transformer or smp.tp_size() > 1:
            if args.checkpoint_sublayers:
                for layer in transformer_layers.children():
                    smp.set_activation_checkpointing(layer.attention)
                    smp.set_activation_checkpointing(layer.output)
            else:
                smp.set_activation_checkpointing(transformer_layers, strategy=args.activation_strategy)
        else:
            for layer in transformer_layers.children():
                smp.set_activation_checkpointing(layer)
    optimizer = smp.DistributedOptimizer(
        optimizer,
        static_loss_scale=None,
        dynamic_loss_scale=True,
        dynamic_loss_args={"scale_window": 1000, "min_scale": 1, "delayed_shift": 2, "init_scale": 2**14},
    )
    lr_scheduler = AnnealingLR(optimizer.optimizer if smp.state.cfg.fp16 else optimizer, args)

    start_step, user_content = 0, {}
    if args.load_full or args.load_partial:
        partial = not args.load_full
        user_content = smp.resume_from_checkpoint(
            args.checkpoint_dir, tag=None if partial else "fullmodel.pt", partial=partial
        )
        if partial:
            start_step = user_content["total_steps"]
            lr_scheduler.load_state_dict(user_content["lr_scheduler"])
            saved_config = type(model_config).from_dict(user_content["model_config"])
            assert saved_config.to_dict() == model_config.to_dict()
            assert user_content["cli_args"].max_context_width == args.max_context_width
    if args.sharded_data_parallel_degree > 1:
        print(f"buffers of rank {smp.rank()}: {buffer_sizes(optimizer)}", flush=True)

    losses, norms = [], []
    loader = create_dataloader(args, args.seed, args.max_steps * args.gradient_accumulation)
    validation = create_dataloader(args, args.seed + 1, args.validation_batches)
    model.train()
    total_steps, start_index = start_step, user_content.get("start_train_path_index", 0)
    assert start_index == 0
    for index, (input_ids, attention_mask) in enumerate(loader):
        if index < start_step * args.gradient_accumulation:
            continue
        if index % args.gradient_accumulation == 0:
            optimizer.zero_grad(set_to_none=True)
        input_ids, attention_mask = input_ids.to(device), attention_mask.to(device)
        loss = train_step(model, input_ids, attention_mask, args).reduce_mean()
        if index % args.gradient_accumulation == args.gradient_accumulation - 1:
            if args.fp16 and args.sharded_data_parallel_degree == 1:
                norms.append(float(optimizer.clip_master_grads(args.grad_clip)))
            optimizer.step()
            if args.sharded_data_parallel_degree > 1:
                norms.append(float(optimizer._global_grad_norm))
            if not (args.fp16 and optimizer.overflow):
                lr_scheduler.step()
            total_steps += 1
            if args.logging_freq > 0 and total_steps % args.logging_freq == 0:
                loss_scalar = loss.detach().clone()
                dist.all_reduce(loss_scalar, group=smp.get_dp_process_group())
                losses.append(loss_scalar.item() / smp.dp_size())
            if total_steps == args.checkpoint_freq and not args.load_partial:
                smp.save_checkpoint(
                    args.checkpoint_dir,
                    tag=f"total_steps{total_steps}",
                    partial=True,
                    model=model,
                    optimizer=optimizer,
                    user_content={
                        "cli_args": args,
                        "num_params": sum(np.prod(one.size()) for one in model.parameters()),
                        "total_steps": total_steps,
                        "start_train_path_index": start_index,
                        "start_batch_index": index + 1,
                        "model_config": model_config,
                        "lr_scheduler": lr_scheduler.state_dict(),
                    },
                    num_kept_partial_checkpoints=args.num_kept_checkpoints,
                )
    evaluated = eval_model(model, validation, args.validation_batches, device)
    # The number of elements that each rank holds: parameters, or shards of them.
    held = sum(flat.numel() for flat in optimizer.fp16_partitioned_groups_flat)
    if args.save_final_full_model:
        smp.save_checkpoint(
            args.checkpoint_dir,
            tag="fullmodel.pt",
            partial=False,
            model=model,
            user_content={"cli_args": args, "total_steps": total_steps, "model_config": model_config},
        )
        if smp.rank() == 0:
            saved = smp.load(os.path.join(args.checkpoint_dir, "fullmodel.pt"), partial=False)
            to_transformers, to_distributed = TRANSLATIONS[args.model_type]
            assert to_transformers(to_distributed(saved), max_seq_len=None).keys() == saved.keys()
            model_config.save_pretrained(args.checkpoint_dir)
    smp.barrier()
    report = {
        "losses": losses,
        "evaluated": evaluated,
        "norms": norms,
        "held": smp.allgather(held, smp.WORLD),
        "distributed_modules": len(list(model.distributed_modules())),
    }
    if smp.rank() == 0:
        print(json.dumps(report), flush=True)
        print("SMP training finished successfully", flush=True)


if __name__ == "__main__":
    main()
