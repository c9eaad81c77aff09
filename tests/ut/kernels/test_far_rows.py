"""Rows further apart than 32 bits count, in every kernel that moves, sums or looks up rows.

Memory is given by the system only where it is touched. Operands lie in the middle of it: an address whose offset was
cut to 32 bits is one of memory that holds zeros, so that the test fails and not the process.
"""

from __future__ import annotations

import mmap

import pytest
import torch

from vllm_ascend_moe.kernels.combine import combine
from vllm_ascend_moe.kernels.permute import plan_permutation, scatter_rows
from vllm_ascend_moe.kernels.sent_rows import look_up, pack_rows, plan_rows, sum_rows
from vllm_ascend_moe.kernels.slots import plan_slots

FAR = 3 << 29  # elements from row to row: two rows are more than 2^31 elements, which is -2^30 in 32 bits
_NO_RESERVE = 0x4000  # Linux's MAP_NORESERVE


def far(rows: int, columns: int, dtype: torch.dtype, stride: int = FAR, before: int = 1 << 31) -> torch.Tensor:
    """[rows, columns], zeros, rows ``stride`` elements apart, the first of them ``before`` elements into the memory."""
    length = (before + (rows - 1) * stride + columns) * dtype.itemsize
    memory = mmap.mmap(-1, length, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
    return torch.frombuffer(memory, dtype=dtype).as_strided((rows, columns), (stride, 1), before)


@pytest.fixture
def y() -> torch.Tensor:
    x = far(3, 40, torch.bfloat16)
    x[0], x[2] = torch.arange(40), torch.arange(40, 80)
    return x


def test_sums_of_rows_and_to_rows(y):
    slots = torch.tensor([[0, -1], [-1, -1], [2, 0]], dtype=torch.int32)
    out = far(3, 40, torch.bfloat16)
    combine(y, slots, out=out)
    assert torch.equal(out, torch.stack([y[0], torch.zeros(40).bfloat16(), y[2] + y[0]]))


def test_sums_by_slots_and_weights_of_rows(y):
    slots, weights = far(3, 1, torch.int32), far(3, 1, torch.float32)
    slots[:, 0], weights[:, 0] = torch.tensor([0, 2, 1]), torch.tensor([1.0, 2.0, 4.0])
    assert torch.equal(combine(y, slots, weights), torch.stack([y[0], y[2] * 2, y[1] * 4]))
    slots[2], y[1] = 2, 5
    assert torch.equal(combine(y, slots, weights)[2], y[2] * 4)


def test_sums_of_the_last_of_many_rows():
    y = far((1 << 25) + 9, 64, torch.bfloat16, stride=64)
    y[3], y[-1] = torch.arange(64), 2
    assert torch.equal(sum_rows(y, torch.tensor([[len(y) - 1, 3]], dtype=torch.int32))[0], y[3] + 2)


def test_rows_from_and_to_far_rows():
    x, out = far(3, 40, torch.int8), far(3, 40, torch.int8)
    x[0], x[2] = torch.arange(40), torch.arange(40, 80)
    positions = torch.tensor([[2], [-1], [0]], dtype=torch.int32)
    scatter_rows(x, positions, out)
    assert torch.equal(out[2], x[0])
    assert torch.equal(out[0], x[2])
    assert not out[1].any()


def ids(dtype: torch.dtype) -> torch.Tensor:
    """Three rows of two choices of four experts."""
    x = far(3, 2, dtype)
    x[0], x[1], x[2] = torch.tensor([1, 2]), torch.tensor([3, -1]), torch.tensor([2, 3])
    return x


BOTH = pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
EVERY = torch.arange(4, dtype=torch.int32)


@BOTH
def test_choices_of_far_rows(dtype):
    mine = ids(dtype)
    near = mine.clone()
    for found, wanted in zip(plan_slots(mine, EVERY, 4), plan_slots(near, EVERY, 4), strict=True):
        assert torch.equal(found, wanted)
    assert torch.equal(plan_permutation(mine, 4).positions, plan_permutation(near, 4).positions)
    assert_same_rows(mine, near)


@BOTH
def test_choices_of_far_columns(dtype):
    """Any strides are accepted there, also those of a transposed tensor."""
    mine = ids(dtype).t()
    assert_same_rows(mine, mine.clone(memory_format=torch.contiguous_format))


def assert_same_rows(mine: torch.Tensor, near: torch.Tensor) -> None:
    owners = torch.tensor([2, 0, 1, 0, 1, 2], dtype=torch.int32)
    (entries, codes, slots), wanted = plan_rows(mine, owners, 2), plan_rows(near, owners, 2)
    assert torch.equal(entries, wanted[0])
    assert torch.equal(codes[0], wanted[1][0])  # the second line is the receiver's
    assert torch.equal(slots, wanted[2])


@pytest.mark.parametrize("word", [1, 4])
def test_rows_of_bytes_from_far_rows_to_the_last_of_many(word, monkeypatch):
    """What pack_rows takes from torch.empty is memory as here: 2^31 words and more."""
    row_bytes, at = 1024, (0, 40, 80)
    rows = word * (1 << 31) // row_bytes + 2
    wire = far(rows, row_bytes, torch.uint8, stride=row_bytes, before=word << 31)
    columns = [far(3, 40 // size, dtype) for size, dtype in ((1, torch.int8), (2, torch.int16), (4, torch.int32))]
    if word == 1:
        at = (0, 41, 83)
    for number, x in enumerate(columns):
        x[2] = torch.arange(x.shape[1]) + number
    slots = torch.tensor([[-1], [-1], [rows - 1]], dtype=torch.int32)
    monkeypatch.setattr(torch, "empty", lambda shape, dtype, device: wire)
    pack_rows(columns, at, row_bytes, slots, rows)
    for start, x in zip(at, columns, strict=True):
        assert torch.equal(wire[-1, start : start + 40].clone().view(x.dtype), x[2])


@BOTH
def test_ids_of_far_rows(dtype):
    index = ids(dtype).clamp_(min=0)
    table = torch.tensor([9, 8, 7, 6], dtype=dtype)
    assert torch.equal(look_up(index, table), 9 - index)


def test_ids_far_down_a_table():
    table = far(1, (1 << 31) + 9, torch.int64)[0]
    table[-2] = 7
    assert look_up(torch.tensor([[table.numel() - 2, 0]]), table).tolist() == [[7, 0]]
