"""Draws programs that make use of more: widths, layers of many kinds, state, evaluation, modes, real processes."""

from __future__ import annotations

from typing import Any

from tests.programs.blocks import Operation
from tests.programs.building import Spec
from tests.programs.generator import Generator
from tests.programs.layers import LEAVES, STATEFUL
from tests.programs.tables import USES, VIEW, WRITE
from tests.programs.values import STRUCTURES
from tests.programs.wide_patterns import add_wide_pattern
from tests.programs.wider import AROUND

#: Messages of 40 rows are sent within one packet, through buffers, and as tensors that stay where they are.
WIDTHS = (8, 160, 256)
ROWS = 40
#: Operations by how often a program has them at all, and how often those that have them do them.
_FURTHER = {
    "resize": (0.6, 2),
    "use": (0.8, 6),
    "until": (0.4, 3),
    "infer": (0.2, 2),
    "fresh": (0.6, 2),
    "viewhook": (0.15, 2),
    "shrink": (0.1, 1),
    "number": (0.3, 2),
    "level": (0.2, 2),
    "past": (0.2, 2),
    "around": (0.2, 2),
}
#: What hangs hooks on tensors, most of which are refused where another rank gave them.
_HOOKS = ("hook", "retain", "viewhook")
#: What is not the same when it is computed twice.
_KEEPING = ("number", "level", "past", "around", "shrink", "until", "infer")
_ORDINARY = ("sequential", "sequential", "linear", "linear", "recurrent", "normalisation", "scripted")


