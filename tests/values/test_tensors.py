"""Tensors' bytes are carried as they are."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from shardwright import _core
from shardwright.errors import UnsupportedValueError
from shardwright.values import pack, unpack
from shardwright.values.tensors import _DTYPES


def around(tensor: torch.Tensor) -> torch.Tensor:
    return unpack(pack([tensor], [False]))[0]


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().flatten().view(torch.uint8).tolist())


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", _DTYPES.values(), ids=str)
def test_every_dtype_is_carried_bit_for_bit(dtype: torch.dtype) -> None:
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (6 * dtype.itemsize,), dtype=torch.uint8)
    tensor = raw.view(dtype).view(2, 3)
    back = around(tensor)
    assert back.dtype is dtype
    assert back.shape == (2, 3)
    assert bits(back) == bits(tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(4, 3).t(),
        torch.randn(2, 3, 4, 5).permute(2, 0, 3, 1),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(1, 5, 1).transpose(0, 2),
    ],
)
def test_dense_tensors_keep_their_strides(tensor: torch.Tensor) -> None:
    back = around(tensor)
    assert back.stride() == tensor.stride()
    assert torch.equal(back, tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(6, 4)[::2],
        torch.randn(6, 4)[:, 1:3],
        torch.randn(3, 1).expand(3, 4),
        torch.randn(10).as_strided((3, 3), (2, 1)),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.randn(3, dtype=torch.complex64).conj().imag,
        torch.randn(5, requires_grad=True) * 2,
    ],
)
def test_views_arrive_as_values_of_their_own(tensor: torch.Tensor) -> None:
    back = around(tensor)
    assert back.is_contiguous()
    assert not back.is_conj()
    assert not back.is_neg()
    assert not back.requires_grad
    assert torch.equal(back, tensor.detach().resolve_conj().resolve_neg())
    assert back.untyped_storage().nbytes() == back.numel() * back.element_size()


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (3, 0, 2)])
def test_tensors_without_dimensions_or_elements_arrive(shape: tuple[int, ...]) -> None:
    assert around(torch.ones(shape)).shape == shape
    assert torch.equal(around(torch.ones(shape)), torch.ones(shape))


def test_a_received_tensor_owns_its_memory_and_can_be_written() -> None:
    parts = pack([torch.arange(4.0), torch.arange(3)], [True, False])
    assert parts.meta(0) == ("float32", [4], [1], "cpu", True)
    first, second = unpack(parts)
    del parts
    gc.collect()
    first += 1
    assert first.tolist() == [1, 2, 3, 4]
    assert second.tolist() == [0, 1, 2]
    assert first._base is None


def test_what_is_sent_is_the_value_of_the_moment() -> None:
    tensor = torch.zeros(3)
    parts = pack([tensor], [False])
    tensor.fill_(1)
    assert unpack(parts)[0].tolist() == [0, 0, 0]


class Marked(torch.Tensor):
    pass


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: torch.eye(2).to_sparse(), "sparse_coo"),
        (lambda: torch.empty(2, device="meta"), "device meta"),
        (lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]), "nested"),
        (lambda: torch.ones(2).as_subclass(Marked), "Marked"),
        (lambda: torch.empty(2, dtype=torch.bits8), "bits8"),
    ],
)
def test_tensors_without_plain_bytes_are_refused(make: Any, text: str) -> None:
    with pytest.raises(UnsupportedValueError, match=text):
        pack([make()], [False])


def test_a_description_that_does_not_fit_the_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="16 bytes are not a dense tensor"):
        _core.TensorParts().append(torch.ones(2, 3)[:, :2], "float64", "cpu", False)


@pytest.mark.gpu
def test_tensors_of_a_gpu_arrive_on_the_gpu() -> None:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        tensor = torch.arange(1 << 20, device="cuda").view(1024, 1024).t()
        tensor = tensor * 3
        back = around(tensor)
        assert back.device == tensor.device
        assert back.stride() == tensor.stride()
        assert torch.equal(back, tensor)
