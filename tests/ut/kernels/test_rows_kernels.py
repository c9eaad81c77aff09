"""Activation with quantisation, weighted combine, and the permutation by expert, in the interpreter against torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernel_cases import UNTOUCHED, filled, relative_error
from vllm_ascend_moe.errors import ShapeError
from vllm_ascend_moe.experts.activation import activate, is_gated
from vllm_ascend_moe.experts.reference import local_slots
from vllm_ascend_moe.kernels.combine import combine
from vllm_ascend_moe.kernels.operands import ACTIVATION_FORMS
from vllm_ascend_moe.kernels.permute import permute_rows, plan_permutation
from vllm_ascend_moe.kernels.quantize import activate_rows

# -- activate_rows ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ACTIVATION_FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_activation_of_own_rows_only(activation, dtype):
    counts = torch.tensor([5, 0, 9], dtype=torch.int32)
    own = torch.arange(9) < counts[:, None]
    columns = 33 * (2 if activation != "none" and is_gated(activation) else 1)
    x = torch.randn(3, 9, columns, generator=torch.Generator().manual_seed(1)).to(dtype)
    x[~own] = float("nan")
    y, scale = activate_rows(x, counts, activation=activation)
    wanted = x[own].float() if activation == "none" else activate(x[own].float(), activation)
    assert scale is None
    assert y.dtype == dtype
    assert relative_error(y[own], wanted) < (1e-6 if dtype == torch.float32 else 4e-3)


@settings(deadline=None, max_examples=40)
@given(
    counts=st.lists(st.integers(0, 11), min_size=1, max_size=4),
    columns=st.integers(1, 80),
    seed=st.integers(0, 1000),
)
def test_each_row_is_scaled_to_its_own_largest_value(counts, columns, seed):
    generator = torch.Generator().manual_seed(seed)
    index = torch.tensor(counts, dtype=torch.int32)
    rows = max(counts)
    own = torch.arange(rows) < index[:, None]
    x = torch.randn(len(counts), rows, 2 * columns, generator=generator) * 3
    x[~own] = float("nan")
    q, scale = activate_rows(x, index, activation="silu", quantize_to=torch.int8)
    wanted = activate(x[own], "silu")
    assert q.dtype == torch.int8
    torch.testing.assert_close(scale[own], wanted.abs().amax(-1).clamp(min=1e-20) / 127.0, rtol=1e-5, atol=0)
    assert bool(((q[own].float() - wanted / scale[own][:, None]).abs() <= 0.5005).all())
    if wanted.numel():
        assert q[own].abs().max() == 127


@pytest.mark.parametrize(("dtype", "largest"), [(torch.float8_e4m3fn, 448.0), (torch.float8_e5m2, 57344.0)], ids=str)
def test_fp8_keeps_what_it_can_hold(dtype, largest):
    # Values that need no rounding: the interpreter loses the carry of a mantissa that rounds up (a GPU does not).
    row = torch.tensor([largest, -16.0, 2.0, 0.5, 0.0, largest, -1.25, 24.0])
    x = torch.stack([row * 0.01, row * 3.0])[None]
    q, scale = activate_rows(x, torch.tensor([2], dtype=torch.int32), activation="none", quantize_to=dtype)
    assert torch.equal(q[0].float(), row.expand(2, -1))
    torch.testing.assert_close(scale[0], torch.tensor([0.01, 3.0]))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("fault", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("column", [0, 33])
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # infinity times 0, on purpose
def test_a_row_with_a_fault_comes_back_as_nan(dtype, fault, column):
    """Two chunks of columns, the fault in either. The other rows are not touched by it."""
    x = torch.randn(1, 3, 40, generator=torch.Generator().manual_seed(1))
    x[0, 1, column] = fault
    q, scale = activate_rows(x, torch.tensor([3], dtype=torch.int32), activation="none", quantize_to=dtype)
    back = q.float() * scale[..., None]
    assert bool(back[0, 1].isnan().all())
    assert relative_error(back[0, ::2], x[0, ::2]) < 0.1


def test_a_row_of_zeros_stays_zero():
    q, scale = activate_rows(
        torch.zeros(1, 2, 8), torch.tensor([2], dtype=torch.int32), activation="none", quantize_to=torch.int8
    )
    assert not bool(q.any())
    assert bool((scale > 0).all())


def test_ragged_rows_keep_their_scale():
    x = torch.full((12, 16), float("nan"))
    x[2:5], x[9:11] = torch.randn(3, 16), torch.randn(2, 16) * 100
    starts, counts = torch.tensor([[2, 9], [3, 2]], dtype=torch.int32)
    q, scale = activate_rows(x, counts, starts=starts, activation="none", quantize_to=torch.int8)
    for rows in (slice(2, 5), slice(9, 11)):
        assert relative_error(q[rows].float() * scale[rows, None], x[rows]) < 1e-2


def test_activate_rows_refuses_what_it_does_not_take():
    counts = torch.tensor([1], dtype=torch.int32)
    for wrong in (torch.ones(1, 2, 4).int(), torch.ones(2, 4), torch.ones(1, 2, 3), torch.ones(1, 2, 8)[:, :, ::2]):
        with pytest.raises(ShapeError):
            activate_rows(wrong, counts)
    x = torch.ones(2, 3, 4)
    pairs = torch.tensor([[1, 9], [2, 9]], dtype=torch.int32)
    for wrong in (pairs[:, 0], pairs[0].long(), pairs, torch.ones(3, dtype=torch.int32), pairs[0].to("meta")):
        with pytest.raises(ShapeError, match="counts"):
            activate_rows(x, wrong)
    for wrong in (pairs[:, 0], pairs[0].long(), torch.ones(3, dtype=torch.int32), pairs[0].to("meta")):
        with pytest.raises(ShapeError, match="starts"):
            activate_rows(x[0], pairs[0], starts=wrong)
    for dtype in (torch.float64, torch.float8_e4m3fn):
        with pytest.raises(ShapeError, match="x = "):
            activate_rows(x.to(dtype), pairs[0])
    with pytest.raises(ShapeError, match="quantize_to"):
        activate_rows(torch.ones(1, 2, 4), counts, quantize_to=torch.int32)


# -- combine ----------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=40)
@given(
    tokens=st.integers(1, 9),
    topk=st.integers(1, 4),
    hidden=st.integers(1, 70),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    weighted=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_weighted_sum_of_routed_slots(tokens, topk, hidden, dtype, weighted, seed):
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randint(-1, 12, (tokens, topk), generator=generator).int()
    y = torch.full((12, hidden), float("nan"), dtype=dtype)
    used = slots[slots >= 0].unique().long()
    y[used] = torch.randn(len(used), hidden, generator=generator).to(dtype)
    weights = torch.rand(tokens, topk, generator=generator)
    weights[slots < 0] = float("nan")  # an unrouted choice's weight does not count either
    out = filled((tokens, hidden), dtype)
    combine(y, slots, weights if weighted else None, out=out)
    for token in range(tokens):
        wanted = torch.zeros(hidden)
        for k in range(topk):
            if slots[token, k] >= 0:
                wanted += y[slots[token, k]].float() * (weights[token, k] if weighted else 1.0)
        torch.testing.assert_close(out[token].float(), wanted.to(dtype).float(), rtol=1e-2, atol=1e-2)


def test_combine_takes_the_batched_layout_and_strided_results():
    y = torch.randn(3, 5, 20)
    slots = torch.tensor([[0, 14], [7, -1]], dtype=torch.int32)
    whole = filled((4, 40), torch.float32)
    combine(y, slots, out=whole[::2, 4:24])
    torch.testing.assert_close(whole[0, 4:24], y[0, 0] + y[2, 4])
    torch.testing.assert_close(whole[2, 4:24], y[1, 2])
    assert bool((whole[1::2] == UNTOUCHED).all())
    assert bool((whole[:, :4] == UNTOUCHED).all())
    assert bool((whole[:, 24:] == UNTOUCHED).all())


def test_an_unrouted_token_gets_exactly_zero():
    out = combine(torch.full((2, 8), float("nan")), torch.full((3, 2), -1, dtype=torch.int32), torch.ones(3, 2))
    assert torch.equal(out, torch.zeros(3, 8))


def test_combine_refuses_what_it_does_not_take():
    y, slots = torch.ones(4, 8), torch.zeros(2, 2, dtype=torch.int32)
    for wrong in (
        {"y": torch.ones(8)},
        {"y": torch.ones(4, 16)[:, ::2]},
        {"slots": slots.long()},
        {"weights": torch.ones(2, 3)},
        {"weights": torch.ones(2, 2).half()},
        {"out": torch.ones(2, 9)},
    ):
        with pytest.raises(ShapeError):
            combine(**{"y": y, "slots": slots, **wrong})


# -- permutation ------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=40)
@given(
    rows=st.integers(0, 40),
    topk=st.integers(1, 4),
    experts=st.integers(1, 20),
    dtype=st.sampled_from([torch.int32, torch.int64]),
    mapped=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_a_stable_sort_by_local_expert(rows, topk, experts, dtype, mapped, seed):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(-2, experts + 3, (rows, topk), generator=generator).to(dtype)
    num_local, expert_map = experts, None
    if mapped:  # every other expert lives here, in reverse order
        here = list(range(0, experts, 2))
        num_local = len(here)
        expert_map = torch.full((experts,), -1, dtype=torch.int32)
        expert_map[here] = torch.arange(num_local - 1, -1, -1, dtype=torch.int32)
    plan = plan_permutation(ids, num_local, expert_map)
    slots = local_slots(ids, expert_map, num_local).flatten()
    order = torch.argsort(torch.where(slots >= 0, slots, num_local), stable=True)
    wanted = torch.full((rows * topk,), -1, dtype=torch.int64)
    routed = int((slots >= 0).sum())
    wanted[order[:routed]] = torch.arange(routed)
    assert torch.equal(plan.positions.flatten().long(), wanted)
    counts = torch.bincount(slots[slots >= 0], minlength=num_local)
    assert torch.equal(plan.counts.long(), counts)
    assert torch.equal(plan.starts.long(), counts.cumsum(0) - counts)


@settings(deadline=None, max_examples=30)
@given(rows=st.integers(1, 12), topk=st.integers(1, 3), hidden=st.integers(1, 70), seed=st.integers(0, 1000))
def test_rows_and_scales_move_to_their_positions(rows, topk, hidden, seed):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(-1, 4, (rows, topk), generator=generator)
    x = torch.randint(-99, 99, (rows, 2 * hidden), generator=generator).to(torch.int8)[:, :hidden]
    scale = torch.rand(rows, generator=generator)
    plan = plan_permutation(ids, 4)
    moved, moved_scale = permute_rows(x, plan, scale)
    assert moved.shape == (rows * topk, hidden)
    for row in range(rows):
        for k in range(topk):
            position = int(plan.positions[row, k])
            if position >= 0:
                assert torch.equal(moved[position], x[row])
                assert moved_scale[position] == scale[row]


def test_permutation_refuses_what_it_does_not_take():
    ids = torch.zeros(2, 2, dtype=torch.int64)
    with pytest.raises(ShapeError, match="topk_ids"):
        plan_permutation(ids.float(), 2)
    with pytest.raises(ShapeError, match="expert_map"):
        plan_permutation(ids, 2, torch.zeros(2))
    with pytest.raises(ShapeError, match="x"):
        permute_rows(torch.ones(3, 4), plan_permutation(ids, 2))
