"""Fine-tunes a model of transformers that save_pretrained has saved, with checkpoints, by the old import path."""

import argparse
import json
import os

import smdistributed.modelparallel.torch as smp
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model_name_or_path", required=True, help="what save_pretrained has written")
    parser.add_argument("--checkpoint_dir", required=True)
    parser.add_argument("--tensor_parallel_degree", type=int, default=1)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--sequence_length", type=int, default=16)
    parser.add_argument("--max_steps", type=int, default=6)
    parser.add_argument("--stop_after", type=int, help="save and end after so many steps, as a job that is cut off")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=6)
    parser.add_argument("--output_dir", help="where the whole model is saved at the end, for from_pretrained")
    return parser.parse_args(arguments)


def pretrained(folder: str) -> None:
    """Write a small model with random weights, in place of one that was trained for weeks."""
    sizes = {"vocab_size": 48, "n_positions": 16, "n_embd": 24, "n_layer": 4, "n_head": 4}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    torch.manual_seed(0)
    config = GPT2Config(**sizes, **dropout, bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM")
    GPT2LMHeadModel(config).save_pretrained(folder)


def make_model(args: argparse.Namespace) -> torch.nn.Module:
    """The model that is fine-tuned, in one process."""
    return AutoModelForCausalLM.from_pretrained(args.model_name_or_path, use_cache=False)


def batch_of_step(args: argparse.Namespace, step: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(1000 * args.seed + step)
    first = torch.randint(48, (args.batch_size, 1), generator=random)
    return (first + 5 * torch.arange(args.sequence_length)) % 48


@smp.step
def train_step(model, ids):
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    model.backward(loss)
    return loss


def main() -> None:
    args = parse_arguments()
    smp.init(
        {
            "partitions": 2,
            "tensor_parallel_degree": args.tensor_parallel_degree,
            "ddp": args.tensor_parallel_degree > 1,
            "microbatches": 2,
            "prescaled_batch": True,
        }
    )
    device = torch.device("cuda", smp.local_rank()) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # The weights come from one rank's file: no rank but the first reads the model of transformers.
    tag = "fullmodel.pt"
    if smp.rank() == 0 and not args.resume:
        torch.save(make_model(args).state_dict(), os.path.join(args.checkpoint_dir, tag))
    smp.barrier()
    torch.manual_seed(args.seed)
    config = GPT2Config.from_pretrained(args.model_name_or_path, use_cache=False)
    with smp.model_creation(tensor_parallelism=args.tensor_parallel_degree > 1):
        model = AutoModelForCausalLM.from_config(config)
    model = smp.DistributedModel(model)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=args.lr))
    first_step = 0
    if args.resume:
        first_step = smp.resume_from_checkpoint(args.checkpoint_dir, partial=True)["step"]
    else:
        smp.resume_from_checkpoint(args.checkpoint_dir, tag=tag, partial=False)

    losses = []
    last_step = args.stop_after or args.max_steps
    for step in range(first_step, last_step):
        ids = batch_of_step(args, step).to(device)
        optimizer.zero_grad()
        losses.append(train_step(model, ids).reduce_mean().item())
        optimizer.step()
    content = {"step": last_step}
    smp.save_checkpoint(args.checkpoint_dir, tag="partial", model=model, optimizer=optimizer, user_content=content)
    state = None
    if smp.rdp_rank() == 0:
        state = model.state_dict(gather_to_rank0=True)
    if args.output_dir and smp.rank() == 0:
        for to_transformers, _ in smp.state.module_manager.translate_functions:
            state = to_transformers(state)
        AutoModelForCausalLM.from_config(config).save_pretrained(args.output_dir, state_dict=state)
    smp.barrier()
    own = sum(parameter.numel() for parameter in model.local_parameters())
    report = {
        "losses": losses,
        "parameters_of_ranks": smp.allgather(own, smp.WORLD),
        "distributed_modules": len(list(model.distributed_modules())),
    }
    if smp.rank() == 0:
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
