"""The table of layouts, and of pairs of them. Needs no torch."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, NamedTuple

from tests.parity.cases import Case

MODELS = ("GPT-2", "T5")


class Layout(NamedTuple):
    """How a job divides a model.

    Attributes:
        pp: The pipeline degree.
        tp: The tensor parallelism degree.
        rdp: How many ranks hold the same parameters.
        feature: What data-parallel ranks shard besides: nothing, the optimizer's state, or parameters too.
    """

    pp: int
    tp: int
    rdp: int
    feature: str = ""

    @property
    def name(self) -> str:
        """A name without spaces."""
        feature = f"-{self.feature}" if self.feature else ""
        return f"{self.pp}x{self.tp}x{self.rdp}{feature}"

    @property
    def configuration(self) -> dict[str, Any]:
        """What ``smp.init`` gets."""
        keys: dict[str, Any] = {
            "pipeline_parallel_degree": self.pp,
            "tensor_parallel_degree": self.tp,
            "microbatches": 2,
            "ddp": True,
        }
        if self.feature == "optimizer":
            keys["shard_optimizer_state"] = True
        if self.feature == "parameters":
            keys |= {
                "sharded_data_parallel_degree": 2,
                "sdp_param_persistence_threshold": 20,
                "sdp_gradient_clipping": 1e6,
            }
        return keys


def _layouts() -> list[Layout]:
    found = []
    for pp, tp, rdp in ((1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2)):
        found.append(Layout(pp, tp, rdp))
        if tp * rdp > 1:
            found.append(Layout(pp, tp, rdp, "optimizer"))
        if rdp > 1:
            found.append(Layout(pp, tp, rdp, "parameters"))
    return found


LAYOUTS = {layout.name: layout for layout in _layouts()}


@dataclass(frozen=True)
class SaveCase(Case):
    """Train for some steps, and save.

    Attributes:
        layout: The layout's name.
    """

    layout: str = ""

    @property
    def name(self) -> str:
        """A name without spaces, for choosing cases."""
        return f"{self.problem}-{self.layout}"


@dataclass(frozen=True)
class LoadCase(SaveCase):
    """Load what was saved under another layout, and train on.

    Attributes:
        source: The name of the layout that saved.
    """

    source: str = ""

    @property
    def name(self) -> str:
        """A name without spaces, for choosing cases."""
        return f"{self.problem}-{self.source}-to-{self.layout}"


def _place(layout: Layout) -> dict[str, Any]:
    return {"pp": layout.pp, "dp": layout.tp * layout.rdp, "schedule": "interleaved", "microbatches": 2, "steps": 3}


def save_cases() -> list[SaveCase]:
    """A case for each model and layout, those of one topology together."""
    cases = [
        SaveCase(problem=model, layout=layout.name, **_place(layout))
        for model, layout in itertools.product(MODELS, LAYOUTS.values())
    ]
    return sorted(cases, key=lambda case: case.topology)


def load_cases() -> list[LoadCase]:
    """A case for each model and ordered pair of layouts, those of one topology together."""
    cases = [
        LoadCase(problem=model, layout=layout.name, source=source, **_place(layout))
        for model, source, layout in itertools.product(MODELS, LAYOUTS, LAYOUTS.values())
    ]
    return sorted(cases, key=lambda case: case.topology)
