"""How a step function's arguments are split, and its results merged."""

import copy
from collections import OrderedDict, namedtuple

import numpy as np
import pytest
import torch
from shardwright.errors import ConfigError, ShardwrightError
from shardwright.step.output import StepOutput, merge_microbatches
from shardwright.step.split import Splitter
from torch import nn

Pair = namedtuple("Pair", "left right")


def split(function, args, kwargs=None, count=2, non_split=(), axes=None):
    return Splitter(function, non_split, axes or {}).split(args, kwargs or {}, count)[0]


def train(model, batch, mask=None, *, scale=None):
    """A step function's signature."""


def test_tensors_are_cut_along_axis_0_and_all_else_passes_whole():
    model, batch = nn.Linear(1, 1), torch.arange(6.0).reshape(6, 1)
    parts = split(train, (model, batch), {"scale": 3}, count=3)
    assert [args[0] for args, _ in parts] == [model] * 3
    assert torch.equal(torch.cat([args[1] for args, _ in parts]), batch)
    assert all(args[1].shape == (2, 1) for args, _ in parts)
    assert all(kwargs == {"scale": 3} for _, kwargs in parts)


def test_containers_keep_their_types_and_are_split_inside():
    batch = OrderedDict(a=torch.arange(4), b=[torch.arange(4), None], c=Pair(torch.arange(4), "x"))
    parts = split(train, (None, batch))
    first = parts[0][0][1]
    assert type(first) is OrderedDict
    assert type(first["c"]) is Pair
    assert first["a"].tolist() == first["b"][0].tolist() == first["c"].left.tolist() == [0, 1]
    assert parts[1][0][1]["c"].left.tolist() == [2, 3]


def test_a_0_dim_tensor_passes_whole():
    parts = split(train, (None, torch.arange(4)), {"scale": torch.tensor(2.0)})
    assert all(kwargs["scale"].item() == 2.0 for _, kwargs in parts)


def test_another_axis_can_be_given_by_name():
    parts = split(train, (None, torch.zeros(3, 4)), axes={"batch": 1})
    assert [tuple(args[1].shape) for args, _ in parts] == [(3, 2), (3, 2)]


def test_named_arguments_pass_whole():
    parts = split(train, (None, torch.arange(4), torch.arange(5)), non_split=["mask"])
    assert [args[2].shape[0] for args, _ in parts] == [5, 5]


def test_objects_split_themselves():
    class Sliced:
        def smp_slice(self, num_mb, mb, axis):
            return (num_mb, mb, axis)

    parts = split(train, (None, Sliced()), axes={"batch": 1})
    assert [args[1] for args, _ in parts] == [(2, 0, 1), (2, 1, 1)]
    assert split(train, (None, Sliced()), count=1)[0][0][1] == (1, 0, 0)


def test_a_batch_that_does_not_divide_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"batch of .*train has 5 samples, which 2 microbatches do not divide evenly"):
        split(train, (None, torch.zeros(5)))


def test_tensors_that_disagree_are_refused_by_name():
    with pytest.raises(ConfigError, match=r"batch has 4, mask has 6; .*non_split_inputs"):
        split(train, (None, torch.zeros(4), torch.zeros(6)))


def test_an_axis_that_a_tensor_has_not_is_refused():
    with pytest.raises(ConfigError, match=r"batch of .* has 1 axes, so it cannot be split along axis 1"):
        split(train, (None, torch.zeros(4)), axes={"batch": 1})


def test_options_that_name_no_argument_are_refused():
    with pytest.raises(ConfigError, match="non_split_inputs names 'lables', which is not an argument"):
        Splitter(train, ["lables"], {})


def test_results_become_step_outputs_in_the_same_structure():
    results = [{"loss": torch.tensor(float(m)), "pair": Pair(torch.ones(2) * m, "x"), "n": 7} for m in range(3)]
    merged = merge_microbatches(results)
    assert merged["loss"].reduce_mean().item() == 1.0
    assert merged["loss"].reduce_sum().item() == 3.0
    assert merged["loss"].concat().tolist() == merged["loss"].stack().tolist() == [0.0, 1.0, 2.0]
    assert merged["pair"].left.concat().tolist() == [0, 0, 1, 1, 2, 2]
    assert merged["pair"].right == "x"
    assert merged["n"] == 7


def test_values_that_differ_by_microbatch_come_as_a_list():
    assert merge_microbatches([1, 2]) == [1, 2]


def test_shapes_that_differ_by_microbatch_cannot_be_averaged():
    output = StepOutput([torch.zeros(2), torch.zeros(3)])
    assert output.concat().shape == (5,)
    with pytest.raises(ShardwrightError, match=r"\[\(2,\), \(3,\)\]"):
        output.reduce_mean()


def test_the_output_of_one_microbatch_is_used_as_its_tensor():
    output = StepOutput([torch.tensor(2.5)])
    assert output.item() == float(output) == 2.5
    assert f"{output:.2f}" == "2.50"
    assert sum([output, output]) == output + output == 2 * output == 5.0
    assert output > 2
    assert output == 2.5
    assert not output == 2.0  # noqa: SIM201
    assert not torch.isnan(output)
    assert torch.stack([output, output]).tolist() == [2.5, 2.5]
    assert (torch.ones(1) + output).tolist() == [3.5]
    assert np.asarray(output) == 2.5
    many = StepOutput([torch.arange(4.0)])
    assert many.shape == (4,)
    assert list(many) == many.tolist() == many[:].tolist() == [0.0, 1.0, 2.0, 3.0]


USES = {
    "item": lambda output: output.item(),
    "float": float,
    "format": lambda output: f"{output:.3f}",
    "sum": lambda output: sum([output, output]),
    "add to a tensor": lambda output: torch.zeros(()) + output,
    "compare": lambda output: output < 1,
    "equal": lambda output: output == 1.0,
    "bool": bool,
    "index": lambda output: output[0],
    "iterate": list,
    "length": len,
    "torch": lambda output: torch.isnan(output),
    "torch in a list": lambda output: torch.stack([output]),
    "numpy": lambda output: np.mean(output),
    "detach": lambda output: output.detach().cpu(),
}


@pytest.mark.parametrize("use", USES)
def test_the_output_of_several_microbatches_is_no_number_and_says_what_to_write(use):
    output = StepOutput([torch.tensor(1.0), torch.tensor(3.0)])
    with pytest.raises((ShardwrightError, AttributeError), match=r"2 microbatches.*\.reduce_mean\(\)"):
        USES[use](output)
    assert f"{output}" == "StepOutput(2 microbatches)"
    assert output == output
    assert output in [None, output]
    assert copy.copy(output).reduce_mean() == 2.0
    assert copy.deepcopy(output).reduce_mean() == 2.0


def test_an_output_has_no_backward_and_nothing_that_tensors_do_not_have():
    with pytest.raises(AttributeError, match=r"model\.backward\(loss\) in the step function"):
        StepOutput([torch.ones(())]).backward()
    with pytest.raises(AttributeError, match="'losses'"):
        _ = StepOutput([torch.ones(())]).losses
