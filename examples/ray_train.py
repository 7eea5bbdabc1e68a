"""Trains over two workers of Ray Train that divide a model; run again, it goes on from the newest checkpoint."""

import argparse
from pathlib import Path

import numpy as np
import ray
import ray.data
import shardwright as smp
import shardwright.ray
import torch
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn

CONFIG = {
    "pipeline_parallel_degree": 2,
    "elastic_degrees": "pipeline_parallel_degree",  # with one worker: no pipeline
    "microbatches": 2,
    "ddp": True,
}
FEATURES, CLASSES = 32, 10


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=4, help="of all runs together")
    parser.add_argument("--batch-size", type=int, default=32, help="rows per step and replica")
    parser.add_argument("--storage", type=Path, default=Path("out/ray"), help="a folder that all nodes share")
    return parser.parse_args()


def labelled(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Points, and the nearest of ten others."""
    points = np.stack([np.random.default_rng(one).standard_normal(FEATURES, np.float32) for one in batch["id"]])
    others = np.random.default_rng(0).standard_normal((CLASSES, FEATURES), np.float32)
    nearest = ((points[:, None] - others) ** 2).sum(-1).argmin(1)
    return {"points": points, "classes": nearest}


@smp.step
def train_step(model, points, classes):
    loss = nn.functional.cross_entropy(model(points), classes)
    model.backward(loss)
    return loss


def train(options: dict) -> None:
    smp.init(CONFIG)
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)]
    model = smp.DistributedModel(nn.Sequential(nn.Linear(FEATURES, 64), *layers, nn.Linear(64, CLASSES)))
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    content = shardwright.ray.resume()
    rows = ray.train.get_dataset_shard("train")
    for epoch in range(0 if content is None else content["epoch"] + 1, options["epochs"]):
        losses = []
        for batch in rows.iter_torch_batches(batch_size=options["batch_size"], prefetch_batches=2, drop_last=True):
            optimizer.zero_grad()
            losses.append(train_step(model, batch["points"], batch["classes"]).reduce_mean().item())
            optimizer.step()
        shardwright.ray.report({"epoch": epoch, "loss": sum(losses) / len(losses)}, user_content={"epoch": epoch})


def main() -> None:
    options = parse_arguments()
    ray.init()
    trainer = TorchTrainer(
        train,
        train_loop_config={"epochs": options.epochs, "batch_size": options.batch_size},
        scaling_config=ScalingConfig(num_workers=options.workers),
        run_config=RunConfig(
            name="ray_train",
            storage_path=str(options.storage.resolve()),
            failure_config=FailureConfig(max_failures=3),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
        datasets={"train": ray.data.range(2048).map_batches(labelled)},
        # The rows follow replicas; Ray's own would give the workers of a pipeline different ones.
        dataset_config=shardwright.ray.DataConfig(CONFIG),
    )
    result = trainer.fit()
    print(f"loss {result.metrics['loss']:.6f}")
    print(f"checkpoint {result.checkpoint.path}")


if __name__ == "__main__":
    main()
