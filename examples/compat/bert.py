"""Pre-trains BERT with a fused optimizer and a gradient scaler, by the import path of the original library."""

import argparse
import json

import smdistributed.modelparallel.torch as smp
import torch
import torch.distributed as dist
from transformers import BertConfig, BertForPreTraining

MASK, IGNORED = 3, -100


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--optimizer", choices=("lamb", "adam", "novograd"), default="lamb")
    parser.add_argument("--vocab_size", type=int, default=64)
    parser.add_argument("--hidden_size", type=int, default=32)
    parser.add_argument("--num_layers", type=int, default=4)
    parser.add_argument("--max_seq_length", type=int, default=24)
    parser.add_argument("--train_batch_size", type=int, default=16, help="pairs of sentences of all ranks together")
    parser.add_argument("--max_steps", type=int, default=6)
    parser.add_argument("--learning_rate", type=float, default=0.01)
    parser.add_argument("--init_loss_scale", type=float, default=2.0**16)
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--output", help="where each rank saves its part of the model and the optimizer")
    parser.add_argument("--resume", action="store_true", help="load what --output has first")
    parser.add_argument("--first_step", type=int, default=0)
    return parser.parse_args(arguments)


def make_model(args: argparse.Namespace) -> torch.nn.Module:
    config = BertConfig(
        vocab_size=args.vocab_size,
        hidden_size=args.hidden_size,
        num_hidden_layers=args.num_layers,
        num_attention_heads=4,
        intermediate_size=2 * args.hidden_size,
        max_position_embeddings=args.max_seq_length,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForPreTraining(config)


def batch_of_step(args: argparse.Namespace, step: int) -> dict[str, torch.Tensor]:
    """Pairs of sentences that count on, some words masked, and whether the second follows the first."""
    random = torch.Generator().manual_seed(1000 * args.seed + step)
    samples, length = args.train_batch_size, args.max_seq_length
    half = length // 2
    first = torch.randint(args.vocab_size - 4, (samples, 1), generator=random)
    words = (first + torch.arange(length)) % (args.vocab_size - 4) + 4
    unrelated = torch.randint(2, (samples,), generator=random)
    words[:, half:] = torch.where(unrelated[:, None] == 1, words[:, half:].flip(1), words[:, half:])
    masked = torch.rand(words.shape, generator=random) < 0.25
    masked[:, 0] = True  # no sentence without a label
    return {
        "input_ids": words.masked_fill(masked, MASK),
        "token_type_ids": (torch.arange(length) >= half).long().expand(samples, -1).contiguous(),
        "attention_mask": torch.ones_like(words),
        "labels": words.masked_fill(~masked, IGNORED),
        "next_sentence_label": unrelated,
    }


def loss_of(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The mean over sentences of the loss of their masked words, and the loss of the second sentences.

    A mean over all masked words would weight microbatches by their number of masks.
    """
    outputs = model(
        input_ids=batch["input_ids"], token_type_ids=batch["token_type_ids"], attention_mask=batch["attention_mask"]
    )
    words = outputs.prediction_logits.transpose(1, 2).float()
    of_words = torch.nn.functional.cross_entropy(words, batch["labels"], ignore_index=IGNORED, reduction="none")
    counts = (batch["labels"] != IGNORED).sum(1)
    of_pairs = torch.nn.functional.cross_entropy(
        outputs.seq_relationship_logits.float(), batch["next_sentence_label"], reduction="none"
    )
    return (of_words.sum(1) / counts + of_pairs).mean()


@smp.step
def train_step(model, scaler, batch):
    loss = loss_of(model, batch)
    model.backward(scaler.scale(loss))
    return loss


def make_optimizer(args: argparse.Namespace, model: torch.nn.Module) -> torch.optim.Optimizer:
    fused = {
        "lamb": smp.optimizers.FusedLamb,
        "adam": smp.optimizers.FusedAdam,
        "novograd": smp.optimizers.FusedNovoGrad,
    }
    no_decay = ("bias", "LayerNorm.weight")
    named = list(model.named_parameters())
    groups = [
        {"params": [each for name, each in named if not name.endswith(no_decay)], "weight_decay": 0.01},
        {"params": [each for name, each in named if name.endswith(no_decay)], "weight_decay": 0.0},
    ]
    return fused[args.optimizer](groups, lr=args.learning_rate)


def main() -> None:
    args = parse_arguments()
    smp.init()  # the configuration is that of the environment's SM_HP_MP_PARAMETERS
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(smp.local_rank())
    device = torch.device("cuda" if cuda else "cpu")
    torch.manual_seed(args.seed)
    model = smp.DistributedModel(make_model(args))
    if args.resume:
        model.load_state_dict(smp.load(f"{args.output}/model.pt", partial=True), strict=True)
    optimizer = smp.DistributedOptimizer(make_optimizer(args, model))
    if args.resume:
        optimizer.load_state_dict(smp.load(f"{args.output}/optimizer.pt", partial=True))
    scaler = smp.amp.GradScaler(init_scale=args.init_loss_scale)

    losses = []
    for step in range(args.first_step, args.max_steps):
        batch = {
            name: values.chunk(smp.dp_size())[smp.dp_rank()].to(device)
            for name, values in batch_of_step(args, step).items()
        }
        optimizer.zero_grad()
        loss = train_step(model, scaler, batch).reduce_mean().detach().clone()
        scaler.step(optimizer)
        scaler.update()
        if smp.dp_size() > 1:
            dist.all_reduce(loss, group=smp.get_dp_process_group())
        losses.append((loss / smp.dp_size()).item())

    if args.output and smp.rdp_rank() == 0:
        smp.save(model.local_state_dict(), f"{args.output}/model.pt", partial=True)
        smp.save(optimizer.local_state_dict(), f"{args.output}/optimizer.pt", partial=True)
    smp.barrier()
    own = sum(parameter.numel() for parameter in model.local_parameters())
    report = {
        "losses": losses,
        "parameters_of_ranks": smp.allgather(own, smp.WORLD),
        "distributed_modules": len(list(model.distributed_modules())),
        "scale": scaler.get_scale(),
    }
    if smp.rank() == 0:
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
