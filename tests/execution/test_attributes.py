"""Each microbatch has its own values of the attributes that forwards set before they read them."""

from __future__ import annotations

from shardwright.execution.attributes import Attributes
from torch import nn


def test_a_microbatch_finds_what_it_set_and_the_last_one_s_values_stay() -> None:
    module, attributes = nn.Module(), Attributes()
    attributes.add(module, "kept")
    attributes.enter(0)
    module.kept = "of 0"
    attributes.enter(1)
    module.kept = "of 1"
    attributes.enter(0)
    assert module.kept == "of 0"
    attributes.enter(2)
    attributes.enter(1)
    assert module.kept == "of 1"
    attributes.enter(0)
    attributes.end_step()
    assert module.kept == "of 0", "microbatch 2 set nothing, and found what microbatch 0 had left"


def test_an_attribute_that_was_not_there_is_not_there_again() -> None:
    module, attributes = nn.Module(), Attributes()
    attributes.add(module, "kept")
    attributes.enter(0)
    attributes.enter(1)
    module.kept = "of 1"
    attributes.enter(0)
    assert not hasattr(module, "kept")
    attributes.end_step()
    assert module.kept == "of 1"


def test_attributes_may_come_while_a_microbatch_runs() -> None:
    module, attributes = nn.Module(), Attributes()
    attributes.enter(0)
    attributes.enter(1)
    attributes.add(module, "kept")
    module.kept = "of 1"
    attributes.enter(0)
    module.kept = "of 0"
    attributes.end_step()
    assert module.kept == "of 1"
