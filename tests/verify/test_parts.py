"""The parts of a verification that only compute: fingerprints, errors, tolerances, and who is to blame."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from shardwright import _core
from shardwright.values import decode, encode, pack, registry, unpack
from shardwright.verify.evidence import inputs_of, with_inputs
from shardwright.verify.fingerprint import Fingerprint, distance, fingerprint
from shardwright.verify.locate import Side, ValueFlow, first_backward, first_forward
from shardwright.verify.measure import error_of, error_of_leaf, tolerance_for
from shardwright.verify.record import ModuleRecord
from shardwright.verify.report import Departure, Report, Row


def travelled(value: Any) -> Any:
    """What another rank gets."""
    spec, tensors = _core.flatten(value, registry)
    return spec.build(unpack(pack(tensors, [False] * len(tensors))), registry)


@pytest.mark.parametrize("size", [1, 7, 4096, 5000, 4096 * 256 + 17])
def test_a_distance_is_estimated_from_fingerprints(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    tensor = torch.randn(size, generator=generator, dtype=torch.float64)
    noise = torch.randn(size, generator=generator, dtype=torch.float64) * 1e-3
    estimated = distance(fingerprint(tensor + noise), fingerprint(tensor))
    true = float((noise.square().mean() / tensor.square().mean()).sqrt())
    assert true / 3 < estimated < 3 * true
    assert distance(fingerprint(tensor), fingerprint(tensor.clone())) == 0


@pytest.mark.parametrize("place", [0, 4095, 4096, 70_000])
def test_a_single_element_is_seen_wherever_it_is(place: int) -> None:
    tensor = torch.ones(80_000, dtype=torch.float64)
    changed = tensor.clone()
    changed[place] += 1e-4
    assert distance(fingerprint(changed), fingerprint(tensor)) > 1e-8


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([True, False]),
        torch.arange(5),
        torch.tensor([1 + 2j, -1j]),
        torch.tensor([math.nan, math.inf, -math.inf, 1.0]),
        torch.zeros(0, 3),
        torch.eye(3).to_sparse(),
        torch.ones((), dtype=torch.bfloat16),
    ],
)
def test_tensors_of_every_kind_have_fingerprints(tensor: torch.Tensor) -> None:
    made = fingerprint(tensor)
    assert travelled(made) == made
    assert distance(made, fingerprint(tensor.clone())) == 0


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (torch.ones(2), torch.ones(3)),
        (torch.ones(2), torch.ones(2, dtype=torch.float64)),
        (torch.tensor([1.0, math.nan]), torch.tensor([1.0, 2.0])),
        (torch.tensor([1.0]), torch.tensor([0.0])),
    ],
)
def test_what_cannot_be_compared_is_infinitely_wrong(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert distance(fingerprint(found), fingerprint(expected)) == math.inf
    assert error_of(found, expected)[0] == math.inf


def test_equal_infinities_and_nans_are_equal() -> None:
    tensor = torch.tensor([math.inf, -math.inf, math.nan, 1.0])
    assert error_of(tensor, tensor.clone()) == (0.0, "")


def test_a_gradient_that_is_missing_says_on_which_side() -> None:
    assert error_of(None, None) == (0.0, "")
    assert error_of(None, torch.ones(1)) == (math.inf, "none on the ranks")
    assert error_of(torch.ones(1), None) == (math.inf, "none in one process")


def test_other_results_than_tensors_are_compared_too() -> None:
    assert error_of_leaf("text", "text") == (0.0, "")
    assert error_of_leaf(1.0, 1.0 + 1e-12)[0] == pytest.approx(1e-12, rel=1e-3)
    assert error_of_leaf(1, 2)[0] == math.inf


def test_the_coarsest_dtype_sets_the_tolerance() -> None:
    assert tolerance_for(["float64"]) == ("float64", 1e-10)
    assert tolerance_for(["float64", "float32", "int64"]) == ("float32", 1e-5)
    assert tolerance_for(["float32", "bfloat16", "float16"])[0] == "bfloat16"


def values(*numbers: float) -> Fingerprint:
    return fingerprint(torch.tensor(numbers, dtype=torch.float64))


def test_the_first_forward_departure_is_the_first_in_execution_order() -> None:
    expected = ModuleRecord({("inner", 0, 0): [(values(1.0), True)], ("", 0, 0): [(values(2.0), True)]})
    found = ModuleRecord({("", 0, 0): [(values(3.0), True)], ("inner", 0, 0): [(values(1.5), True)]})
    departure = first_forward(Side.of({4: travelled(found)}), expected, 0, 1e-10)
    assert departure is not None
    assert (departure[0].module, departure[0].rank) == ("inner", 4)
    assert departure[0].error == pytest.approx(0.5)


def test_modules_called_more_often_on_one_side_are_left_to_those_around_them() -> None:
    expected = ModuleRecord({("inner", 0, 0): [(values(1.0), False)], ("", 0, 0): [(values(2.0), False)]})
    found = ModuleRecord({("inner", 0, 0): [(values(5.0), False)], ("inner", 0, 1): [(values(1.0), False)]})
    found.calls["", 0, 0] = [(values(2.0), False)]
    assert first_forward(Side.of({0: found}), expected, 0, 1e-10) is None


def test_gradients_of_activations_name_a_module_but_fail_nothing() -> None:
    key = (("first", 0, 0), 0)
    expected, found = (
        ModuleRecord(gradients={key: values(1.0)}),
        ModuleRecord(gradients={key: values(2.0)}, watched={key}),
    )
    found.calls["first", 0, 0] = expected.calls["first", 0, 0] = []
    flow = ValueFlow(users={key: [("second", 0, 0)]})
    sides = {0: (Side.of({0: found}), expected)}
    assert first_backward(sides, flow, {"first.weight": (0.0, "")}, ["first", "second"], 1e-10) is None
    departure = first_backward(sides, flow, {"first.weight": (1.0, "")}, ["first", "second"], 1e-10)
    assert departure is not None
    assert departure.module == "second"


def test_inputs_of_other_replicas_take_the_place_of_rank_0s() -> None:
    local = object()
    mine, theirs = ({"x": torch.zeros(2), "n": 1}, local), ({"x": torch.ones(2), "n": 2}, object())
    (batch, kept), kwargs = with_inputs(mine, {"flag": True}, inputs_of(theirs, {"flag": False}), 3)
    assert torch.equal(batch["x"], torch.ones(2))
    assert (batch["n"], kwargs, kept is local) == (2, {"flag": False}, True)
    with pytest.raises(ValueError, match="rank 3 gave the step function other arguments than rank 0"):
        with_inputs(mine, {}, inputs_of(({"y": 1}, local), {}), 3)


def test_a_report_is_the_same_after_it_has_travelled() -> None:
    report = Report(
        rows=(Row(kind="gradient", name="a.weight", rank=1, error=math.inf, detail="none on the ranks"),),
        first_departure=Departure(module="a", phase="backward", what="departs", error=math.inf, microbatch=2),
        notes=("note",),
        dtype="float64",
        tolerance=1e-10,
        num_module_calls=4,
        requests=(1, 2),
        holding=(0, 1),
    )
    assert decode(*encode(report)) == report
    assert not report.exact
    assert "NOT exact. First departure: backward of module 'a' (replica 0, microbatch 2, call 0)" in str(report)
    assert "note: note" in str(report)
