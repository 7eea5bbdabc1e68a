"""Trains the same model over several degrees, compares the loss curves and draws them; see ``--help``."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from tests.jobs.ranks import outputs_of_ranks

ROOT = Path(__file__).resolve().parents[2]
#: Pipeline degree and replicas; the first is what the others are compared with.
DEGREES = ((1, 1), (2, 1), (4, 1), (1, 2), (2, 2))
#: The largest relative difference of a loss: float32 sums in another order, amplified by the steps between.
BAR = 1e-3
JOB_SECONDS = 1800.0
COLOURS = ("#222222", "#1f77b4", "#2ca02c", "#d62728", "#9467bd")
WIDTH, HEIGHT, MARGIN = 720, 360, 48


def train(pp: int, replicas: int, steps: int) -> list[float]:
    """The losses of a job, each the mean over its replicas."""
    world = pp * replicas
    with tempfile.TemporaryDirectory(prefix="convergence-") as folder:
        command = ["-m", "tests.convergence.rank", str(pp), str(replicas), str(steps), folder]
        outputs_of_ranks(*command, ranks=world, seconds=JOB_SECONDS, folder=ROOT)
        ranks = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(world)]
    assert all(rank["held"] for rank in ranks), "a rank holds no parameters"
    curves = list({rank["replica"]: rank["losses"] for rank in ranks}.values())
    assert len(curves) == replicas, "a replica reported nothing"
    return [sum(losses) / replicas for losses in zip(*curves, strict=True)]


def name(pp: int, replicas: int) -> str:
    """What a curve is called."""
    return f"pipeline {pp}, data {replicas}"


def draw(curves: dict[str, list[float]]) -> str:
    """The curves as a picture, each a little thinner than the one beneath it."""
    low = min(min(curve) for curve in curves.values())
    high = max(max(curve) for curve in curves.values())
    steps = max(len(curve) for curve in curves.values())

    def place(step: int, loss: float) -> str:
        x = MARGIN + step * (WIDTH - 2 * MARGIN) / max(1, steps - 1)
        y = MARGIN + (high - loss) * (HEIGHT - 2 * MARGIN) / (high - low)
        return f"{x:.1f},{y:.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{MARGIN}" y="24">loss, {high:.2f} to {low:.2f}, over {steps} steps</text>',
    ]
    for index, (label, curve) in enumerate(curves.items()):
        points = " ".join(place(step, loss) for step, loss in enumerate(curve))
        thickness = 1 + 2 * (len(curves) - 1 - index)
        colour = COLOURS[index % len(COLOURS)]
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{thickness}"/>')
        parts.append(f'<text x="{WIDTH - 190}" y="{MARGIN + 18 * index}" fill="{colour}">{label}</text>')
    return "\n".join([*parts, "</svg>", ""])


def main() -> int:
    """Train, compare, draw."""
    parser = argparse.ArgumentParser(prog="python -m tests.convergence", description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--picture", type=Path, help="where to write the curves as an SVG file")
    arguments = parser.parse_args()
    curves = {}
    for pp, replicas in DEGREES:
        print(f"convergence: {name(pp, replicas)}", file=sys.stderr)
        curves[name(pp, replicas)] = train(pp, replicas, arguments.steps)
    first = next(iter(curves.values()))
    worst = 0.0
    print(f"{'degrees':22}{'first loss':>12}{'last loss':>12}{'worst relative difference':>28}")
    for label, curve in curves.items():
        difference = max(abs(ours - theirs) / abs(theirs) for ours, theirs in zip(curve, first, strict=True))
        worst = max(worst, difference)
        print(f"{label:22}{curve[0]:12.4f}{curve[-1]:12.4f}{difference:28.1e}")
    if arguments.picture is not None:
        arguments.picture.write_text(draw(curves))
    summary = {
        "curves": len(curves),
        "steps": arguments.steps,
        "worst_relative_difference": worst,
        "fell": first[-1] < 0.7 * first[0],
    }
    print(json.dumps(summary), flush=True)
    return 0 if worst < BAR and summary["fell"] else 1


if __name__ == "__main__":
    sys.exit(main())