class WideGenerator(Generator):
    """Draws one program of this kind."""

    budget = 24
    #: How many operations a module has at most, and how many parts the model and any other has.
    most_operations = 9
    most_parts = (4, 3)

    def __init__(self, seed: str, processes: float = 0.0) -> None:
        """Start from a seed; so large a share of programs runs in real processes."""
        super().__init__(seed)
        draw = self.random
        self.processes = processes
        self.deepest = draw.choice((1, 2, 2, 3, 3, 4))
        for kind, (share, weight) in _FURTHER.items():
            if draw.random() < share:
                self.kinds[kind] = weight
        if draw.random() < 0.7:
            for kind in _HOOKS:
                self.kinds.pop(kind, None)
        if draw.random() < 0.7:
            self.kinds.pop("borrow", None)
        self.styles += [*draw.sample(STRUCTURES, 3), "mapped"] if draw.random() < 0.7 else []
        self.results = [*draw.sample(STRUCTURES, 3)] if draw.random() < 0.7 else []
        self.layers = draw.choice((0.3, 0.5, 0.7))
        self.stateful = 0.0 if self.checkpoints else draw.choice((0.0, 0.3, 0.7))
        self.width = draw.choice(WIDTHS)
        self.mixes = draw.random() < 0.6
        if self.checkpoints:
            self.kinds = {kind: weight for kind, weight in self.kinds.items() if kind not in _KEEPING}

    def program(self) -> dict[str, Any]:
        """A whole program but for its places."""
        draw = self.random
        # The same in every attempt of a seed, so that what plain torch often refuses is not rare.
        fields = super().program()
        microbatches, steps = draw.choice((1, 2, 2, 3, 4)), draw.choice((2, 2, 3, 3, 4, 6))
        if not self.checkpoints or draw.random() < 0.5:
            self.apart = add_wide_pattern(self.seed, fields["tree"], len(self.costs)) or self.apart
        pipeline = draw.choice(("simple", "interleaved", "looped", "zero_bubble"))
        kinds = ("no_grad", "no_grad", "inference_mode")
        return fields | {
            "ranks": draw.choice((2, 3)),
            "auto": draw.random() < 0.15,
            "read": fields["read"] if draw.random() < 0.1 else list(range(24)),
            "microbatches": microbatches,
            "pipeline": pipeline,
            "active": draw.randint(1, microbatches + 1),
            "steps": steps,
            "static": draw.random() < 0.6,
            "fast": draw.random() < 0.75,
            "static_steps": draw.choice((0, 1, 1)),
            "width": self.width,
            "rows": draw.choice((ROWS, ROWS, ROWS, 2)),
            "handles": draw.random() < 0.9,
            "evaluations": [(step, draw.choice(kinds)) for step in range(steps) if draw.random() < 0.3],
            "updates": draw.random() < 0.7,
            "processes": draw.random() < self.processes,
        }

    def places(self, ran: list[str], joins: list[tuple[str, str]], fields: dict[str, Any]) -> dict[str, int]:
        """Places by hand; small models are whole on a rank unless something is said, so here something is."""
        places = super().places(ran, joins, fields)
        joined = {path for join in joins for path in join}
        alone = [f"parts.{index}" for index in range(len(fields["tree"]["parts"]))]
        alone = [path for path in alone if path in ran and path not in joined and path not in places]
        if fields["auto"] and alone and not any(places.values()):
            places[self.random.choice(alone)] = self.random.randrange(1, fields["ranks"])
        return places

    def module(self, depth: int) -> Spec:
        """A module, with a width of its own."""
        draw = self.random
        if depth and draw.random() < self.layers:
            return self.layer()
        spec = super().module(depth)
        if "operations" in spec:
            spec["width"] = self.own_width()
            if self.results and depth and draw.random() < 0.4:
                spec["result"][0] = draw.choice(self.results)
            if depth and draw.random() < 0.08:
                spec["hooked"] = [draw.choice(("before", "after", "after", "backward"))]
        return spec

    def further_calls(self, parts: list[Spec], operations: list[Operation]) -> list[Operation]:
        """Calls of the parts that are not used yet."""
        used = {operation[1] for operation in operations if operation[0] == "call"}
        return [self.call(parts, child) for child in range(len(parts)) if child not in used]

    def layer(self) -> Spec:
        """A layer, of torch or such as people write."""
        draw = self.random
        chance = draw.random()
        if chance < self.stateful:
            return {"layer": draw.choice(list(STATEFUL)), "width": self.own_width()}
        if chance < self.stateful + (1 - self.stateful) * 0.6:
            kind = draw.choice([kind for kind in LEAVES if not self.checkpoints or kind != "Spectral"])
            return {"layer": kind, "width": self.own_width()}
        kind = draw.choice(_ORDINARY)
        if kind == "normalisation" and self.checkpoints:
            kind = "linear"
        spec: Spec = {"layer": kind, "width": self.own_width()}
        if kind == "sequential":
            spec["activations"] = [draw.randint(0, 1) for _ in range(draw.randint(1, 4))]
        return spec

    def own_width(self) -> int:
        """The program's width, or another one."""
        return self.random.choice(WIDTHS) if self.mixes and self.random.random() < 0.4 else self.width

    def operation(self, parts: list[Spec], depth: int) -> Operation:
        """An operation."""
        draw, place = self.random, self.place
        operation = super().operation(parts, depth)
        kind = operation[0]
        self.names += 1
        if kind == "resize":
            return [kind, place(), draw.choice(WIDTHS)]
        if kind == "use":
            return [kind, draw.choice(list(USES)), place(), place()]
        if kind == "until":
            return self.until(parts, place()) if parts else ["weigh", place()]
        if kind in ("infer", "around"):
            if depth == 2:
                return ["weigh", place()]
            inner = self.operations(parts, draw.randint(1, 3), depth + 1)
            return [kind, inner] if kind == "infer" else [kind, draw.choice(AROUND), place(), inner]
        if kind == "fresh":
            return [kind, draw.choice([kind for kind in WRITE if kind != "alias"]), place(), place()]
        if kind == "viewhook":
            return [kind, f"hook{self.names}", draw.choice(list(VIEW)), place(), draw.random() < 0.5]
        if kind == "shrink":
            return [kind]
        return operation

    def until(self, parts: list[Spec], place: int) -> Operation:
        """A loop that calls a part as often as data says."""
        child, most = self.random.randrange(len(parts)), self.random.choice((2, 3, 4))
        key = parts[child].get("key", parts[child].get("again"))
        cost = (1 if key is None else self.costs[key]) * most
        if self.cost + cost > self.budget:
            return ["weigh", place]
        self.cost += cost
        return ["until", child, place, self.random.choice((0.02, 0.1, 0.3)), most]
