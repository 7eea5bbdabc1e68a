"""Trainings in one process and over ranks, and how far they are from one another."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.examples.running import EXAMPLES, run_script
from tests.jobs.ranks import outputs_of_ranks
from tests.trainers.import_path import ROOT, outputs_of
from tests.trainers.layouts import LAYOUTS, Layout
from tests.trainers.models import ORIGINAL
from tests.trainers.rank import STEPS

#: The largest relative difference of a loss or a metric; Trainer adds losses up in float32 in any case.
BAR = 1e-6
#: What may be the rounding of float32, of sums in another order: then float64 has to show that it is.
ROUNDING = 1e-5
#: How the names of kinds begin that are trained by Lightning.
LIGHTNING = "lightning-"
DTYPES = ("float32", "float64")

Report = dict[str, Any]


def run(kind: str, layout: str, dtype: str) -> list[Report]:
    """Train, and return what each process has seen; by Lightning if the name of the kind begins so."""
    ranks = 0 if layout == "plain" else LAYOUTS[layout].ranks
    by_lightning = kind.startswith(LIGHTNING)
    module = "lightning_rank" if by_lightning else "original" if kind in ORIGINAL else "rank"
    with tempfile.TemporaryDirectory(prefix="trainers-") as folder:
        command = [f"tests.trainers.{module}", kind.removeprefix(LIGHTNING), layout, dtype, folder]
        if kind in ORIGINAL and ranks:
            outputs = outputs_of(*command, parameters=LAYOUTS[layout].parameters, ranks=ranks)
        else:
            outputs = outputs_of_ranks("-m", *command, ranks=ranks, folder=ROOT)
        if ranks and not by_lightning:
            assert "'loss'" in outputs[0], "rank 0 has printed no losses"
            assert not any(outputs[1:]), "ranks other than 0 have printed"
            assert {path.name for path in Path(folder, "saved").glob("*.safetensors")}, "nothing was saved"
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks or 1)]


def _at_best(plain: Report) -> dict[str, float]:
    """What one process has seen of the predicted samples when its model was the best.

    Its own predictions after training are not these: of some models, such as ViT, transformers loads a part only.
    """
    step = int(plain["best"].rpartition("-")[2])
    (seen,) = (one for one in plain["log"] if one["step"] == step and "eval_odd_loss" in one)
    return {key.replace("eval_odd", "test"): value for key, value in seen.items() if key.startswith("eval_odd")}


@dataclass(frozen=True)
class Outcome:
    """How a training over ranks compares with one process.

    Attributes:
        difference: The largest relative difference of a loss, a norm, a learning rate or a metric.
        of: Which one it is of.
        problems: What is wrong besides.
    """

    difference: float
    of: str
    problems: list[str]


def compare(layout: str, plain: Report, ranks: list[Report]) -> Outcome:
    """Compare what ranks have seen with what one process has."""
    shape, problems = LAYOUTS[layout], []
    differences: dict[str, float] = {}
    for number, rank in enumerate(ranks):
        pairs = [*zip(rank["log"], plain["log"], strict=False), (rank["predicted"], _at_best(plain))]
        if "before" in plain:
            pairs.append(({"before": rank["before"]}, {"before": plain["before"]}))
        if [set(one) for one in rank["log"]] != [set(one) for one in plain["log"]]:
            problems.append(f"rank {number} has logged other things")
        for ours, theirs in pairs:
            for key in theirs:
                is_whole = not plain["generates"] and "before" not in plain
                if shape.replicas > 1 and key in ("eval_odd_loss", "test_loss") and not is_whole:
                    continue  # fillers count on that path, and in one process a smaller batch as a whole one
                if key in ours:
                    away = abs(ours[key] - theirs[key]) / max(abs(theirs[key]), 1e-9)
                    differences[key] = max(differences.get(key, 0.0), away)
        if rank["best"] != plain["best"]:
            problems.append(f"the best checkpoint is {rank['best']}, and {plain['best']} in one process")
        if rank["resumed"][-len(rank["resumed"]) :] != rank["whole"]:
            problems.append(f"rank {number} has resumed inexactly")
    if sum("loss" in one for one in plain["log"]) != STEPS:
        problems.append("one process has not logged every step")
    worst = max(differences, key=lambda key: differences[key])
    return Outcome(differences[worst], worst, problems + _not_crossed(shape, ranks))


def _not_crossed(shape: Layout, ranks: list[Report]) -> list[str]:
    """What has not crossed ranks, though it has to."""
    problems = []
    sent = [rank["sent"] for rank in ranks]
    if shape.pipeline > 1 and not sum(one["forward"] for one in sent) * sum(one["backward"] for one in sent):
        problems.append("no request crossed ranks")
    if not all(rank["bytes_sent"] > 50_000 for rank in ranks):
        problems.append("a rank has sent next to nothing")
    for number, rank in enumerate(ranks):
        if shape.pipeline > 1 and not 0 < rank["held"][0] < rank["held"][1]:
            problems.append(f"rank {number} holds {rank['held'][0]} of {rank['held'][1]} parameters")
        if shape.tensor > 1 and not rank["replaced"]:
            problems.append(f"nothing was divided on rank {number}")
    return problems


def compare_lightning(layout: str, plain: Report, ranks: list[Report]) -> Outcome:
    """Compare what ranks have seen by Lightning with what one process has."""
    shape, problems = LAYOUTS[layout], []
    differences: dict[str, float] = {}
    for number, rank in enumerate(ranks):
        if [set(one) for one in rank["log"]] != [set(one) for one in plain["log"]]:
            problems.append(f"rank {number} has logged other things")
        pairs = [*zip(rank["log"], plain["log"], strict=False), (rank["tested"], plain["tested"])]
        pairs += [({key: one[key] for key in ("score", "rows")}, plain) for one in (rank,)]
        pairs.append(({"predicted": rank["predicted"][0]}, {"predicted": plain["predicted"][0]}))
        for ours, theirs in pairs:
            for key in ours:
                if shape.replicas > 1 and key.endswith("dataloader_idx_1"):
                    continue  # the last batch is filled up with samples that count
                away = abs(ours[key] - theirs[key]) / max(abs(theirs[key]), 1e-9)
                differences[key] = max(differences.get(key, 0.0), away)
        if rank["best"] != plain["best"]:
            problems.append(f"the best checkpoint is {rank['best']}, and {plain['best']} in one process")
        whole, resumed = (_of_batches(rank[one]) for one in ("whole", "resumed"))
        if not resumed or whole[-len(resumed) :] != resumed or len(resumed) == len(whole):
            problems.append(f"rank {number} has resumed inexactly")
    worst = max(differences, key=lambda key: differences[key])
    return Outcome(differences[worst], worst, problems + _not_crossed(shape, ranks))


def _of_batches(log: list[dict[str, float]]) -> list[dict[str, float]]:
    """What was logged of batches and validations, not of epochs, whose beginning a resumed training has not seen."""
    own = {"batch": ("step", "rate", "batch loss", "batch largest_step"), "validation": ("step", "validation val_loss")}
    kept = []
    for entry in log:
        for what, names in own.items():
            if f"{what} loss" in entry:
                kept.append({key: value for key, value in entry.items() if key.startswith(names)})
    return kept


def accelerated(layout: str) -> Outcome:
    """Run the example of accelerate over ranks, and its plain form in one process; compare losses."""
    shape, batch = LAYOUTS[layout], 12
    degrees = json.dumps({"pipeline_parallel_degree": shape.pipeline})
    with tempfile.TemporaryDirectory(prefix="trainers-") as folder:
        for_both = ("--epochs", "1", "--batch-size")
        plain = run_script(EXAMPLES / "accelerate_plain.py", *for_both, str(batch), folder=Path(folder))
        ours = run_script(
            EXAMPLES / "accelerate_ranks.py",
            *for_both,
            str(batch // shape.replicas),
            ranks=shape.ranks,
            folder=Path(folder),
            SM_HP_MP_PARAMETERS=degrees,
        )
    problems = [] if ours["again"] == ours["second"] else ["it has gone on inexactly"]
    pairs = [pair for part in ("first", "second") for pair in zip(ours[part], plain[part], strict=True)]
    return Outcome(max(abs(one - other) / abs(other) for one, other in pairs), "loss", problems)
