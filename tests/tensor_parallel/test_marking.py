"""Marks: who gets one, what undoes it, and what becomes of it."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref

import pytest
import shardwright as smp
import torch
from shardwright.tensor_parallel.marking import TensorParallelMark, mark_of
from torch import nn

from tests.jobs.patience import HANG_SECONDS


class LateInit(nn.Module):
    """Calls ``nn.Module.__init__`` late and twice."""

    def __init__(self) -> None:
        self.__dict__["early"] = 1
        nn.Module.__init__(self)
        super().__init__()
        self.inner = nn.Linear(2, 2)


def marked(module: nn.Module) -> bool:
    mark = mark_of(module)
    return mark is not None and mark.enabled


def test_modules_created_inside_are_marked_and_no_others() -> None:
    original = nn.Module.__init__
    before = nn.Linear(2, 2)
    with smp.tensor_parallelism(fused=False):
        inside = nn.TransformerEncoderLayer(4, 2, 8)
        late = LateInit()
    after = nn.Linear(2, 2)
    assert all(
        mark_of(part) == TensorParallelMark(True, {"fused": False}) for part in (*inside.modules(), *late.modules())
    )
    assert not marked(before)
    assert not marked(after)
    assert nn.Module.__init__ is original


def test_the_innermost_context_wins_with_its_own_arguments_alone() -> None:
    with smp.tensor_parallelism(a=1):
        with smp.tensor_parallelism(False):
            off = nn.Linear(2, 2)
            with smp.tensor_parallelism(b=2):
                inner = nn.Linear(2, 2)
        outer = nn.Linear(2, 2)
    assert mark_of(off) == TensorParallelMark(False)
    assert mark_of(inner) == TensorParallelMark(True, {"b": 2})
    assert mark_of(outer) == TensorParallelMark(True, {"a": 1})


def test_a_context_that_fails_leaves_nothing_behind() -> None:
    original = nn.Module.__init__
    with pytest.raises(ZeroDivisionError), smp.tensor_parallelism():
        raise ZeroDivisionError
    assert nn.Module.__init__ is original
    assert not marked(nn.Linear(2, 2))


def test_other_threads_and_other_contexts_do_not_interfere() -> None:
    original = nn.Module.__init__
    opened, closed = threading.Event(), threading.Event()
    made: list[nn.Module] = []

    def other() -> None:
        with smp.partition(0):
            opened.wait(HANG_SECONDS)
            made.append(nn.Linear(2, 2))
        closed.set()

    thread = threading.Thread(target=other)
    thread.start()
    with smp.tensor_parallelism():
        opened.set()
        closed.wait(HANG_SECONDS)  # the context that was opened first is closed first
        here = nn.Linear(2, 2)
    thread.join()
    assert marked(here)
    assert not marked(made[0])
    assert nn.Module.__init__ is original


def test_a_subtree_is_marked_and_unmarked_and_the_last_word_counts() -> None:
    with smp.tensor_parallelism():
        model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    smp.set_tensor_parallelism(model[1], False)
    assert [marked(part) for part in model.modules()] == [True, True, False, False]
    smp.set_tensor_parallelism(model, bias=False)
    assert all(mark_of(part) == TensorParallelMark(True, {"bias": False}) for part in model.modules())


def test_marks_go_with_copies_and_away_with_modules() -> None:
    with smp.tensor_parallelism(a=1):
        layer = nn.Linear(2, 2)
    assert (
        mark_of(copy.deepcopy(layer))
        == mark_of(pickle.loads(pickle.dumps(layer)))
        == TensorParallelMark(True, {"a": 1})
    )
    assert list(layer.state_dict()) == ["weight", "bias"]
    gone = weakref.ref(layer)
    del layer
    gc.collect()
    assert gone() is None


def test_model_creation_sets_the_dtype_and_marks() -> None:
    with smp.model_creation(tensor_parallelism=True, dtype=torch.bfloat16, a=1):
        layer = nn.Linear(2, 2)
    assert layer.weight.dtype == torch.bfloat16
    assert mark_of(layer) == TensorParallelMark(True, {"a": 1})
    with smp.model_creation():
        plain = nn.Linear(2, 2)
    assert plain.weight.dtype == torch.get_default_dtype() == torch.float32
    assert not marked(plain)
    with pytest.raises(ZeroDivisionError), smp.model_creation(dtype=torch.float64):
        raise ZeroDivisionError
    assert torch.get_default_dtype() == torch.float32


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(smp.ConfigError, match="enabled is 1; allowed: True and False"), smp.tensor_parallelism(1):
        pass
    with pytest.raises(smp.ConfigError, match="enabled is 'no'"):
        smp.set_tensor_parallelism(nn.Linear(1, 1), "no")
    with pytest.raises(smp.ConfigError, match="was given a list"):
        smp.set_tensor_parallelism([nn.Linear(1, 1)])
    for dtype in (torch.int64, "float32"):
        with pytest.raises(smp.ConfigError, match="dtype is"), smp.model_creation(dtype=dtype):
            pass
