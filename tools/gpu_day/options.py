"""What every step is told."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Options:
    """What a step is told.

    Attributes:
        device: ``"cuda"``, or ``"cpu"`` to rehearse.
        tiny: Whether sizes are such that the step takes a second or two on two cores, as in rehearsals.
        rehearsal: The path of the stand-in for CUDA's driver; None on a GPU.
        folder: An existing folder of this step's own. Files in it that end in ``.log`` are kept with its output.
    """

    device: str
    tiny: bool
    rehearsal: str | None
    folder: Path

    @property
    def patience(self) -> float:
        """By how much deadlines are longer than on a GPU: a rehearsal may share its processors with other tests."""
        return 3.0 if self.device == "cpu" else 1.0

    def arguments(self) -> list[str]:
        """The command line from which :func:`parse` makes these options."""
        words = ["--device", self.device, "--folder", str(self.folder)]
        words += ["--tiny"] if self.tiny else []
        return words + (["--rehearsal", self.rehearsal] if self.rehearsal else [])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that :func:`options_of` reads."""
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu to rehearse")
    parser.add_argument("--tiny", action="store_true", help="sizes for a rehearsal")
    parser.add_argument("--rehearsal", help="path of the stand-in for CUDA's driver, on a machine without one")
    parser.add_argument("--folder", type=Path, help="where output goes")


def options_of(given: argparse.Namespace) -> Options:
    """The options among parsed arguments."""
    return Options(given.device, given.tiny, given.rehearsal, given.folder)
