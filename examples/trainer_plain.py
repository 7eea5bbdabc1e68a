"""Trains a small GPT-2 on the Python standard library's sources by the Trainer of transformers."""

import argparse
import json
import sysconfig
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=16, help="sequences per step and data-parallel rank")
    parser.add_argument("--sequence-length", type=int, default=64, help="bytes per sequence")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--folder", default="out/trainer")
    return parser.parse_args()


def sequences(length: int, count: int) -> list[dict[str, torch.Tensor]]:
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)[: length * count]
    rows = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().view(count, length)
    return [{"input_ids": row, "labels": row} for row in rows]


def accuracy(prediction) -> dict[str, float]:
    hits = prediction.predictions[:, :-1].argmax(-1) == prediction.label_ids[:, 1:]
    return {"accuracy": float(hits.mean())}


def main() -> None:
    options = parse_arguments()
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=256,
        n_positions=options.sequence_length,
        n_embd=options.width,
        n_layer=options.layers,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        loss_type="ForCausalLM",
    )
    samples = sequences(options.sequence_length, 1024)
    trainer = Trainer(
        model=GPT2LMHeadModel(config),
        args=TrainingArguments(
            output_dir=options.folder,
            per_device_train_batch_size=options.batch_size,
            max_steps=options.steps,
            learning_rate=3e-3,
            lr_scheduler_type="cosine",
            eval_strategy="steps",
            eval_steps=options.steps // 2,
            save_steps=options.steps // 2,
            logging_steps=1,
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=samples[64:],
        eval_dataset=samples[:64],
        compute_metrics=accuracy,
    )
    trainer.train()
    trainer.save_model()
    if trainer.is_world_process_zero():
        log = trainer.state.log_history
        losses = [entry["loss"] for entry in log if "loss" in entry]
        accuracies = [entry["eval_accuracy"] for entry in log if "eval_accuracy" in entry]
        print(json.dumps({"losses": losses, "accuracies": accuracies}))


if __name__ == "__main__":
    main()
