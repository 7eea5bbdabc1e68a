"""Trains a small network in a loop of accelerate, and goes on from a checkpoint."""

import argparse
import json

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=16, help="samples per process")
    parser.add_argument("--folder", default="out/accelerate")
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    torch.manual_seed(0)
    accelerator = Accelerator(
        gradient_accumulation_steps=2,
        step_scheduler_with_optimizer=False,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
    )
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    inputs = torch.randn(96, 8)
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1).long() % 4), batch_size=options.batch_size, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    def train_step(model, inputs, labels):
        loss = nn.functional.cross_entropy(model(inputs), labels)
        accelerator.backward(loss)
        return loss

    def train() -> list[float]:
        losses = []
        for epoch in range(options.epochs):
            loader.set_epoch(epoch)
            for inputs, labels in loader:
                with accelerator.accumulate(model):
                    loss = train_step(model, inputs, labels)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    if accelerator.sync_gradients:
                        scheduler.step()
                    optimizer.zero_grad()
                losses.append(accelerator.gather(loss.detach()).mean().item())
        return losses

    first = train()
    accelerator.save_state(options.folder)
    second = train()
    accelerator.load_state(options.folder)
    again = train()
    if accelerator.is_main_process:
        print(json.dumps({"first": first, "second": second, "again": again}))


if __name__ == "__main__":
    main()
