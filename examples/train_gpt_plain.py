"""Trains a small GPT-2 on bytes of real text: the Python standard library's own source files, or --text FILE."""

import argparse
import json
import math
import sysconfig
import time
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import GPT2Config, GPT2LMHeadModel

MAX_TEXT_BYTES = 8_000_000


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=Path, help="file to learn from instead of the standard library's sources")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch-size", type=int, default=16, help="sequences per step")
    parser.add_argument("--sequence-length", type=int, default=64, help="bytes per sequence")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=160)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quiet", action="store_true", help="show no progress and print no result")
    return parser.parse_args()


def read_text(path: Path | None) -> torch.Tensor:
    """Bytes as integers: of one file, or of the standard library's top-level modules in alphabetical order."""
    library = Path(sysconfig.get_path("stdlib"))
    files = [path] if path else sorted(library.glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)[:MAX_TEXT_BYTES]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def weight_decay_groups(model: torch.nn.Module) -> list[dict]:
    """Decay matrices, not biases and norms."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def warm_up_then_cosine(step: int, steps: int) -> float:
    """Factor on the learning rate: up over the first 5% of the steps, then down a half cosine to a tenth."""
    warm_up = max(1, steps // 20)
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.55 + 0.45 * math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up))


def train_step(model, ids):
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss


def main() -> None:
    args = parse_arguments()
    quiet = args.quiet
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    text = read_text(args.text)
    config = GPT2Config(
        vocab_size=256,
        n_positions=args.sequence_length,
        n_embd=args.width,
        n_layer=args.layers,
        n_head=args.width // 32,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
        loss_type="ForCausalLM",
    )
    model = GPT2LMHeadModel(config).to(device)
    optimizer = torch.optim.AdamW(weight_decay_groups(model), lr=args.learning_rate, betas=(0.9, 0.95))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warm_up_then_cosine(step, args.steps))
    sampler = torch.Generator().manual_seed(args.seed)
    window = torch.arange(args.sequence_length)

    losses = []
    start = time.perf_counter()
    progress = tqdm(range(args.steps), unit="step", disable=quiet or None, mininterval=1.0)  # None: on a terminal only
    for step in progress:
        offsets = torch.randint(len(text) - args.sequence_length, (args.batch_size, 1), generator=sampler)
        ids = text[offsets + window].to(device)
        optimizer.zero_grad()
        loss = train_step(model, ids)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
        step_seconds = (time.perf_counter() - start) / (step + 1)
        tokens_per_s = args.batch_size * args.sequence_length / step_seconds
        shown = {
            "loss": f"{losses[-1]:.3f}",
            "step_ms": f"{1e3 * step_seconds:.1f}",
            "tokens_per_s": f"{tokens_per_s:.0f}",
        }
        progress.set_postfix(shown, refresh=False)
    seconds = time.perf_counter() - start

    last = losses[-20:]
    result = {
        "loss_first": losses[0],
        "loss_last": sum(last) / len(last),
        "tokens_per_s": tokens_per_s,
        "seconds": seconds,
    }
    if not quiet:
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
