"""A rank of four, two pipelines of two, that exchanges objects in every way; it says which scenarios it has passed."""

from __future__ import annotations

import pickle
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import shardwright as smp
import torch
from shardwright.values.tensors import _DTYPES
from torch import nn

GROUPS = [smp.WORLD, smp.MP_GROUP, smp.PP_GROUP, smp.DP_GROUP, smp.RDP_GROUP, smp.TP_GROUP]
BY = smp.RankType.WORLD_RANK


class Bag(dict):  # type: ignore[type-arg]
    """A dictionary with an attribute."""

    label = "none"


class Ordered(OrderedDict):  # type: ignore[type-arg]
    """An ordered dictionary of the script's own."""


class Attributes(dict):  # type: ignore[type-arg]
    """A dictionary whose keys are attributes."""

    def __init__(self, **items: Any) -> None:
        super().__init__(**items)
        self.__dict__ = self


class Lists(defaultdict):  # type: ignore[type-arg]
    """A defaultdict of the script's own."""


class Point(NamedTuple):
    x: Any
    y: Any


@smp.register_type
@dataclass(frozen=True, slots=True)
class Sample:
    inputs: torch.Tensor
    weight: float
    seen: int = field(init=False, default=0)


@smp.register_type
class Window:
    """Has attributes, one of which does not cross, and says so in Python's way."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.cache = object()

    def __getstate__(self) -> dict[str, Any]:
        return {"tensor": self.tensor}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, cache=None)


@smp.register_type
class Mode(Enum):
    TRAIN = "train"
    TEST = object()


class Interval:
    """Known under a name, by functions."""

    def __init__(self, low: float, high: float) -> None:
        self.low, self.high = low, high


smp.register_type(Interval, name="interval", flatten=lambda it: (it.low, it.high), unflatten=lambda two: Interval(*two))


class Here:
    """Registered on rank 0 alone."""


class Unknown:
    """Registered nowhere."""


def around(value: Any) -> Any:
    """The value after its way to the next rank and back."""
    neighbour = smp.rank() ^ 1
    if smp.rank() % 2 == 0:
        smp.send(value, neighbour, BY)
        return smp.recv_from(neighbour, BY)
    received = smp.recv_from(neighbour, BY)
    smp.send(received, neighbour, BY)
    return received


def refused(kind: type[Exception], call: Callable[..., Any], *args: Any) -> str:
    """What a call says that must raise."""
    try:
        call(*args)
    except kind as error:
        return str(error)
    raise AssertionError(f"{call} raised no {kind.__name__}")


def objects_are_received_in_any_order_of_ranks() -> None:
    if smp.rank() == 1:
        smp.send("first", 0, BY)
        smp.send("go on", 2, BY)
    elif smp.rank() == 2:
        assert smp.recv_from(1, BY) == "go on"
        smp.send("second", 0, BY)
    elif smp.rank() == 0:
        assert smp.recv_from(2, BY) == "second"
        assert smp.recv_from(1, BY) == "first"


def threads_talk_to_different_ranks_at_the_same_time() -> None:
    def conversation(peer: int) -> None:
        for number in range(100):
            smp.send((smp.rank(), number, torch.full((number,), number)), peer, BY)
        for number in range(100):
            source, found, tensor = smp.recv_from(peer, BY)
            assert (source, found) == (peer, number)
            assert tensor.tolist() == [number] * number

    others = [rank for rank in range(4) if rank != smp.rank()]
    with ThreadPoolExecutor(len(others)) as pool:
        list(pool.map(conversation, others))


def threads_that_receive_from_one_rank_share_what_it_sends() -> None:
    if smp.rank() == 1:
        for number in range(300):
            smp.send(number, 0, BY)
    elif smp.rank() == 0:
        with ThreadPoolExecutor(3) as pool:
            taken = list(pool.map(lambda _: [smp.recv_from(1, BY) for _ in range(100)], range(3)))
        assert all(part == sorted(part) for part in taken)
        assert sorted(number for part in taken for number in part) == list(range(300))


def threads_that_send_to_one_rank_each_keep_their_order() -> None:
    if smp.rank() == 1:
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(lambda name: [smp.send((name, number), 0, BY) for number in range(100)], range(3)))
    elif smp.rank() == 0:
        received = [smp.recv_from(1, BY) for _ in range(300)]
        for name in range(3):
            assert [number for sender, number in received if sender == name] == list(range(100))


def tensors_stand_where_they_stood() -> None:
    shared = torch.randn(2, 3)
    value = {
        "twice": [shared, (shared, Point(shared, None))],
        "transposed": torch.arange(6.0).view(2, 3).t(),
        "every other": torch.arange(12).view(3, 4)[:, ::2],
        "expanded": torch.ones(1, 3).expand(4, 3),
        "empty": torch.empty(0, 5),
        "a number": torch.tensor(3),
        "parameter": nn.Parameter(torch.ones(2)),
    }
    back = around(value)
    [one, (two, (three, _))] = back["twice"]
    assert one is two is three
    assert back["transposed"].stride() == (1, 3)
    assert back["transposed"].tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    assert back["every other"].tolist() == [[0, 2], [4, 6], [8, 10]]
    assert back["expanded"].tolist() == [[1.0] * 3] * 4
    assert back["empty"].shape == (0, 5)
    assert back["a number"].item() == 3
    assert not back["parameter"].requires_grad


def every_dtype_arrives() -> None:
    raw = {name: torch.arange(4 * dtype.itemsize, dtype=torch.uint8) % 2 for name, dtype in _DTYPES.items()}
    back = around({name: raw[name].view(dtype) for name, dtype in _DTYPES.items()})
    for name, dtype in _DTYPES.items():
        assert back[name].dtype is dtype
        assert torch.equal(back[name].view(torch.uint8), raw[name])


def dictionaries_stay_what_they_are() -> None:
    ordered = Ordered(b=1, a=torch.ones(1))
    ordered.move_to_end("b")
    bag = Bag({1: "one"})
    bag.label = "numbers"
    lists = Lists(list, {"a": [1]})
    back = around(
        [ordered, bag, Attributes(a=[1]), lists, defaultdict(None, {1: 2}), Counter("aab"), OrderedDict(z=1, y=2)]
    )
    assert [type(item) for item in back] == [Ordered, Bag, Attributes, Lists, defaultdict, Counter, OrderedDict]
    assert list(back[0]) == ["a", "b"]
    assert (back[1], back[1].label) == ({1: "one"}, "numbers")
    attributes = back[2]
    attributes.b = 2
    assert attributes == {"a": [1], "b": 2}
    assert back[3]["not there"] == []
    assert back[4].default_factory is None
    assert back[5].most_common(1) == [("a", 2)]
    assert list(back[6]) == ["z", "y"]
    text = refused(smp.UnsupportedValueError, smp.send, [defaultdict(lambda: 0)], smp.rank() ^ 1, BY)
    assert "function stands at [0]<collections:defaultdict>['default_factory']" in text, text


def registered_objects_arrive() -> None:
    sample, window = Sample(torch.ones(2), 0.5), Window(torch.zeros(3))
    back = around({"samples": (sample, sample), "window": window, "modes": list(Mode), "interval": Interval(0.0, 1.0)})
    assert type(back["samples"][0]) is Sample
    assert back["samples"][0].inputs is back["samples"][1].inputs
    assert (back["samples"][0].weight, back["samples"][0].seen) == (0.5, 0)
    assert torch.equal(back["window"].tensor, torch.zeros(3))
    assert back["window"].cache is None
    assert back["modes"] == list(Mode)
    assert (back["interval"].low, back["interval"].high) == (0.0, 1.0)


def an_object_of_an_unknown_class_is_refused_where_it_is_sent() -> None:
    text = refused(smp.UnsupportedValueError, smp.send, {"a": [Unknown()]}, smp.rank() ^ 1, BY)
    assert "Unknown stands at ['a'][0]" in text
    assert "smp.register_type" in text


def an_object_whose_class_the_receiver_does_not_know_is_refused_with_its_sender() -> None:
    if smp.rank() == 0:
        smp.register_type(Here, name="here")
        smp.send([Here()], 1, BY)
        smp.send("after", 1, BY)
    elif smp.rank() == 1:
        text = refused(smp.UnsupportedValueError, smp.recv_from, 0, BY)
        for part in ("rank 0 on host ", "sent rank 1 a value of the type registered as 'here'", "smp.register_type"):
            assert part in text, text
        assert smp.recv_from(0, BY) == "after"


def everyone_in_a_group_gets_what_one_broadcasts() -> None:
    for group in GROUPS:
        ranks = smp.allgather(smp.rank(), group)
        assert smp.rank() in ranks
        leader = ranks[-1]
        if smp.rank() == leader:
            smp.broadcast({"from": leader, "tensor": torch.full((3,), leader)}, group)
        else:
            received = smp.recv_from(leader, BY)
            assert received["from"] == leader
            assert received["tensor"].tolist() == [leader] * 3


def gathers_and_barriers_of_all_groups_may_follow_each_other() -> None:
    for _ in range(5):
        for group in GROUPS:
            gathered = smp.allgather({"rank": smp.rank(), "tensor": torch.tensor(smp.rank())}, group)
            assert [entry["tensor"].item() for entry in gathered] == [entry["rank"] for entry in gathered]
            smp.barrier(group)
    smp.dp_barrier()
    smp.mp_barrier()


def ranks_that_are_none_are_refused() -> None:
    assert "0 to 3" in refused(smp.ConfigError, smp.send, 1, 4, BY)
    assert "0 to 1" in refused(smp.ConfigError, smp.recv_from, 2, smp.RankType.PP_RANK)
    refused(smp.ShardwrightError, smp.send, 1, smp.rank(), BY)


def nothing_but_tensors_may_be_larger_than_the_limit() -> None:
    text = refused(smp.ShardwrightError, smp.send, bytes((256 << 20) + 1), smp.rank() ^ 1, BY)
    assert "268435456" in text
    assert "tensors" in text


class Producer(nn.Module):
    """Takes and returns objects of the script's own classes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, window: Window, bag: Bag) -> tuple[Window, Bag]:
        assert type(window) is Window
        assert bag.label == "given"
        return Window(self.linear(window.tensor)), Bag(sum=window.tensor.sum(), interval=Interval(0.0, 2.0))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = Producer()

    def forward(self, inputs: torch.Tensor) -> tuple[Window, Bag]:
        bag = Bag(a=1)
        bag.label = "given"
        window, found = self.second(Window(self.first(inputs)), bag)
        assert type(found) is Bag
        return window, found


