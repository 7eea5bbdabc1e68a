"""What a script reads and changes between a load and the first step, in which the model is divided."""

from __future__ import annotations

import os
import shutil
from typing import Any

import pytest
import shardwright as smp
import torch

from tests.checkpoint.models import Odd, Training

State = dict[str, torch.Tensor]


def _state(model: smp.DistributedModel) -> State:
    return {name: one.clone() for name, one in model.state_dict().items()}


def _same(state: dict[str, Any], expected: State) -> None:
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in expected)


def _saved(folder: str) -> tuple[Training, State]:
    """A training that is saved, and the model's state."""
    training = Training()
    training.run(2)
    smp.save_checkpoint(folder, "a")
    return training, _state(training.model)


def _waiting(folder: str) -> Training:
    """A training that has been loaded, and whose model is not divided yet."""
    training = Training(seed=99)
    smp.resume_from_checkpoint(folder, "a", model=training.model, optimizer=training.optimizer)
    assert not training.model.placement.partitioned
    return training


def _divide(training: Training) -> None:
    """Run a step that changes no weights."""
    training.optimizer.zero_grad()
    predict(training.model.eval(), torch.zeros(4, 7))


@smp.step
def predict(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model(x)  # type: ignore[no-any-return]


def weights_are_those_loaded(folder: str) -> None:
    """A state dict and a full checkpoint before the first step have what was loaded; other state is refused."""
    first, expected = _saved(folder)
    training = _waiting(folder)
    _same(training.model.state_dict(), expected)
    smp.save_checkpoint(folder, "full", partial=False, model=training.model)
    whole = smp.load(os.path.join(folder, "full"), partial=False)
    whole.pop("_smp_is_partial", None)
    _same(whole, expected)
    message = "before the first step: AdamW gets its state, that of checkpoint 'a', in the first step"
    with pytest.raises(smp.CheckpointError, match=message):
        smp.save_checkpoint(folder, "b", model=training.model)
    with pytest.raises(smp.ShardwrightError, match=message):
        training.optimizer.state_dict()
    with pytest.raises(smp.ShardwrightError, match=message):
        training.optimizer.local_state_dict()
    _divide(training)
    _same(training.model.state_dict(), expected)
    own = list(first.optimizer.state.values())
    assert len(own) == len(training.optimizer.state) > 0
    for one, other in zip(own, training.optimizer.state.values(), strict=True):
        assert all(torch.equal(one[key], other[key]) for key in one)


def what_comes_later_counts(folder: str) -> None:
    """A learning rate, weights and the optimizer's state that the script sets before the first step stay."""
    first, expected = _saved(folder)
    others = {name: torch.full_like(one, 1) for name, one in expected.items()}
    state = first.optimizer.state_dict()

    training = _waiting(folder)
    assert training.optimizer.param_groups[0]["lr"] == first.optimizer.param_groups[0]["lr"] != 1e-2
    training.optimizer.param_groups[0]["lr"] = 0.5
    training.model.load_state_dict(others)
    _divide(training)
    assert training.optimizer.param_groups[0]["lr"] == 0.5
    _same(training.model.state_dict(), others)
    assert len(training.optimizer.state) > 0

    training = _waiting(folder)
    training.optimizer.load_state_dict({**state, "state": {}})
    training.optimizer.param_groups[0]["lr"] = 0.25
    assert training.optimizer.state_dict()["param_groups"][0]["lr"] == 0.25
    _divide(training)
    assert training.optimizer.param_groups[0]["lr"] == 0.25
    assert not training.optimizer.state
    _same(training.model.state_dict(), expected)


def delayed_weights_are_refused(folder: str) -> None:
    """No rank has room for the whole model."""
    _, expected = _saved(folder)
    with smp.delay_param_initialization():
        module = Odd()
    training = Training(module=module)
    smp.resume_from_checkpoint(folder, "a", model=training.model, optimizer=training.optimizer)
    with pytest.raises(smp.ShardwrightError, match="the weights of checkpoint 'a' come with the first step"):
        training.model.state_dict()
    _divide(training)
    _same(training.model.state_dict(), expected)


def lost_before_the_first_step(folder: str) -> None:
    """The first step fails; later ones say why, until weights are loaded."""
    first, expected = _saved(folder)
    state = first.optimizer.state_dict()
    training = _waiting(folder)
    smp.barrier()
    if smp.rank() == 0:
        shutil.rmtree(os.path.join(folder, "a_partial"))
    smp.barrier()
    for message in ("was removed or replaced while it was read", "weights may have been loaded in part"):
        with pytest.raises(smp.ShardwrightError, match=message):
            _divide(training)
    training.model.load_state_dict(expected)
    training.optimizer.load_state_dict(state)
    _divide(training)
    _same(training.model.state_dict(), expected)
    training.run(1)
