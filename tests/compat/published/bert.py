"""Pre-trains BERT as the public example does: `smp.save` of parts by each rank, LAMB, old checkpoints removed."""

import argparse
import json
import os
import random

import numpy as np
import smdistributed.modelparallel.torch as smp
import torch
import torch.distributed as dist
from smdistributed.modelparallel.torch.optimizers import FusedLAMB
from torch.utils.data import DataLoader, SequentialSampler, TensorDataset
from transformers import BertConfig, BertForPreTraining

MASK, IGNORED = 3, -100


def parse_args(arguments=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", type=str, required=True)
    parser.add_argument("--vocab_size", type=int, default=64)
    parser.add_argument("--hidden_size", type=int, default=32)
    parser.add_argument("--num_layers", type=int, default=4)
    parser.add_argument("--max_seq_length", type=int, default=16)
    parser.add_argument("--train_batch_size", type=int, default=8, help="of all data-parallel ranks together")
    parser.add_argument("--learning_rate", type=float, default=0.01)
    parser.add_argument("--max_steps", type=int, default=6)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--num_steps_per_checkpoint", type=int, default=1)
    parser.add_argument("--resume_from_checkpoint", type=int, default=0)
    parser.add_argument("--resume_step", type=int, default=-1)
    parser.add_argument("--keep", type=int, default=4, help="checkpoints that stay")
    parser.add_argument("--use_lamb", type=int, default=1)
    parser.add_argument("--partitions", type=int, default=1)
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--tensor_parallel_degree", type=int, default=1)
    parser.add_argument("--sharded_data_parallel_degree", type=int, default=1)
    parser.add_argument("--fp16", type=int, default=0)
    parser.add_argument("--bf16", type=int, default=0)
    return parser.parse_args(arguments)


def model_config_of(args):
    """The configuration of the model, of transformers."""
    return BertConfig(
        vocab_size=args.vocab_size,
        hidden_size=args.hidden_size,
        num_hidden_layers=args.num_layers,
        num_attention_heads=4,
        intermediate_size=2 * args.hidden_size,
        max_position_embeddings=args.max_seq_length,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )


def make_data(args, batches, seed):
    """Pairs of sentences that count on, two of their words masked, and whether the second follows the first."""
    generator = torch.Generator().manual_seed(seed)
    samples, length = batches * args.train_batch_size, args.max_seq_length
    first = torch.randint(args.vocab_size - 4, (samples, 1), generator=generator)
    words = (first + torch.arange(length)) % (args.vocab_size - 4) + 4
    unrelated = torch.randint(2, (samples,), generator=generator)
    half = length // 2
    words[:, half:] = torch.where(unrelated[:, None] == 1, words[:, half:].flip(1), words[:, half:])
    masked = torch.zeros(words.shape, dtype=torch.bool)
    masked[:, 2] = masked[:, half + 1] = True
    types = (torch.arange(length) >= half).long().expand(samples, -1).contiguous()
    return TensorDataset(
        words.masked_fill(masked, MASK), types, torch.ones_like(words), words.masked_fill(~masked, IGNORED), unrelated
    )


def loss_of(prediction_scores, seq_relationship_score, masked_lm_labels, next_sentence_labels):
    words = torch.nn.functional.cross_entropy(
        prediction_scores.float().flatten(0, 1), masked_lm_labels.flatten(), ignore_index=IGNORED
    )
    pairs = torch.nn.functional.cross_entropy(seq_relationship_score.float(), next_sentence_labels)
    return words + pairs


@smp.step
def smp_step(args, device, input_ids, segment_ids, input_mask, masked_lm_labels, next_sentence_labels, model):
    outputs = model(input_ids=input_ids, token_type_ids=segment_ids, attention_mask=input_mask)
    loss = loss_of(outputs.prediction_logits, outputs.seq_relationship_logits, masked_lm_labels, next_sentence_labels)
    model.backward(loss)
    return loss


@smp.step
def smp_eval(input_ids, segment_ids, input_mask, masked_lm_labels, next_sentence_labels, model):
    outputs = model(input_ids=input_ids, token_type_ids=segment_ids, attention_mask=input_mask)
    return loss_of(outputs.prediction_logits, outputs.seq_relationship_logits, masked_lm_labels, next_sentence_labels)


def own_part(args, batch, device):
    """The rows of this replica."""
    return [one.chunk(smp.dp_size())[smp.dp_rank()].to(device) for one in batch]


def mean_over_replicas(loss):
    loss = loss.detach().clone()
    dist.all_reduce(loss, group=smp.get_dp_process_group())
    return loss.item() / smp.dp_size()


def prepare_model_and_optimizer(args, device, config):
    with smp.model_creation(tensor_parallelism=args.tensor_parallel_degree > 1):
        model = BertForPreTraining(config)
    model = smp.DistributedModel(model, trace_device="cpu")
    checkpoint, global_step = None, 0
    if args.resume_from_checkpoint:
        global_step = args.resume_step
        path = os.path.join(args.output_dir, f"ckpt_{global_step}.pt")
        checkpoint = smp.load(path, partial=True)
        model.load_state_dict(checkpoint["model"], strict=False)
    param_optimizer = list(model.named_parameters())
    no_decay = ["bias", "gamma", "beta", "LayerNorm", "layernorm"]
    optimizer_grouped_parameters = [
        {"params": [p for n, p in param_optimizer if not any(nd in n for nd in no_decay)], "weight_decay": 0.01},
        {"params": [p for n, p in param_optimizer if any(nd in n for nd in no_decay)], "weight_decay": 0.0},
    ]
    if args.use_lamb:
        optimizer = FusedLAMB(optimizer_grouped_parameters, lr=args.learning_rate)
    else:
        optimizer = torch.optim.AdamW(optimizer_grouped_parameters, lr=args.learning_rate)
    optimizer = smp.DistributedOptimizer(optimizer)
    lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer.optimizer if smp.state.cfg.fp16 else optimizer, lambda step: max(0.1, 1 - 0.1 * step)
    )
    if checkpoint is not None:
        optimizer.load_state_dict(checkpoint["optimizer"])
        lr_scheduler.load_state_dict(checkpoint["lr_scheduler"])
    return model, optimizer, lr_scheduler, global_step


