"""Marked modules are replaced when a model is wrapped, and the model computes what it did."""

import io
from pathlib import Path

import pytest
import torch
from rich.console import Console
from shardwright.tensor_parallel.gradients import gradients_of
from shardwright.tensor_parallel.replacement import Replacement, Result
from shardwright.tensor_parallel.report import render
from torch import nn

from tests.jobs.ranks import outputs_of_ranks

PROGRAM = Path(__file__).with_name("replaced.py")


@pytest.mark.parametrize("degree", [1, 2])
def test_marked_modules_are_replaced(degree: int) -> None:
    outputs = outputs_of_ranks(PROGRAM, str(degree), ranks=degree)
    assert all("replacement holds" in output for output in outputs)
    logged = [
        [line for line in output.splitlines() if line.startswith("log: Tensor parallelism")] for output in outputs
    ]
    assert [len(lines) for lines in logged] == ([4, 0] if degree == 2 else [0])
    assert len({tuple(line for line in output.splitlines() if line.startswith("refused: ")) for output in outputs}) == 1


def test_parameters_keep_gradients_attributes_and_flags() -> None:
    outputs = outputs_of_ranks(PROGRAM.with_name("carried.py"), ranks=2)
    assert all("carried holds" in output for output in outputs)


def test_gradients_are_reordered_as_weights_are() -> None:
    module = nn.Linear(3, 2).double()
    module.weight.grad = torch.arange(6.0).double().view(2, 3)

    def reordered() -> dict[str, torch.Tensor]:
        state = module.state_dict(keep_vars=True)
        padded = torch.cat([state["weight"].mT, state["weight"].new_zeros(1, 2)])
        return {"first": padded[:1], "rest": padded[1:], "shift": state["bias"]}

    found = gradients_of(module, reordered)
    assert found is not None
    assert {name: one.tolist() for name, one in found.items()} == {
        "first": [[0.0, 3.0]],
        "rest": [[1.0, 4.0], [2.0, 5.0], [0.0, 0.0]],
    }
    for computed in (lambda: {"sum": module.weight.sum(0)}, lambda: {"a": module.weight, "b": module.weight[:1]}):
        assert gradients_of(module, computed) is None
    assert module.bias.grad is None


def test_the_table_has_one_line_for_modules_that_fared_alike() -> None:
    replacements = (
        Replacement("", "Model", reason="there is none", supported=False),
        *(Replacement(f"h.{i}.fc", "Linear", "DistributedLinear") for i in range(3)),
        *(Replacement(f"h.{i}.fc.act", "GELU", reason=f"'h.{i}' shares") for i in range(3)),
        *(Replacement(f"h.{i}.fc.act.inner", "Linear", reason="an ancestor", part_of=f"h.{i}.fc") for i in range(3)),
        Replacement("head", "Head", "DistributedLinear", fresh=("a", "b", "c", "d", "e")),
    )
    console = Console(file=io.StringIO(), width=120)
    render(Result(nn.Identity(), replacements, ("unheard_of",)), 2, console)
    text = console.file.getvalue()
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line.startswith("│")]
    assert rows == [
        ["h.*.fc", "3", "Linear", "replaced by DistributedLinear"],
        ["h.*.fc.act", "3", "GELU", "skipped: 'h.0' shares"],
        ["head", "1", "Head", "replaced by DistributedLinear, with fresh weights: a, b, c, d, ..."],
    ]
    assert "parts of replaced modules: 3\n" in text
    assert "without a distributed implementation: Model" in text
    assert "arguments that no distributed module takes: unheard_of" in text
