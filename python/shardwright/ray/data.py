"""Divides data sets of Ray Data over replicas, where Ray Train itself divides them over processes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal

import ray.train

from shardwright import _core
from shardwright.config import check_world, load_config
from shardwright.ray.shard import Shard


class DataConfig(ray.train.DataConfig):  # type: ignore[misc]
    """Gives all ranks of a pipeline the same rows, and each replica different ones.

    Ray Train's own gives each process different rows, but a pipeline trains on those of its first rank: the others are
    never trained on. Pass this one to the trainer, as ``TorchTrainer(..., dataset_config=DataConfig(config))``;
    ``ray.train.get_dataset_shard`` then returns the right shard. Its ``iter_torch_batches``, ``iter_batches`` and
    ``iter_rows`` take Ray's arguments. The first rank of each pipeline reads, with Ray's prefetching, and hands the
    batches on to the others.
    """

    def __init__(
        self,
        config: Mapping[str, Any] | None = None,
        *,
        hands_on: bool = True,
        datasets_to_split: Literal["all"] | list[str] = "all",
        execution_options: Any = None,
        enable_shard_locality: bool = True,
    ) -> None:
        """Create the configuration.

        Args:
            config: The configuration that the ranks give to ``smp.init``.
            hands_on: Hand batches on to the other ranks of a pipeline. False gives these None for each batch, which
                a step function takes from all ranks but the first.
            datasets_to_split: As for Ray's. Each replica gets all rows of data sets that are not split.
            execution_options: As for Ray's.
            enable_shard_locality: As for Ray's.

        Raises:
            ConfigError: A key is unknown, or its value is not allowed.
        """
        super().__init__(datasets_to_split, execution_options, enable_shard_locality)
        self._config = dict(config or {})
        self._hands_on = hands_on
        load_config(self._config, {}, os.environ)

    def configure(
        self,
        datasets: dict[str, Any],
        world_size: int,
        worker_handles: list[Any] | None,
        worker_node_ids: list[str] | None,
        **_: Any,
    ) -> list[dict[str, Any]]:
        """Divide the data sets; called by Ray Train.

        Args:
            datasets: The data sets, by name.
            world_size: The number of workers.
            worker_handles: Not used.
            worker_node_ids: The node of each worker.

        Returns:
            The shards of each worker, by name.

        Raises:
            ConfigError: The configuration does not fit the number of workers.
        """
        groups = same_samples(self._config, world_size)
        nodes = [worker_node_ids[ranks[0]] for ranks in groups] if worker_node_ids else None
        shards: list[dict[str, Any]] = [{} for _ in range(world_size)]
        for name, given in datasets.items():
            if given.name is None:
                given.set_name(name)
            dataset = given.copy(given)
            dataset.context.execution_options = self._resolve_execution_options(name)
            if self._datasets_to_split == "all" or name in self._datasets_to_split:
                hints = nodes if self._enable_shard_locality else None
                iterators = dataset.streaming_split(len(groups), equal=True, locality_hints=hints)
            else:
                iterators = [dataset.iterator() for _ in groups]
            for ranks, iterator in zip(groups, iterators, strict=True):
                for rank in ranks:
                    shards[rank][name] = Shard(name, iterator, groups, hands_on=self._hands_on)
        return shards


def same_samples(config: Mapping[str, Any], world_size: int) -> list[list[int]]:
    """Return which ranks of a job train on the same samples, the one first that reads them.

    Raises:
        ConfigError: The configuration does not fit the number of ranks.
    """
    cfg = load_config(config, {}, os.environ, world_size)
    check_world(cfg, world_size, config, {}, os.environ)
    topology = _core.Topology(
        world_size, cfg.pipeline_parallel_degree, cfg.tensor_parallel_degree, cfg.placement_strategy
    )
    return topology.groups("MP_GROUP" if cfg.prescaled_batch else "PP_GROUP")