@smp.step
def train(model: Any, inputs: torch.Tensor) -> Any:
    window, bag = model(inputs)
    loss = window.tensor.square().mean() + bag["sum"] * bag["interval"].high
    model.backward(loss)
    return {"loss": loss, "window": window, "bag": bag, "sample": Sample(loss, 1.0)}


def objects_pass_through_remote_modules_and_out_of_steps() -> None:
    torch.manual_seed(1)
    whole, net = Net(), Net()
    net.load_state_dict(whole.state_dict())
    model = smp.DistributedModel(net)
    inputs = torch.randn(8, 4)
    results = train(model, inputs)
    window, bag = whole(inputs)
    microbatches = 2
    loss = window.tensor.square().mean() + bag["sum"] / microbatches * 2.0
    loss.backward()
    torch.testing.assert_close(results["loss"].reduce_mean(), loss.detach())
    expected = {name: parameter.grad for name, parameter in whole.named_parameters()}
    for name, parameter in model.local_named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name])
    assert [type(part) for part in results["window"]] == [Window, Window]
    assert not results["window"][0].tensor.requires_grad
    torch.testing.assert_close(torch.cat([part.tensor for part in results["window"]]), window.tensor.detach())
    assert type(results["bag"]) is Bag
    assert isinstance(results["bag"]["sum"], smp.StepOutput)
    assert type(results["sample"]) is Sample
    torch.testing.assert_close(results["sample"].inputs.reduce_mean(), loss.detach())


