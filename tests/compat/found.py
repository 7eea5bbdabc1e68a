"""What of the table is there: ``python -m tests.compat.found JOB`` on the ranks of a job, once for each job.

Rank 0 prints what is missing, or has other arguments, as a list in JSON.
"""

from __future__ import annotations

import importlib
import inspect
import json
import pickle
import sys
from collections.abc import Callable, Mapping
from typing import Any

import smdistributed.modelparallel.torch as smp
import torch
from torch import nn

from tests.compat.interface import SYMBOLS, Symbol
from tests.compat.lookup import JOBS

_SMALL: dict[str, Any] = {"num_attention_heads": 2, "attention_head_size": 4, "hidden_size": 8, "intermediate_size": 16}


def _plain() -> dict[str, Any]:
    return {
        "state": smp.state,
        "model": smp.DistributedModel(nn.Linear(2, 2)),
        "layer": smp.nn.DistributedTransformerLayer(**_SMALL),
        "transformer": smp.nn.DistributedTransformer(num_layers=2, **_SMALL),
        "language model": smp.nn.DistributedTransformerLMHead(num_layers=1, vocab_size=8, num_positions=4, **_SMALL),
    }


def _trained() -> tuple[Any, Any]:
    model = smp.DistributedModel(nn.Linear(4, 4))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    model.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
    return model, optimizer


def _float16() -> dict[str, Any]:
    return {"float16 optimizer": _trained()[1]}


def _sharded() -> dict[str, Any]:
    model, optimizer = _trained()
    return {"sharded parameter": model.module.weight, "sharded optimizer": optimizer}


_MADE: dict[str, Callable[[], dict[str, Any]]] = {"plain": _plain, "float16": _float16, "sharded": _sharded}


def problem(symbol: Symbol, made: Mapping[str, Any]) -> str | None:
    """Return what is wrong with a symbol that should be here; None if nothing is."""
    try:
        value = _value(symbol, made)
    except (ImportError, AttributeError, KeyError) as error:
        return f"{symbol.name} is missing: {error!r}"
    if symbol.signature is None:
        return None
    wrong = _wrong_arguments(symbol, value)
    return f"{symbol.name}{symbol.signature}: {wrong}" if wrong else None


def _value(symbol: Symbol, made: Mapping[str, Any]) -> Any:
    if symbol.made:
        value, names = made[symbol.made], symbol.name.split(".")
        # What follows `smp.state` and `smp.DistributedModel`, or the name of a class.
        names = names[2:] if symbol.made in ("state", "model") else names[-1:]
    else:
        module, names = symbol.place
        value = importlib.import_module(module)
    for name in names:
        value = value[name] if isinstance(value, dict) else getattr(value, name)
    return value


def _wrong_arguments(symbol: Symbol, value: Any) -> str | None:
    known = {"WORLD": smp.WORLD, "pickle": pickle}
    expected = inspect.signature(eval(f"lambda {str(symbol.signature)[1:-1]}: None", known)).parameters
    found = {name: one for name, one in inspect.signature(value).parameters.items() if name != "self"}
    takes_any = any(one.kind is one.VAR_KEYWORD for one in found.values())
    order = list(found)
    for place, (name, parameter) in enumerate(expected.items()):
        if name not in found:
            if takes_any and parameter.kind is parameter.KEYWORD_ONLY:
                continue
            return f"there is no argument {name}"
        own = found[name]
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD and (
            own.kind is not own.POSITIONAL_OR_KEYWORD or order.index(name) != place
        ):
            return f"argument {name} is at another place"
        if own.default != parameter.default and name not in symbol.other_defaults:
            return f"argument {name} is {own.default!r} by default"
    further = [one for name, one in found.items() if name not in expected]
    needed = [
        one.name
        for one in further
        if one.default is one.empty and one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
    ]
    return f"arguments {needed} are needed" if needed else None


def main() -> int:
    """Look at what one job has."""
    name = sys.argv[1]
    smp.init(dict(JOBS[name].config))
    made = _MADE[name]()
    looked_at = [symbol for symbol in SYMBOLS if not symbol.refused and (symbol.made in made or not symbol.made)]
    problems = [found for symbol in looked_at if (found := problem(symbol, made)) is not None]
    if smp.rank() == 0:
        print(json.dumps({"looked_at": [symbol.name for symbol in looked_at], "problems": problems}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
