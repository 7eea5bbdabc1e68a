"""What would be silently wrong over ranks is exact, or refused on every rank with a hint.

All scenarios run in one job of two ranks; a refused one leaves nothing behind that would disturb the next.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.errors import stored
from tests.jobs.ranks import run_ranks

ROOT = Path(__file__).parents[2]
TOLERANCE = 1e-12


class Exact(NamedTuple):
    """Trained as plain torch does, with requests that crossed."""


class Refused(NamedTuple):
    """Raised where it stands, and a ``RemoteError`` with the same text on the other rank.

    Attributes:
        type: The exception's type.
        says: What its text says of the cause.
        hint: What its text says is to be done.
        ranks: Where it is raised as it is; elsewhere it is a ``RemoteError``.
    """

    type: str
    says: str
    hint: str
    ranks: tuple[int, ...] = (0,)


_BACKWARD = Refused("FrameError", "reaches a module on another rank", "call model.backward(loss) in the step function")
_ATTRIBUTE = Refused("FrameError", "was set in the step function, which runs on pp_rank 0 only", "Set it outside")
_HOOK = Refused("FrameError", "a hook on a parameter was registered", "register it outside the step function")
_OPTIMIZER = Refused("FrameError", "which runs once per microbatch", "outside the step function, once per step")
_OUTSIDE = Refused("FrameError", "made outside the step function", "Make it a parameter of the module")
_SWAPPED = Refused("NotOwnedError", "'there.linear.weight' lives on pp_rank 1", "Change weights on every rank before")
_CLIP = Refused("NotOwnedError", "would clip by the norm of its own part", "Use smp.clip_grad_norm_(", (0, 1))
_COPY = Refused("ShardwrightError", "copy.deepcopy of a smp.DistributedModel", "use smp.AveragedModel(model", (0, 1))
_MADE = "Make it in __init__, or run one forward of the module before"
_UNTRACED = Refused("FrameError", "and skip_tracing is on", "Disable skip_tracing, or return the value")

EXPECTED: dict[str, Exact | Refused] = {
    "a plain step": Exact(),
    "backward of the loss": _BACKWARD,
    "backward imported by name": _BACKWARD,
    "backward with create graph": _BACKWARD,
    "model backward with create graph": Refused("TypeError", "create_graph", "unexpected keyword argument"),
    "autograd grad of parameters": _BACKWARD,
    "autograd grad imported by name": _BACKWARD,
    "a gradient penalty": _BACKWARD,
    "torch func grad": Refused("FrameError", "under a torch.func transform", "apply it inside one module"),
    "the gradient of an input made in the step": Exact(),
    "a batch that needs a gradient": _OUTSIDE,
    "a loss module with parameters outside the model": Refused(
        "FrameError",
        "parameter 'weight' of shape (6,) of a LearnedLoss",
        "Put its module (a loss with weights, say) inside",
    ),
    "a learned tensor outside the model": _OUTSIDE,
    "a loss module inside the model": Exact(),
    "zero grad in the step": _OPTIMIZER,
    "optimizer step in the step": _OPTIMIZER,
    "optimizer zero grad in the step": _OPTIMIZER,
    "step of an unwrapped optimizer in the step": _OPTIMIZER,
    "zero grad of an unwrapped optimizer in the step": _OPTIMIZER,
    "a gradient of another rank read in the step": Refused(
        "NotOwnedError", "the gradient of parameter 'there.linear.weight' was read", "outside the step function"
    ),
    "eval mode in the step": _ATTRIBUTE,
    "an attribute set in the step on a module elsewhere": _ATTRIBUTE,
    "an attribute set in the step on a module here": _ATTRIBUTE,
    "a module without parameters changed in the step": _ATTRIBUTE,
    "an attribute of a child elsewhere read in the step": Refused(
        "NotOwnedError", "attribute 'there.penalty' is set in a forward on pp_rank 1", "Let the module return the value"
    ),
    "an attribute of a child elsewhere read by its parent with pins": Refused(
        "PartitionError",
        "reads there.penalty, which the other sets in its forward",
        "let one return what the other needs",
    ),
    "an attribute of a child read by its parent with an automatic partition": Exact(),
    "an attribute read after a module elsewhere has run": Exact(),
    "an attribute written on a sibling": Exact(),
    "a cache object that children share": Exact(),
    "a count in a reentrant checkpoint": Exact(),
    "a count that a reentrant checkpoint computes with": Refused(
        "FrameError", "changed what a module keeps inside torch.utils.checkpoint", "use_reentrant=False"
    ),
    "a cache object that children on two ranks share": Refused(
        "PartitionError", "reads one.cache, which the other sets in its forward", "place them on one rank"
    ),
    "a global variable that children share": Exact(),
    "a global variable that children on two ranks share": Refused(
        "PartitionError", "uses the global variable tests.silently_wrong.state.LAST", "place them on one rank"
    ),
    "state that a module keeps from call to call": Exact(),
    "state of a module without parameters that two modules call": Exact(),
    "hooks of tied and reused parameters": Exact(),
    "a parameter hook registered in the step": _HOOK,
    "a hook of an own parameter registered in the step": _HOOK,
    "a post accumulate hook registered in the step": _HOOK,
    "a module elsewhere called in a thread of the script": Refused(
        "FrameError", "in thread 'prefetch_0'", "call modules in the thread in which"
    ),
    "a hook on the node of a result": Refused("FrameError", "that node is on another rank", "Use register_hook of"),
    "freezing in the step": Refused("FrameError", "requires_grad of a parameter", "outside the step function"),
    "freezing between steps": Exact(),
    "a list that a module elsewhere appends to": Refused(
        "FrameError", "module 'there' changed a list that it was given", "return", (1,)
    ),
    "other weights by functional call": _SWAPPED,
    "a weight assigned after the partition": _SWAPPED,
    "torch clips all parameters": _CLIP,
    "torch clips local parameters": _CLIP,
    "clipping imported by name": _CLIP,
    "clipping local parameters imported by name": _CLIP,
    "the norm of local gradients by torch": _CLIP,
    "torch clips something else": Exact(),
    "smp clips": Exact(),
    "a deep copy after the partition": _COPY,
    "a deep copy before the partition": _COPY,
    "equal averages of smp": Exact(),
    "exponential averages of smp": Exact(),
    "averages of buffers of smp": Exact(),
    "averaged model of torch": _COPY,
    "averaged model of torch before the partition": _COPY,
    "averaged model of torch of the inner module": Refused(
        "NotOwnedError", "copy.deepcopy needs the values of parameter", "smp.AveragedModel", (0, 1)
    ),
    "a gradient scaler": Exact(),
    "a gradient scaler and a fused optimizer": Exact(),
    "a gradient scaler and an optimizer for each stage": Exact(),
    "a gradient scaler that unscales in the step": _OPTIMIZER,
    "a gradient scaler that is updated in the step": _OPTIMIZER,
    "a gradient scaler whose scale is set in the step": _OPTIMIZER,
    "parametrize cached around a module elsewhere": Refused(
        "FrameError", "'there', which rank 1 owns, was called inside parametrize.cached()", "Enter it inside one module"
    ),
    "a parameter made in a forward": Refused(
        "FrameError", "parameter 'made' of shape (6,) was made in module 'again'", _MADE
    ),
    "a module made in a forward elsewhere": Refused("FrameError", "parameter 'made.weight' of shape (6, 6)", _MADE),
    "a module made in a forward and put in a list": Refused("FrameError", "was made in module 'there.more'", _MADE),
    "a module made in a forward and filled later": Refused("FrameError", "was made in module 'there.made'", _MADE),
    "a module without parameters made in a forward": Exact(),
    "untraced a plain step": Exact(),
    "untraced an attribute that a module elsewhere sets": _UNTRACED._replace(ranks=(1,)),
    "untraced an attribute that is kept during a call": _UNTRACED,
    "untraced an attribute that does not change": Exact(),
    "untraced a weight of a module elsewhere": Refused(
        "NotOwnedError", "needs the values of parameter 'there.linear.weight'", "(smp.set_partition)"
    ),
    "untraced a buffer of a module elsewhere": Refused(
        "NotOwnedError", "needs the values of buffer 'there.mean'", "(smp.set_partition)"
    ),
    "hidden states and attentions of llama": Exact(),
    "hidden states and attentions of bert": Exact(),
    "router logits of mixtral": Exact(),
    "hidden states of a model that was evaluated": Exact(),
    "attentions of a model that was generated from and copied": Exact(),
    "router logits of a model that was trained": Exact(),
    "a model that makes caches": Exact(),
    "a model that keeps states for generation": Exact(),
    "a cache that the script gives": Refused(
        "FrameError", "what it has added is there only", "generate under torch.no_grad()"
    ),
}


class Ran(NamedTuple):
    """What the job's ranks said of each scenario, and wrote to standard error."""

    outcomes: list[dict[str, dict[str, Any]]]
    errors: list[str]


