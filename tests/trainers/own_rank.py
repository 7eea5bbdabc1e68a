"""Trains by trainers of a script's own, alone or over ranks: ``FOLDER JOB``, as ``test_own`` says.

Alone, writes what was logged and the weights; a rank compares its own with them, and its last line of output says what
differs by how much, what was warned of, and what the trainer counted.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from shardwright import huggingface
from torch.utils.data import DataLoader, DistributedSampler

from tests.trainers.more_checks import told
from tests.trainers.own import BATCH, TRAINERS, AdaptedBeforehand, OwnTrainer, Scorer, trained
from tests.trainers.own_more import Regression


def refusals(over_ranks: Any, folder: Path) -> None:
    """What is no trainer, one that leaves out what it needs, and arguments that have counted processes, are refused."""
    import shardwright as smp

    class Runs(OwnTrainer):
        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            return self.compute_loss(args[0], args[1]).detach()

    with pytest.raises(smp.ConfigError, match="over_ranks was given <class 'int'>; allowed"):
        over_ranks(int)
    with pytest.raises(smp.ConfigError, match=r"Runs.training_step does not call super.*override compute_loss"):
        over_ranks(Runs)(Scorer())
    assert over_ranks(OwnTrainer) is over_ranks(over_ranks(OwnTrainer))
    assert over_ranks(transformers.Trainer) is huggingface.Trainer

    class Head(Regression):
        def create_optimizer(self, model: Any = None) -> Any:
            self.optimizer = torch.optim.SGD([*self.model.parameters(), torch.nn.Parameter(torch.ones(3))], lr=0.1)
            return self.optimizer

    class Share(Regression):
        def get_train_dataloader(self) -> DataLoader[Any]:
            sampler: Any = DistributedSampler(self.train_dataset, 3, 1)
            return DataLoader(self.train_dataset, 4, sampler=sampler)

    for refused, said in (
        (Head, r"1 parameters that its model does not have, the first of shape \(3,\)"),
        (Share, rf"for process 1 of 3; allowed here: {smp.dp_rank()} of {smp.dp_size()}"),
    ):
        TRAINERS["refused"] = (refused, False)
        with pytest.raises(smp.ConfigError, match=said):
            trained(over_ranks, "refused", str(folder), smp.dp_size())
        del TRAINERS["refused"]
    if smp.size() != smp.dp_size():
        with pytest.raises(smp.ConfigError, match=r"make it by over_ranks\(OwnArguments\)"):
            trained(lambda kind: over_ranks(kind) if issubclass(kind, OwnTrainer) else kind, "pairs", str(folder), 1)


def refused_switches(over_ranks: Any, folder: Path) -> None:
    """Adapters that are frozen and would be trained, or are not switched back, end the step."""
    import shardwright as smp

    class Frozen(AdaptedBeforehand):
        def compute_loss(self, model: Any, inputs: Any, *others: Any, **keywords: Any) -> Any:
            with self.switched():
                return model(inputs["inputs"])["logits"].mean()

    class NotBack(AdaptedBeforehand):
        def compute_loss(self, model: Any, inputs: Any, *others: Any, **keywords: Any) -> Any:
            loss = model(inputs["inputs"])["logits"].mean()
            self.model.set_adapter("ref")
            return loss

    for kind, said in ((Frozen, "set_requires_grad"), (NotBack, "and not back")):
        TRAINERS["refused"] = (kind, False)
        with pytest.raises(smp.ShardwrightError, match=said):
            trained(over_ranks, "refused", str(folder), smp.dp_size())
    del TRAINERS["refused"]


def main() -> None:
    """Run as the arguments say."""
    folder, job = Path(sys.argv[1]), json.loads(sys.argv[2])
    if job is None:
        for name in TRAINERS:
            trainer, log = trained(lambda kind: kind, name, str(folder / "out"), 1)
            save_file(trainer.model.state_dict(), folder / f"{name}.safetensors")
            (folder / f"{name}.json").write_text(json.dumps(log))
        return
    import shardwright as smp
    from shardwright.huggingface import over_ranks

    smp.init({"deterministic_server": True, **job})
    report: dict[str, Any] = {}
    for name in TRAINERS:
        with told() as texts:
            trainer, log = trained(over_ranks, name, str(folder / "out"), smp.dp_size())
        wanted, weights = json.loads((folder / f"{name}.json").read_text()), load_file(folder / f"{name}.safetensors")
        state = trainer.distributed_model.state_dict()
        assert [sorted(one) for one in log] == [sorted(one) for one in wanted], (log, wanted)
        differences = [
            (abs(ours[key] - theirs[key]) / max(1e-3, abs(theirs[key])), key)
            for ours, theirs in zip(log, wanted, strict=True)
            for key in theirs
        ]
        report[name] = {
            "logged": max(one for one in differences if one[1] != "rows"),
            "weights": max(float((state[key] - value).abs().max()) for key, value in weights.items()),
            "warned": [text for text in texts if "microbatch" in text],
            "counted": [trainer.steps, trainer.tokens, trainer.prepared, list(trainer.texts), log],
            "whole_batch": trainer.whole_batch == BATCH,
        }
    refusals(over_ranks, folder)
    if "pipeline_parallel_degree" in job:
        refused_switches(over_ranks, folder)
    print(json.dumps(report))
    smp.shutdown()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
