"""The two expert classes in the interpreter against the reference experts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernel_cases import TOLERANCE, UNTOUCHED, batched_case, expert_weights, filled, reference, relative_error
from vllm_ascend_moe.errors import InvalidValueError, ShapeError
from vllm_ascend_moe.experts.activation import ACTIVATIONS
from vllm_ascend_moe.experts.batched_triton import TritonBatchedExperts
from vllm_ascend_moe.experts.reference import ReferenceExperts, local_slots
from vllm_ascend_moe.experts.rows_triton import TritonRowsExperts
from vllm_ascend_moe.experts.scaled import ScaledExpertWeights

BATCHED, ROWS = TritonBatchedExperts(), TritonRowsExperts()


@settings(deadline=None, max_examples=25)
@given(
    counts=st.lists(st.sampled_from([0, 1, 5, 16, 33, 64, 70]), min_size=1, max_size=4),
    hidden=st.integers(1, 50),
    inner=st.integers(1, 50),
    dtype=st.sampled_from(list(TOLERANCE)),
    bias=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_batched_experts_equal_the_reference(counts, hidden, inner, dtype, bias, seed):
    case = batched_case(counts, max(counts) + 1, hidden, inner, dtype=dtype, bias=bias, seed=seed)
    out = filled(tuple(case.hidden.shape), dtype)
    assert BATCHED.apply_batched(case.hidden, case.counts, case.weights, out=out) is out
    assert relative_error(out[case.own()], reference(case)) < TOLERANCE[dtype]
    assert bool((out[~case.own()] == UNTOUCHED).all())


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation(activation):
    case = batched_case([9, 0, 20], 20, 24, 40, activation=activation, bias=True)
    out = BATCHED.apply_batched(case.hidden, case.counts, case.weights, activation=activation)
    assert relative_error(out[case.own()], reference(case)) < 2e-6


@settings(deadline=None, max_examples=25)
@given(
    rows=st.integers(1, 30),
    topk=st.integers(1, 4),
    dtype=st.sampled_from(list(TOLERANCE)),
    id_dtype=st.sampled_from([torch.int32, torch.int64]),
    mapped=st.booleans(),
    weight_on_input=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_rows_experts_equal_the_reference(rows, topk, dtype, id_dtype, mapped, weight_on_input, seed):
    generator = torch.Generator().manual_seed(seed)
    experts, local = 7, 3
    weights = expert_weights(local, 24, 16, dtype=dtype, seed=seed)
    expert_map = None
    if mapped:
        expert_map = torch.full((experts,), -1, dtype=torch.int32)
        expert_map[[5, 0, 3]] = torch.arange(local, dtype=torch.int32)
    hidden = torch.randn(rows, 24, generator=generator).to(dtype)
    ids = torch.randint(-1, experts + 2, (rows, topk), generator=generator).to(id_dtype)
    hidden[(local_slots(ids, expert_map, local) < 0).all(dim=1)] = float("nan")  # rows nobody here may read
    factors = torch.rand(rows, topk, generator=generator)
    arguments = {"expert_map": expert_map, "apply_router_weight_on_input": weight_on_input}
    out = ROWS.apply(hidden, factors, ids, weights, **arguments)
    wanted = ReferenceExperts().apply(hidden.float(), factors, ids, weights, **arguments)
    assert out.dtype == dtype
    # Expert outputs are rounded before they are summed, and a sum of few may cancel.
    assert relative_error(out, wanted) < 4 * TOLERANCE[dtype]


def test_rows_may_be_strided_and_the_result_is_written_everywhere():
    weights = expert_weights(2, 16, 8)
    hidden = torch.randn(6, 40)[::2, 4:20]
    ids = torch.tensor([[0, -1], [-1, -1], [1, 0]])
    out = filled((3, 16), torch.float32)
    assert ROWS.apply(hidden, torch.ones(3, 2), ids, weights, out=out) is out
    assert relative_error(out, ReferenceExperts().apply(hidden, torch.ones(3, 2), ids, weights)) < 2e-6
    assert torch.equal(out[1], torch.zeros(16))


def test_no_rows():
    out = ROWS.apply(torch.ones(0, 16), torch.ones(0, 2), torch.ones(0, 2).long(), expert_weights(2, 16, 8))
    assert out.shape == (0, 16)


def test_an_int8_payload_with_scales():
    case = batched_case([12, 3], 12, 32, 24, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(2)
    payload = torch.randint(-127, 128, case.hidden.shape, dtype=torch.int8, generator=generator)
    scales = torch.rand(2, 12, generator=generator) * 0.02
    out = BATCHED.apply_batched(payload, case.counts, case.weights, scales=scales)
    wanted = ReferenceExperts().apply_batched(payload, case.counts, case.weights, scales=scales)
    assert out.dtype == wanted.dtype == torch.bfloat16
    assert relative_error(out[case.own()], wanted[case.own()]) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.int8, 0.02), (torch.float8_e4m3fn, 0.12)], ids=str)
def test_quantised_weights_and_rows(dtype, tolerance):
    case = batched_case([30, 0, 7], 30, 64, 48)
    scaled = ScaledExpertWeights.quantize(case.weights, dtype)
    out = BATCHED.apply_batched(case.hidden, case.counts, scaled)
    exact = ReferenceExperts().apply_batched(case.hidden, case.counts, scaled.dequantize())[case.own()]
    error = relative_error(out[case.own()], exact)
    assert 0 < error < tolerance
    assert out.dtype == case.hidden.dtype


def test_a_quantised_payload_meets_quantised_weights():
    case = batched_case([5], 5, 32, 16)
    scaled = ScaledExpertWeights.quantize(case.weights)
    payload = torch.randint(-127, 128, case.hidden.shape, dtype=torch.int8, generator=torch.Generator().manual_seed(0))
    scales = torch.full((1, 5), 0.01)
    out = BATCHED.apply_batched(payload, case.counts, scaled, scales=scales)
    wanted = ReferenceExperts().apply_batched(payload, case.counts, scaled.dequantize(), scales=scales)
    assert relative_error(out, wanted) < 0.02
    with pytest.raises(ShapeError, match="Requantise"):
        BATCHED.apply_batched(payload.to(torch.float8_e4m3fn), case.counts, scaled, scales=scales)


def test_counts_with_gaps_are_refused():
    """Kernels read them one after another, so that gaps would give other experts' counts."""
    case = batched_case([2, 3], 4, 24, 40)
    counts = torch.stack([case.counts, torch.full((2,), 4, dtype=torch.int32)], 1)[:, 0]
    for weights in (case.weights, ScaledExpertWeights.quantize(case.weights)):
        with pytest.raises(ShapeError, match=r"counts.stride\(0\)"):
            BATCHED.apply_batched(case.hidden, counts, weights)


def test_wrong_combinations_are_refused():
    case = batched_case([2], 2, 16, 8)
    with pytest.raises(InvalidValueError, match="activation"):
        BATCHED.apply_batched(case.hidden, case.counts, case.weights, activation="none")
    with pytest.raises(ShapeError, match="where scales are given"):
        BATCHED.apply_batched(case.hidden, case.counts, case.weights, scales=torch.ones(1, 2))
    scaled = ScaledExpertWeights.quantize(case.weights)
    bare = type(case.weights)(w13=scaled.w13, w2=scaled.w2)
    with pytest.raises(ShapeError, match="ScaledExpertWeights"):
        BATCHED.apply_batched(case.hidden, case.counts, bare)