@pytest.fixture(scope="module")
def ran() -> Ran:
    """Both ranks, through all scenarios."""
    ended = run_ranks("-m", "tests.silently_wrong.rank", folder=ROOT)
    assert [each.code for each in ended] == [0, 0], [each.err for each in ended]
    outcomes = [{(line := json.loads(text))["scenario"]: line for text in each.out.splitlines()} for each in ended]
    return Ran(outcomes, [each.err for each in ended])


def test_every_scenario_has_an_expectation(ran: Ran) -> None:
    assert [list(outcomes) for outcomes in ran.outcomes] == [list(ran.outcomes[0])] * 2
    assert set(ran.outcomes[0]) == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_it_is_exact_or_refused_with_the_cure(ran: Ran, name: str) -> None:
    expected = EXPECTED[name]
    for rank, outcomes in enumerate(ran.outcomes):
        found = outcomes[name]
        if isinstance(expected, Exact):
            assert found["outcome"] == "exact", found
            assert found["compared"] > 0
            assert found["worst"] <= TOLERANCE
            continue
        assert found["outcome"] == "refused", found
        assert found["type"] == (expected.type if rank in expected.ranks else "RemoteError"), found
        assert expected.says in found["text"]
        assert expected.hint in found["text"]
    if isinstance(expected, Exact):
        crossed = ran.outcomes[0][name]["crossed"]
        assert crossed["forward"] > 0
        assert crossed["backward"] > 0


def test_what_refusals_say_is_what_is_stored(ran: Ran) -> None:
    refused = {name: expected for name, expected in EXPECTED.items() if isinstance(expected, Refused)}
    texts = {name: ran.outcomes[expected.ranks[0]][name] for name, expected in refused.items()}
    stored.check("refusals", {name: f"{found['type']}: {found['text']}" for name, found in texts.items()})


def test_what_no_trace_finds_is_said_once_in_a_job(ran: Ran) -> None:
    assert [errors.count("skip_tracing: modules that share lists") for errors in ran.errors] == [1, 0]


def test_that_caches_are_switched_off_is_said_once_in_a_job(ran: Ran) -> None:
    assert [errors.count("use_cache was switched off") for errors in ran.errors] == [1, 0]
