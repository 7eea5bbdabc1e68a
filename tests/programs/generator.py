"""Draws random programs; what is drawn is plain data, so that a program found once can be kept."""

from __future__ import annotations

import random
from typing import Any

from tests.programs.blocks import Operation
from tests.programs.building import Spec
from tests.programs.patterns import add_pattern
from tests.programs.tables import UNARY, VIEW, WRITE

_COMMON = {"weigh": 4, "unary": 3, "view": 3, "sum": 3, "write": 2, "call": 8, "split": 1}
_RARE = ("mode", "branch", "loop", "hook", "retain", "count", "buffer", "store", "load", "weight", "borrow")
_OFTEN = ("mode", "branch", "hook", "count")
_IMPURE = ("write", "store", "load", "count", "buffer", "hook", "retain")
_STYLES = ("plain", "plain", "keyword", "list", "dict", "nested", "none", "reach", "direct", "dropped")
_RESULTS = ("one", "one", "one", "tuple", "tuple", "dict", "list", "nested")


class Generator:
    """Draws one program; what may occur in it is drawn first, so that rare things meet in small programs too."""

    #: How many modules one microbatch may run.
    budget = 40
    #: How many operations a module has at most, and how many parts the model and any other has.
    most_operations = 6
    most_parts = (3, 2)

    def __init__(self, seed: str) -> None:
        """Start from a seed."""
        self.seed = seed
        draw = self.random = random.Random(seed)
        #: The path of a part that belongs on another rank than its caller.
        self.apart: str | None = None
        self.names = 0
        self.costs: list[int] = []
        self.deepest = draw.choice((1, 2, 3, 3, 4))
        self.reuses = draw.random() < 0.4
        self.ties = draw.random() < 0.7
        self.kinds = dict(_COMMON)
        for kind in _RARE:
            if draw.random() < (0.35 if kind in _OFTEN else 0.15):
                self.kinds[kind] = draw.choice((1, 2, 3))
        if "store" in self.kinds or "load" in self.kinds:
            self.kinds["store"] = self.kinds["load"] = 2
        if draw.random() < 0.3:
            del self.kinds["write"]
        self.styles = [style for style in _STYLES if draw.random() < 0.7] or ["plain"]
        self.checkpoints = draw.random() < 0.15
        if self.checkpoints:  # what is computed twice must do the same both times, in plain torch too
            self.kinds = {kind: weight for kind, weight in self.kinds.items() if kind not in _IMPURE}
            self.styles += ["checkpoint", "reentrant"]

    def program(self) -> dict[str, Any]:
        """A whole program but for its places, as the fields of :class:`tests.programs.program.Program`."""
        draw = self.random
        microbatches = draw.choice((1, 2, 2, 3, 4))
        tree = self.module(0)
        if not self.checkpoints:
            self.apart = add_pattern(self.seed, tree, len(self.costs))
        few = [draw.choice((-1, -2, -3, 0, draw.randrange(12))) for _ in range(3)]
        return {
            "tree": tree,
            "ranks": draw.choice((2, 2, 3, 4)),
            "auto": draw.random() < 0.2,
            "memory_weight": round(draw.random(), 2),
            "microbatches": microbatches,
            "pipeline": draw.choice(("simple", "interleaved")),
            "active": draw.randint(1, microbatches + 1),
            "steps": draw.choice((1, 1, 1, 2)),
            "read": draw.choice((few, list(range(24)))),
            "roots": draw.choice(("one",) * 5 + ("several", "several", "calls")),
            "leaves": draw.random() < 0.5,
        }

    def places(self, ran: list[str], joins: list[tuple[str, str]], fields: dict[str, Any]) -> dict[str, int]:
        """Places by hand, for modules that run; tied ones and those that the trace joins must share a rank."""
        draw = self.random
        groups = [group for group in _groups(fields["tree"], joins) if not group.isdisjoint(ran)]
        share = 0.3 if fields["auto"] else 0.8
        places: dict[str, int] = {}
        for group in groups:
            together = len(group) > 1 and not fields["auto"]
            if together or draw.random() < (0.1 if "" in group else share):
                places |= dict.fromkeys(sorted(group), draw.randrange(fields["ranks"]))
        inner = [group for group in groups if "" not in group]
        if inner and not fields["auto"] and len({places.get(path, 0) for path in ran}) == 1:
            other = (places.get("", 0) + draw.randrange(1, fields["ranks"])) % fields["ranks"]
            places |= dict.fromkeys(sorted(draw.choice(inner)), other)
        if self.apart is not None and {self.apart} in groups and not fields["auto"]:
            above = self.apart.rpartition(".parts.")[0]
            while above and above not in places:
                above = above.rpartition(".parts.")[0]
            places[self.apart] = (places.get(above, 0) + draw.randrange(1, fields["ranks"])) % fields["ranks"]
        return places

    def place(self) -> int:
        """A tensor, recent ones more often."""
        return self.random.choice((-1, -1, -2, -3, 0, 1, self.random.randrange(12)))

    def module(self, depth: int) -> Spec:
        """A module, after those below it."""
        draw = self.random
        if depth and draw.random() < 0.15:
            return self.layer()
        most = 0 if depth >= self.deepest else self.most_parts[depth > 0]
        least = min(1, most) if depth + 1 < self.deepest or depth == 0 else 0
        parts = [self.part(depth + 1) for _ in range(draw.randint(least, most))]
        self.cost = 1
        operations = self.operations(parts, draw.randint(1, self.most_operations))
        operations += self.further_calls(parts, operations)
        result = ["all", []]
        if depth:
            kind = "nothing" if draw.random() < 0.02 else draw.choice(_RESULTS)
            result = [kind, [self.place() for _ in range(draw.choice((1, 2, 2, 3)))]]
        spec: Spec = {"operations": operations, "result": result, "parts": parts, "key": len(self.costs)}
        if self.ties and self.costs and depth and draw.random() < 0.6:
            spec["tied"] = draw.randrange(len(self.costs))
        self.costs.append(self.cost)
        return spec

    def further_calls(self, parts: list[Spec], operations: list[Operation]) -> list[Operation]:
        """Calls behind a module's operations, so that one at least of its parts is used."""
        return [] if not parts or any(kind == "call" for kind, *_ in operations) else [self.call(parts)]

    def part(self, depth: int) -> Spec:
        """A new module, or one that is there already."""
        if self.reuses and self.costs and self.random.random() < 0.3:
            return {"again": self.random.randrange(len(self.costs))}
        return self.module(depth)

    def layer(self) -> Spec:
        """A layer of ``torch.nn``."""
        draw = self.random
        kind = draw.choice(("sequential", "sequential", "linear", "recurrent", "normalisation"))
        if kind == "normalisation" and self.checkpoints:
            kind = "linear"
        if kind == "sequential":
            return {"layer": kind, "activations": [draw.randint(0, 1) for _ in range(draw.randint(1, 4))]}
        return {"layer": kind}

    def operations(self, parts: list[Spec], count: int, depth: int = 0) -> list[Operation]:
        """Some operations."""
        return [self.operation(parts, depth) for _ in range(count)]

    def operation(self, parts: list[Spec], depth: int) -> Operation:
        """An operation; those with operations of their own do not nest deeper than twice."""
        draw, place = self.random, self.place
        without = () if parts else ("call", "borrow")
        deep = ("mode", "branch", "loop") if depth == 2 else ()
        kinds = {kind: weight for kind, weight in self.kinds.items() if kind not in (*without, *deep)}
        kind = draw.choices(list(kinds), list(kinds.values()))[0]
        self.names += 1
        if kind == "unary":
            return [kind, draw.choice(list(UNARY)), place()]
        if kind == "view":
            return [kind, draw.choice(list(VIEW)), place()]
        if kind == "sum":
            return [kind, place(), place(), draw.random() < 0.4]
        if kind == "write":
            return [kind, draw.choice(list(WRITE)), place(), place()]
        if kind == "mode":
            return [kind, draw.random() < 0.3, self.operations(parts, draw.randint(1, 3), depth + 1)]
        if kind == "branch":
            return [kind, place(), *(self.operations(parts, draw.randint(0, 2), depth + 1) for _ in range(2))]
        if kind == "loop":
            return [kind, place(), self.operations(parts, draw.randint(1, 2), depth + 1)]
        if kind == "hook":
            return [kind, f"hook{self.names}", place(), draw.random() < 0.5]
        if kind == "retain":
            return [kind, f"retained{self.names}", place()]
        if kind == "borrow":
            return [kind, draw.randrange(len(parts)), place()]
        if kind == "call":
            return self.call(parts)
        if kind in ("buffer", "load", "weight"):
            return [kind]
        return [kind, place()]

    def call(self, parts: list[Spec], child: int | None = None) -> Operation:
        """A call of a part, unless it would be one too many."""
        draw = self.random
        child, repeat = draw.randrange(len(parts)) if child is None else child, draw.choice((1, 1, 1, 2))
        key = parts[child].get("key", parts[child].get("again"))
        cost = (1 if key is None else self.costs[key]) * repeat
        if self.cost + cost > self.budget:
            return ["weigh", self.place()]
        self.cost += cost
        places = [self.place() for _ in range(draw.choice((1, 1, 2, 3)))]
        return ["call", child, places, draw.choice(self.styles), repeat]


def _groups(tree: Spec, joins: list[tuple[str, str]]) -> list[set[str]]:
    """The paths of the modules that can be placed, those together that must share a rank."""
    groups: dict[str, set[str]] = {}
    path_of: dict[int, str] = {}

    def join(one: str, other: str) -> None:
        joined = groups[one] | groups[other]
        groups.update(dict.fromkeys(joined, joined))

    def visit(spec: Spec, path: str) -> None:
        for index, part in enumerate(spec.get("parts", ())):
            visit(part, f"{path}.parts.{index}" if path else f"parts.{index}")
        if "again" in spec:
            return
        groups[path] = {path}
        if "key" in spec:
            path_of[spec["key"]] = path
        if "tied" in spec:
            join(path, path_of[spec["tied"]])

    visit(tree, "")
    for one, other in joins:
        if one in groups and other in groups:
            join(one, other)
    return [group for path, group in groups.items() if path == min(group)]
