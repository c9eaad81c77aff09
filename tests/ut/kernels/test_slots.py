"""Slots of the batched format, and the rows of the batched strategy, in the interpreter against plain torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernel_cases import TOLERANCE, UNTOUCHED, relative_error
from vllm_ascend_moe.comm import batched_rows
from vllm_ascend_moe.errors import ShapeError
from vllm_ascend_moe.kernels import slots as kernels
from vllm_ascend_moe.kernels import tiles
from vllm_ascend_moe.kernels.permute import scatter_rows


def case(rows, topk, experts, local, seed, dtype=torch.int32):
    """Choices that repeat and that are out of range, as a strided view; a map that leaves experts to others."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randint(-2, experts + 2, (rows, topk + 3), generator=generator, dtype=dtype)
    expert_map = torch.full((experts,), -1, dtype=torch.int32)
    expert_map[torch.randperm(experts, generator=generator)[:local]] = torch.arange(local, dtype=torch.int32)
    return wide[:, :topk], expert_map, local


def in_plain_torch(call):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batched_rows, "form_on", lambda device_type: "torch")
        return call()


def in_triton(call):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batched_rows, "form_on", lambda device_type: "triton")
        return call()


def plan(ids, expert_map, local):
    return batched_rows.plan_slots(ids, batched_rows.slot_table(expert_map, local), local)


@settings(deadline=None, max_examples=40)
@given(
    rows=st.integers(1, 40),
    topk=st.integers(1, 5),
    experts=st.integers(1, 20),
    seed=st.integers(0, 1000),
    block=st.sampled_from([16, 256, 4096]),
    dtype=st.sampled_from([torch.int32, torch.int64]),
)
def test_slots_are_those_of_plain_torch_in_one_block_and_in_many(rows, topk, experts, seed, block, dtype):
    given_case = case(rows, topk, experts, seed % (experts + 1), seed, dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "SLOT_TILE", block)
        found = in_triton(lambda: plan(*given_case))
    for mine, wanted in zip(found, in_plain_torch(lambda: plan(*given_case)), strict=True):
        assert mine.dtype == wanted.dtype == torch.int32
        assert torch.equal(mine, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (70,), (2, 3)], ids=str)
def test_rows_reach_their_slots_and_no_others(dtype, shape):
    ids, expert_map, local = case(11, 3, 6, 4, 0)
    x = torch.randint(0, 100, (11, 2, *shape), generator=torch.Generator().manual_seed(1)).to(dtype)[:, 0]

    def call():
        slots, _ = plan(ids, expert_map, local)
        out = torch.full((local * 11 + 1, *shape), UNTOUCHED).to(dtype)
        batched_rows.scatter_rows(x, slots, out)
        return out[:-1]

    assert torch.equal(in_triton(call), in_plain_torch(call))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sums_of_slots_and_of_blocks(dtype):
    """Slots that nobody has, and weights of choices without one, hold NaN. Of 3 blocks of 6 rows, 5 each are used."""
    ids, expert_map, local = case(18, 3, 6, 4, 2)
    generator = torch.Generator().manual_seed(3)
    y, weights = torch.randn(local * 18, 40, generator=generator).to(dtype), torch.rand(18, 3, generator=generator)

    def call():
        slots, _ = plan(ids, expert_map, local)
        unused = torch.ones(len(y), dtype=torch.bool)
        unused[slots[slots >= 0].long()] = False
        out = torch.empty(18, 40, dtype=dtype)
        poisoned = y.masked_fill(unused[:, None], float("nan"))
        batched_rows.sum_slots(poisoned, slots, weights.masked_fill(slots < 0, float("nan")), out)
        home = batched_rows.block_rows(3, 6, out.device)[:5]
        return out, batched_rows.sum_blocks(y[:18].view(3, 6, 40), home, dtype, in_order=True)

    for mine, wanted in zip(in_triton(call), in_plain_torch(call), strict=True):
        assert relative_error(mine, wanted) < TOLERANCE[dtype]


def test_wrong_operands_are_named():
    ids, expert_map, local = case(4, 2, 5, 3, 0)
    with pytest.raises(ShapeError, match="topk_ids"):
        kernels.plan_slots(ids.float(), expert_map, local)
    with pytest.raises(ShapeError, match="topk_ids"):
        kernels.plan_slots(ids.t(), expert_map, local)
    with pytest.raises(ShapeError, match="expert_map"):
        kernels.plan_slots(ids, expert_map.long(), local)
    positions, x = torch.zeros(4, 2, dtype=torch.int32), torch.zeros(4, 6)
    with pytest.raises(ShapeError, match="out"):
        scatter_rows(x, positions, torch.zeros(9, 5))
    with pytest.raises(ShapeError, match="out"):
        scatter_rows(x, positions, torch.zeros(9, 6).half())
    with pytest.raises(ShapeError, match="positions"):
        scatter_rows(x, positions.long(), torch.zeros(9, 6))
