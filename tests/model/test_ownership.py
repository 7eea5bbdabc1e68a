"""A rank keeps what it owns and gives up the rest, without a trace in what it keeps."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
from shardwright.errors import NotOwnedError, PartitionError
from shardwright.model.ownership import Ownership, apply_ownership
from shardwright.model.sentinel import Sentinel, is_sentinel
from shardwright.partition.decision import Decision
from shardwright.partition.tree import ModelTree
from shardwright.values import decode, encode
from torch import nn
from torch.nn.utils import parametrizations


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU())
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight


def decide(module: nn.Module, **ranks: int) -> Decision:
    tree = ModelTree.of(module)
    placed = {}
    for entry in tree.modules:
        matches = [path for path in ranks if entry.path == path or entry.path.startswith(path + ".")]
        placed[entry.path] = ranks[max(matches, key=len)] if matches else 0
    return Decision.of(tree, placed, max([1, *ranks.values()]) + 1)


def split(build: type[nn.Module], **ranks: int) -> tuple[Ownership, Ownership]:
    shares = []
    for pp_rank in range(2):
        torch.manual_seed(0)
        model = build()
        shares.append(apply_ownership(model, decide(model, **ranks), pp_rank))
    return shares[0], shares[1]


def parameter_bytes(share: Ownership) -> int:
    return sum(parameter.nbytes for parameter in share.local_parameters())


def buffer_bytes(share: Ownership) -> int:
    return sum(buffer.nbytes for buffer in share.local_buffers())


def test_every_parameter_lives_on_exactly_one_rank_and_bytes_equal_the_table() -> None:
    whole = Tied()
    first, second = split(Tied, body=1)
    names = [name for share in (first, second) for name, _ in share.local_named_parameters()]
    assert sorted(names) == sorted(name for name, _ in whole.named_parameters())
    for share in (first, second):
        assert parameter_bytes(share) == share.decision.parameter_bytes(share.pp_rank)
        assert buffer_bytes(share) == share.decision.buffer_bytes(share.pp_rank)
    assert parameter_bytes(first) + parameter_bytes(second) == sum(p.nbytes for p in whole.parameters())
    assert {name for name, _ in second.local_named_buffers()} == {name for name, _ in whole.named_buffers()}


def test_tied_names_share_one_sentinel() -> None:
    _, second = split(Tied, body=1)
    model = second.module
    assert model.embedding.weight is model.head.weight
    assert isinstance(model.head.weight, Sentinel)
    assert isinstance(model.head.weight, nn.Parameter)
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in Tied().named_parameters()]


def test_storage_is_free_although_the_script_holds_the_parameter() -> None:
    model = Tied()
    held = model.embedding.weight
    held.grad = torch.ones_like(held)
    storage = weakref.ref(held.untyped_storage())
    apply_ownership(model, decide(model, body=1), 1)
    gc.collect()
    assert storage() is None or storage().nbytes() == 0
    assert held.grad is None
    assert is_sentinel(held)
    assert held.shape == (7, 4)
    assert held in {held}
    with pytest.raises(NotOwnedError, match=r"embedding\.weight"):
        held + 1


def test_a_storage_shared_with_an_owned_parameter_stays() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    flat = torch.arange(8.0)
    model[0].weight = nn.Parameter(flat[:4].view(2, 2))
    model[1].weight = nn.Parameter(flat[4:].view(2, 2))
    apply_ownership(model, decide(model, **{"1": 1}), 0)
    assert model[0].weight.tolist() == [[0, 1], [2, 3]]
    assert flat.tolist() == list(range(8))


def test_no_random_number_is_drawn() -> None:
    model = Tied()
    state = torch.get_rng_state()
    apply_ownership(model, decide(model, body=1), 0)
    assert torch.equal(state, torch.get_rng_state())


def test_a_sentinel_answers_questions_about_metadata() -> None:
    first, _ = split(Tied, body=1)
    weight = first.module.body[0].weight
    original = Tied().body[0].weight
    assert weight.shape == original.shape
    assert weight.size(0) == 4
    assert weight.stride() == original.stride()
    assert weight.numel() == len(weight) * 4 == original.numel()
    assert (weight.dtype, weight.device, weight.ndim) == (original.dtype, original.device, 2)
    assert weight.is_leaf
    assert weight.requires_grad
    assert weight.grad is None
    assert torch.is_floating_point(weight)
    assert hash(weight) == id(weight)
    assert torch.full_like(weight, 2, dtype=torch.int32).tolist() == [[2] * 4] * 4
    assert torch.zeros_like(weight).untyped_storage().nbytes() == 4
    assert "body.0.weight" in repr(weight)
    assert "pp_rank 1" in f"{weight}"
    weight.register_hook(lambda gradient: None).remove()


@pytest.mark.parametrize(
    "compute",
    [
        lambda w: w + 1,
        lambda w: torch.nn.functional.linear(torch.zeros(1, 4), w),
        lambda w: torch.cat([torch.zeros(4, 4), w]),
        lambda w: w.t(),
        lambda w: w.data.mul_(2),
        lambda w: w[0],
        lambda w: w.tolist(),
        lambda w: w.numpy(),
        lambda w: w.data_ptr(),
        lambda w: w.untyped_storage(),
        lambda w: nn.init.zeros_(w),
        lambda w: torch.zeros(4, 4).copy_(w),
        lambda w: copy.deepcopy(w),
        lambda w: pickle.dumps(w),
        lambda w: setattr(w, "grad", torch.zeros(4, 4)),
        lambda w: torch.ops.aten.mm(w, w),
    ],
)
def test_a_sentinel_refuses_everything_that_needs_values(compute: object) -> None:
    first, _ = split(Tied, body=1)
    with pytest.raises(NotOwnedError, match=r"body\.0\.weight.*pp_rank 1"):
        compute(first.module.body[0].weight)  # type: ignore[operator]


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_scripted_function_refuses_a_sentinel_too() -> None:
    first, _ = split(Tied, body=1)
    with pytest.raises(RuntimeError, match=r"interpreter|body"):
        torch.jit.trace(lambda x: x * 2, torch.zeros(4, 4))(first.module.body[0].weight)


def test_ordinary_module_methods_work_on_every_rank() -> None:
    for share in split(Tied, body=1):
        model = share.module
        model.eval()
        model.train()
        model.zero_grad()
        model.requires_grad_(False)
        assert not any(p.requires_grad for p in model.parameters())
        model.requires_grad_(True)
        assert set(model.state_dict()) == set(Tied().state_dict())
        model.to(torch.float64)
        assert {p.dtype for p in model.parameters()} == {torch.float64}
        assert {b.dtype for b in model.buffers()} == {torch.float64, torch.int64}
        model.float()
        share.check(model)
        optimizer = torch.optim.AdamW(model.parameters())
        optimizer.zero_grad()
        optimizer.step()
        assert parameter_bytes(share) == share.decision.parameter_bytes(share.pp_rank)


def test_the_whole_subtree_is_checked_for_swapped_weights() -> None:
    first, second = split(Tied, body=1)
    first.check(first.module.body)
    second.check(second.module)
    first.module.body[0]._parameters["weight"] = nn.Parameter(torch.zeros(4, 4))
    with pytest.raises(NotOwnedError, match=r"'body\.0\.weight' lives on pp_rank 1"):
        first.check(first.module.body)


def test_functional_call_of_a_remote_module_is_noticed() -> None:
    first, _ = split(Tied, body=1)
    body = first.module.body
    body.forward = lambda x: (first.check(body), x)[1]
    weights = {"0.weight": torch.zeros(4, 4)}
    with pytest.raises(NotOwnedError, match="functional_call"):
        torch.func.functional_call(body, weights, torch.zeros(1, 4))
    first.check(body)


class Containers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.listed = nn.ParameterList([torch.ones(3), torch.ones(2)])
        self.named = nn.ParameterDict({"a": torch.ones(4)})
        self.normed = parametrizations.weight_norm(nn.Linear(3, 3))
        self.lstm = nn.LSTM(3, 3)


def test_parameter_containers_and_parametrizations_work() -> None:
    first, second = split(Containers, listed=1, normed=1)
    assert {n for n, _ in first.local_named_parameters()} == {
        n for n, _ in Containers().named_parameters() if n.startswith(("named", "lstm"))
    }
    assert second.module.normed(torch.ones(1, 3)).shape == (1, 3)
    assert first.module.lstm(torch.ones(1, 1, 3))[0].shape == (1, 1, 3)
    with pytest.raises(NotOwnedError, match="normed"):
        first.module.normed(torch.ones(1, 3))
    with pytest.raises(NotOwnedError, match="lstm"):
        second.module.lstm(torch.ones(1, 1, 3))
    with pytest.raises(NotOwnedError, match=r"listed\.0"):
        first.module.listed[0] + 1


class Repeated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.Linear(2, 2)
        mask = torch.ones(2)
        self.layers = nn.ModuleList([layer, layer, nn.Linear(2, 2)])
        self.other = nn.Sequential(layer)
        for module in (layer, self.layers[2]):
            module.register_buffer("mask", mask)


def test_a_module_with_several_parents_is_owned_once_and_a_shared_buffer_by_all_its_holders() -> None:
    first, second = split(Repeated, **{"layers.2": 1})
    assert first.owner("layers.1") == first.owner("other.0") == first.owner("layers.0") == 0
    assert first.is_local("other.0")
    assert [path for path, _ in second.local_named_modules()] == ["layers.2"]
    assert [row.ranks for row in first.decision.buffers if "layers.2.mask" in row.names] == [(0, 1)]
    assert buffer_bytes(first) == buffer_bytes(second) == 8
    assert not is_sentinel(first.module.layers[2].mask)
    assert second.module.layers[2].mask.tolist() == [1, 1]
    assert ModelTree.of(first.module).path_of[id(first.module.other[0])] == "layers.0"


def test_a_stage_without_parameters_works() -> None:
    model = Tied()
    share = apply_ownership(model, decide(model, **{"body.2": 1}), 1)
    assert parameter_bytes(share) == 0
    assert list(share.local_parameters()) == []
    assert [path for path, _ in share.local_named_modules()] == ["body.2"]
    assert model.body[2](torch.tensor([-1.0, 2.0])).tolist() == [0.0, 2.0]


def test_modules_that_share_a_parameter_must_be_on_one_rank() -> None:
    with pytest.raises(PartitionError, match=r"'embedding\.weight' is shared by .*'head' on pp_rank 1"):
        decide(Tied(), head=1)


def test_a_decision_survives_its_way_and_is_checked_against_the_model() -> None:
    decision = decide(Tied(), body=1)
    again = decode(*encode(decision))
    assert again == decision
    again.check_against(Tied())
    other = Tied()
    other.body[0] = nn.Linear(4, 4, bias=False)
    with pytest.raises(PartitionError, match=r"rank 3 built a different model.*'body\.0\.bias' is .*absent here"):
        again.check_against(other, rank=3)
    with pytest.raises(PartitionError, match=r"'embedding\.weight'.*float64"):
        again.check_against(Tied().double())


def test_a_model_divided_under_inference_mode_can_still_be_trained() -> None:
    model = Tied()
    with torch.inference_mode():
        share = apply_ownership(model, decide(model, body=1), 0)
    model.requires_grad_(False)
    model.requires_grad_(True)
    assert not any(p.is_inference() for p in model.parameters())
    model.head(model.embedding(torch.tensor([1]))).sum().backward()
    gradients = [p.grad for p in share.local_parameters() if p.grad is not None]
    assert sum(gradient.nbytes for gradient in gradients) == parameter_bytes(share)
