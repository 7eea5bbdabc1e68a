"""Trains a small GPT-2 or BERT of ``transformers`` on bytes of text, over a pipeline and tensor parallelism at once."""

import argparse
import json
import sysconfig
from pathlib import Path

import shardwright as smp
import torch
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

#: BERT's mask, beside the 256 bytes.
MASK = 256


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=("gpt2", "bert"), default="gpt2")
    parser.add_argument("--pipeline-parallel-degree", type=int, default=2)
    parser.add_argument("--tensor-parallel-degree", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=16, help="sequences per step")
    parser.add_argument("--sequence-length", type=int, default=64, help="bytes per sequence")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    return parser.parse_args()


def make_model(args: argparse.Namespace) -> torch.nn.Module:
    """A model of bytes and a mask, without dropout."""
    heads, length = args.width // 32, args.sequence_length
    if args.model == "gpt2":
        sizes = {"n_positions": length, "n_embd": args.width, "n_layer": args.layers, "n_head": heads}
        dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        ids = {"vocab_size": MASK, "bos_token_id": 0, "eos_token_id": 0}
        return GPT2LMHeadModel(GPT2Config(**sizes, **dropout, **ids, use_cache=False, loss_type="ForCausalLM"))
    sizes = {"hidden_size": args.width, "num_hidden_layers": args.layers, "num_attention_heads": heads}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    limits = {"intermediate_size": 4 * args.width, "vocab_size": MASK + 1, "max_position_embeddings": length}
    return BertForMaskedLM(BertConfig(**sizes, **dropout, **limits))


@smp.step
def train_step(model, ids, labels):
    loss = model(input_ids=ids, labels=labels).loss
    model.backward(loss)
    return loss


def main() -> None:
    args = parse_arguments()
    smp.init(
        {
            "pipeline_parallel_degree": args.pipeline_parallel_degree,
            "tensor_parallel_degree": args.tensor_parallel_degree,
            "ddp": True,
            "microbatches": 4,
            "optimize": "speed",
        }
    )
    torch.manual_seed(0)
    with smp.tensor_parallelism():  # whatever is made inside and known to the library is divided
        model = make_model(args)
    model = smp.DistributedModel(model)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=args.learning_rate))

    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:40]
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()
    sampler = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(args.steps):
        offsets = torch.randint(len(text) - args.sequence_length, (args.batch_size, 1), generator=sampler)
        ids = text[offsets + torch.arange(args.sequence_length)]
        labels = ids
        if args.model == "bert":
            masked = torch.rand(ids.shape, generator=sampler) < 0.15
            ids, labels = ids.masked_fill(masked, MASK), ids.masked_fill(~masked, -100)
        mine = slice(smp.dp_rank(), None, smp.dp_size())  # tensor-parallel ranks are data-parallel ranks as well
        optimizer.zero_grad()
        loss = train_step(model, ids[mine].contiguous(), labels[mine].contiguous())
        smp.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        of_all = smp.allgather(loss.reduce_mean().item(), smp.DP_GROUP)
        losses.append(sum(of_all) / len(of_all))
    if smp.rank() == 0:
        replaced = sum(one.substitute is not None for one in model.tensor_parallelism_report())
        print(json.dumps({"loss_first": losses[0], "loss_last": losses[-1], "replaced": replaced}), flush=True)


if __name__ == "__main__":
    main()