def main():
    args = parse_args()
    smp.init(
        {
            "partitions": args.partitions,
            "microbatches": args.microbatches,
            "pipeline": "interleaved",
            "optimize": "memory",
            "ddp": True,
            "overlapping_allreduce": True,
            "tensor_parallel_degree": args.tensor_parallel_degree,
            "sharded_data_parallel_degree": args.sharded_data_parallel_degree,
            "sdp_param_persistence_threshold": 64,
            "fp16": args.fp16 > 0,
            "bf16": args.bf16 > 0,
        }
    )
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(smp.local_rank())
    device = torch.device("cuda" if cuda else "cpu")
    config = model_config_of(args)
    model, optimizer, lr_scheduler, global_step = prepare_model_and_optimizer(args, device, config)
    data = make_data(args, args.max_steps, args.seed)
    train_dataloader = DataLoader(
        data, sampler=SequentialSampler(data), batch_size=args.train_batch_size, drop_last=True
    )
    saved_at, losses = [], []
    model.train()
    for step, batch in enumerate(train_dataloader):
        if step < global_step:
            continue
        optimizer.zero_grad()
        loss = smp_step(args, device, *own_part(args, batch, device), model).reduce_mean()
        optimizer.step()
        lr_scheduler.step()
        losses.append(mean_over_replicas(loss))
        if not args.resume_from_checkpoint and (step + 1) % args.num_steps_per_checkpoint == 0:
            smp.barrier()
            if smp.rdp_rank() == 0 or args.sharded_data_parallel_degree > 1:
                path = os.path.join(args.output_dir, f"ckpt_{step + 1}.pt")
                save_dict = {
                    "model": model.local_state_dict(),
                    "optimizer": optimizer.local_state_dict(),
                    "lr_scheduler": lr_scheduler.state_dict(),
                    "files": [0, "shard-0"],
                    "epoch": 0,
                    "data_loader": train_dataloader,
                }
                smp.save(save_dict, path, partial=True, v3=args.sharded_data_parallel_degree > 1)
                saved_at.append(step + 1)
                if len(saved_at) > args.keep and args.sharded_data_parallel_degree == 1:
                    os.remove(os.path.join(args.output_dir, f"ckpt_{saved_at.pop(0)}.pt_{smp.mp_rank()}"))
            smp.barrier()
    model.eval()
    with torch.no_grad():
        validation = make_data(args, 1, args.seed + 1).tensors
        evaluated = mean_over_replicas(smp_eval(*own_part(args, validation, device), model).reduce_mean())
    smp.save_checkpoint(args.output_dir, tag="fullmodel.pt", partial=False, model=model)
    if smp.rank() == 0:
        config.save_pretrained(args.output_dir)
    smp.barrier()
    report = {
        "losses": losses,
        "evaluated": evaluated,
        "norms": [],
        "held": smp.allgather(sum(flat.numel() for flat in optimizer.fp16_partitioned_groups_flat), smp.WORLD),
        "distributed_modules": len(list(model.distributed_modules())),
    }
    if smp.rank() == 0:
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