class NoPickle:
    """In place of everything that pickles."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("objects between ranks are not pickled")


SCENARIOS = [
    objects_are_received_in_any_order_of_ranks,
    threads_talk_to_different_ranks_at_the_same_time,
    threads_that_receive_from_one_rank_share_what_it_sends,
    threads_that_send_to_one_rank_each_keep_their_order,
    tensors_stand_where_they_stood,
    every_dtype_arrives,
    dictionaries_stay_what_they_are,
    registered_objects_arrive,
    an_object_of_an_unknown_class_is_refused_where_it_is_sent,
    an_object_whose_class_the_receiver_does_not_know_is_refused_with_its_sender,
    everyone_in_a_group_gets_what_one_broadcasts,
    gathers_and_barriers_of_all_groups_may_follow_each_other,
    ranks_that_are_none_are_refused,
    nothing_but_tensors_may_be_larger_than_the_limit,
    objects_pass_through_remote_modules_and_out_of_steps,
]


def main() -> None:
    smp.init({"pipeline_parallel_degree": 2, "ddp": True, "microbatches": 2, "stall_timeout_seconds": 20})
    for name in ("dump", "dumps", "load", "loads", "Pickler", "Unpickler"):
        setattr(pickle, name, NoPickle)
    for scenario in SCENARIOS:
        scenario()
        smp.barrier()
        sys.stdout.write(f"{scenario.__name__}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
