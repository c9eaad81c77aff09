# Imports of kernels come after the checks for what they need.
# ruff: noqa: E402
"""The Triton experts compiled for the GPU at hand, against torch in fp32. Run: ``pytest tests/e2e/cuda``."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from tests.kernel_cases import (
    TOLERANCE,
    UNTOUCHED,
    batched_case,
    expert_weights,
    filled,
    gemm_reference,
    reference,
    relative_error,
)
from vllm_ascend_moe.experts.activation import ACTIVATIONS, activate
from vllm_ascend_moe.experts.reference import ReferenceExperts, local_slots

pytestmark = pytest.mark.cuda
triton = pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU; run there: pytest tests/e2e/cuda", allow_module_level=True)

from vllm_ascend_moe.experts.batched_triton import TritonBatchedExperts
from vllm_ascend_moe.experts.rows_triton import TritonRowsExperts
from vllm_ascend_moe.experts.scaled import ScaledExpertWeights
from vllm_ascend_moe.kernels.combine import combine
from vllm_ascend_moe.kernels.launch import expert_gemm
from vllm_ascend_moe.kernels.permute import plan_permutation
from vllm_ascend_moe.kernels.quantize import activate_rows
from vllm_ascend_moe.kernels.tiles import HOPPER_16BIT

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
HOPPER = torch.cuda.get_device_capability()[0] == 9
needs_fp8 = pytest.mark.skipif(not HOPPER, reason="needs fp8 matrix units (Hopper)")
COUNTS = {
    "all_zero": [0] * 8,
    "one_token": [0, 0, 1, 0, 0, 0, 0, 0],
    "few": [1, 2, 15, 16, 3, 0, 7, 9],
    "middle": [17, 31, 32, 33, 63, 64, 65, 0],
    "under_a_tile": [66, 100, 127, 120, 97, 70, 0, 1],
    "around_a_tile": [127, 128, 129, 130, 255, 256, 257, 0],
    "mixed": [0, 1, 16, 17, 64, 65, 128, 1000],
    "full": [1024] * 8,
}
HINTS = pytest.mark.parametrize("expected_rows", [None, 1024], ids=["any_rows", "many_rows"])


@pytest.fixture(autouse=True)
def _ieee_products(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", [256, 200, 72], ids=lambda h: f"H{h}")
@HINTS
def test_batched_experts(counts, dtype, hidden, expected_rows):
    case = batched_case(counts, 1024, hidden, 160, dtype=dtype, device="cuda", seed=hidden)
    out = filled(tuple(case.hidden.shape), dtype, "cuda")
    TritonBatchedExperts(expected_rows).apply_batched(case.hidden, case.counts, case.weights, out=out)
    assert relative_error(out[case.own()], reference(case)) < TOLERANCE[dtype]
    assert bool((out[~case.own()] == UNTOUCHED).all())


@pytest.mark.skipif(not HOPPER, reason="rows of the table for Hopper")
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("row", HOPPER_16BIT)
@pytest.mark.parametrize("activation", ["none", "silu"])
def test_every_row_of_the_tile_table(counts, row, activation):
    generator = torch.Generator(device="cuda").manual_seed(1)
    a = torch.randn(8, 1024, 200, generator=generator, device="cuda").bfloat16()
    w = (torch.randn(8, 320, 200, generator=generator, device="cuda") * 200**-0.5).bfloat16()
    for expert, count in enumerate(counts):
        a[expert, count:] = float("nan")
    out = filled((8, 1024, 160 if activation == "silu" else 320), torch.bfloat16, "cuda")
    index = torch.tensor(counts, dtype=torch.int32, device="cuda")
    expert_gemm(a, w, index, activation=activation, out=out, tiles=HOPPER_16BIT[row])
    for expert, count in enumerate(counts):
        wanted = gemm_reference(a[expert, :count], w[expert], activation)
        assert relative_error(out[expert, :count], wanted) < TOLERANCE[torch.bfloat16]
        assert bool((out[expert, count:] == UNTOUCHED).all())


@HINTS
def test_results_wider_than_the_weights(expected_rows):
    a = torch.randn(4, 300, 256, device="cuda").bfloat16()
    w = (torch.randn(4, 512, 256, device="cuda") / 16).bfloat16()
    counts = [300, 128, 77, 3]
    index = torch.tensor(counts, dtype=torch.int32, device="cuda")
    out = expert_gemm(a, w, index, out_dtype=torch.float32, expected_rows=expected_rows)
    for expert, count in enumerate(counts):
        assert relative_error(out[expert, :count], a[expert, :count].float() @ w[expert].float().T) < 1e-5


@pytest.mark.skipif(not HOPPER, reason="descriptor stores and early launches are for Hopper")
@pytest.mark.parametrize("row", HOPPER_16BIT)
def test_kernels_that_wait_for_each_other_in_a_graph(row):
    """Each launch reads what the one before it wrote, and may be set up while that still runs."""
    counts = torch.tensor([3, 130, 64, 500], dtype=torch.int32, device="cuda")
    w13 = (torch.randn(4, 512, 256, device="cuda") / 16).bfloat16()
    w2 = (torch.randn(4, 256, 256, device="cuda") / 16).bfloat16()
    hidden = torch.randn(4, 512, 256, device="cuda").bfloat16()
    own = torch.arange(512, device="cuda") < counts[:, None]

    def layers(x: torch.Tensor, early: bool) -> torch.Tensor:
        tiles = replace(HOPPER_16BIT[row], early=early)
        for _ in range(4):
            x = expert_gemm(expert_gemm(x, w13, counts, activation="silu", tiles=tiles), w2, counts, tiles=tiles)
        return x

    layers(hidden, True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layers(hidden, True)
    for _ in range(20):
        hidden.copy_(torch.randn_like(hidden))
        graph.replay()
        assert torch.equal(out[own], layers(hidden, False)[own])


@pytest.mark.parametrize("activation", ACTIVATIONS)
@HINTS
def test_every_activation_with_bias(activation, expected_rows):
    case = batched_case(
        COUNTS["mixed"], 1024, 256, 192, dtype=torch.bfloat16, device="cuda", activation=activation, bias=True
    )
    out = TritonBatchedExperts(expected_rows).apply_batched(
        case.hidden, case.counts, case.weights, activation=activation
    )
    assert relative_error(out[case.own()], reference(case)) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize(("k", "n"), [(33, 17), (64, 8), (65, 129), (1, 1), (2048, 1536)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_odd_sizes(k, n, dtype):
    counts = [5, 0, 130, 64]
    a = torch.randn(4, 131, k, device="cuda").to(dtype)
    w = (torch.randn(4, n, k, device="cuda") * k**-0.5).to(dtype)
    out = filled((4, 131, n), dtype, "cuda")
    expert_gemm(a, w, torch.tensor(counts, dtype=torch.int32, device="cuda"), out=out)
    for expert, count in enumerate(counts):
        assert relative_error(out[expert, :count], a[expert, :count].float() @ w[expert].float().T) < TOLERANCE[dtype]
        assert bool((out[expert, count:] == UNTOUCHED).all())


@pytest.mark.parametrize("shift", [0, 3], ids=["aligned", "unaligned"])
def test_strides(shift):
    counts = torch.tensor([200, 1, 40], dtype=torch.int32, device="cuda")
    a = torch.randn(6, 256, 400, device="cuda").bfloat16()[::2, :, shift : shift + 128]
    w = torch.randn(3, 64, 300, device="cuda").bfloat16()[:, :, shift : shift + 128]
    whole = filled((3, 512, 100), torch.bfloat16, "cuda")
    out = whole[:, ::2, shift : shift + 64]
    expert_gemm(a, w, counts, out=out)
    for expert, count in enumerate(counts.tolist()):
        wanted = a[expert, :count].float() @ w[expert].float().T
        assert relative_error(out[expert, :count], wanted) < TOLERANCE[torch.bfloat16]
        assert bool((out[expert, count:] == UNTOUCHED).all())
    out.fill_(UNTOUCHED)
    assert bool((whole == UNTOUCHED).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 7, 300, 3000])
@pytest.mark.parametrize("mapped", [False, True], ids=["local_ids", "expert_map"])
def test_rows_experts(dtype, rows, mapped):
    generator = torch.Generator(device="cuda").manual_seed(rows)
    experts, local = 40, 10
    weights = expert_weights(local, 128, 64, dtype=dtype, device="cuda")
    expert_map = None
    if mapped:
        expert_map = torch.full((experts,), -1, dtype=torch.int32, device="cuda")
        expert_map[::4] = torch.randperm(local, device="cuda").int()
    hidden = torch.randn(rows, 128, generator=generator, device="cuda").to(dtype)
    ids = torch.randint(-1, experts + 2, (rows, 8), generator=generator, device="cuda")
    hidden[(local_slots(ids, expert_map, local) < 0).all(dim=1)] = float("nan")
    factors = torch.rand(rows, 8, generator=generator, device="cuda")
    out = TritonRowsExperts().apply(hidden, factors, ids, weights, expert_map=expert_map)
    wanted = ReferenceExperts().apply(hidden.float(), factors, ids, weights, expert_map=expert_map)
    assert relative_error(out, wanted) < 2 * TOLERANCE[dtype]


def test_rows_experts_give_the_same_bits_in_every_run():
    weights = expert_weights(16, 256, 128, dtype=torch.bfloat16, device="cuda")
    hidden = torch.randn(500, 256, device="cuda").bfloat16()
    ids, factors = torch.randint(0, 16, (500, 8), device="cuda"), torch.rand(500, 8, device="cuda")
    runs = [TritonRowsExperts().apply(hidden, factors, ids, weights) for _ in range(5)]
    assert all(torch.equal(run, runs[0]) for run in runs[1:])


@pytest.mark.parametrize("experts", [3, 64, 200])
def test_permutation_of_many_choices(experts):
    ids = torch.randint(-1, experts + 1, (4000, 8), device="cuda")
    plan = plan_permutation(ids, experts)
    slots = local_slots(ids, None, experts).flatten()
    order = torch.argsort(torch.where(slots >= 0, slots, experts), stable=True)
    wanted = torch.full_like(slots, -1)
    routed = int((slots >= 0).sum())
    wanted[order[:routed]] = torch.arange(routed, device="cuda")
    assert torch.equal(plan.positions.flatten().long(), wanted)
    assert torch.equal(plan.counts.long(), torch.bincount(slots[slots >= 0], minlength=experts))


@pytest.mark.parametrize("hidden", [100, 2048, 7168])
def test_combine(hidden):
    slots = torch.randint(-1, 5000, (700, 8), dtype=torch.int32, device="cuda")
    y = torch.full((5000, hidden), float("nan"), device="cuda").bfloat16()
    used = slots[slots >= 0].unique().long()
    y[used] = torch.randn(len(used), hidden, device="cuda").bfloat16()
    weights = torch.rand(700, 8, device="cuda")
    safe = torch.where((slots >= 0)[..., None], y[slots.clamp(min=0).long()].float(), 0.0)
    wanted = (safe * weights[..., None] * (slots >= 0)[..., None]).sum(1)
    assert relative_error(combine(y, slots, weights), wanted) < 4e-3


def test_int8_products_are_exact():
    a = torch.randint(-127, 128, (4, 300, 512), dtype=torch.int8, device="cuda")
    w = torch.randint(-127, 128, (4, 192, 512), dtype=torch.int8, device="cuda")
    counts = torch.tensor([300, 5, 40, 128], dtype=torch.int32, device="cuda")
    out = expert_gemm(a, w, counts, out_dtype=torch.float32)
    for expert, count in enumerate(counts.tolist()):
        assert torch.equal(out[expert, :count].double(), a[expert, :count].double() @ w[expert].double().T)


@pytest.mark.parametrize("payload", [torch.int8, pytest.param(torch.float8_e4m3fn, marks=needs_fp8)], ids=str)
@HINTS
def test_a_quantised_payload_with_full_weights(payload, expected_rows):
    case = batched_case(COUNTS["mixed"], 1024, 256, 160, dtype=torch.bfloat16, device="cuda")
    quantised = torch.randint(-8, 9, case.hidden.shape, device="cuda").to(payload)
    scales = torch.rand(8, 1024, device="cuda") * 0.2
    out = TritonBatchedExperts(expected_rows).apply_batched(quantised, case.counts, case.weights, scales=scales)
    wanted = ReferenceExperts().apply_batched(
        quantised, case.counts, case.weights, scales=scales, out=torch.zeros(out.shape, device="cuda")
    )
    assert relative_error(out[case.own()], wanted[case.own()]) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.int8, 0.03), pytest.param(torch.float8_e4m3fn, 0.06, marks=needs_fp8)], ids=str
)
def test_quantised_weights_and_rows(dtype, tolerance):
    case = batched_case(COUNTS["mixed"], 1024, 512, 384, dtype=torch.bfloat16, device="cuda")
    scaled = ScaledExpertWeights.quantize(case.weights, dtype)
    out = TritonBatchedExperts().apply_batched(case.hidden, case.counts, scaled)
    zeros = torch.zeros(out.shape, device="cuda")
    exact = ReferenceExperts().apply_batched(case.hidden.float(), case.counts, scaled.dequantize(), out=zeros)
    assert 0 < relative_error(out[case.own()], exact[case.own()]) < tolerance


@needs_fp8
def test_fp8_products_accumulate_in_fp32():
    """A long sum of equal terms, which 14 bits of accumulator would cut off."""
    a = torch.full((1, 128, 8192), 1.0, device="cuda").to(torch.float8_e4m3fn)
    w = torch.full((1, 128, 8192), 0.40625, device="cuda").to(torch.float8_e4m3fn)
    out = expert_gemm(a, w, torch.tensor([128], dtype=torch.int32, device="cuda"), out_dtype=torch.float32)
    assert relative_error(out[0], torch.full((128, 128), 8192 * 0.40625, device="cuda")) < 1e-3


@pytest.mark.parametrize("to", [torch.int8, pytest.param(torch.float8_e4m3fn, marks=needs_fp8)], ids=str)
def test_activation_with_quantisation(to):
    counts = torch.tensor([300, 0, 17], dtype=torch.int32, device="cuda")
    own = torch.arange(300, device="cuda") < counts[:, None]
    x = torch.randn(3, 300, 3000, device="cuda").bfloat16()
    x[~own] = float("nan")
    q, scale = activate_rows(x, counts, quantize_to=to)
    wanted = activate(x[own].float(), "silu")
    limit = 127.0 if to == torch.int8 else 448.0
    torch.testing.assert_close(scale[own], wanted.abs().amax(-1) / limit, rtol=1e-4, atol=0)
    back = q[own].float() * scale[own][:, None]
    assert relative_error(back, wanted) < (0.03 if to == torch.int8 else 0.04)


def test_a_captured_graph_follows_the_counts():
    """Nothing waits for the host: one graph serves any counts written to the same tensor."""
    case = batched_case([0] * 8, 1024, 256, 160, dtype=torch.bfloat16, device="cuda")
    hidden = torch.randn(8, 1024, 256, device="cuda").bfloat16()
    experts = TritonBatchedExperts()
    out = torch.empty_like(hidden)
    experts.apply_batched(hidden, case.counts, case.weights, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        experts.apply_batched(hidden, case.counts, case.weights, out=out)
    for counts in COUNTS.values():
        case.counts.copy_(torch.tensor(counts, dtype=torch.int32))
        out.fill_(UNTOUCHED)
        graph.replay()
        own = case.own()
        wanted = ReferenceExperts().apply_batched(
            hidden.float(), case.counts, case.weights, out=torch.zeros(hidden.shape, device="cuda")
        )
        assert relative_error(out[own], wanted[own]) < TOLERANCE[torch.bfloat16]
        assert bool((out[~own] == UNTOUCHED).all())


@contextmanager
def no_waiting():
    """An operator of torch that waits for the GPU is an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("scaled", [False, True], ids=["bf16", "int8_weights"])
def test_rows_experts_in_a_captured_graph_follow_the_ids(scaled):
    """One graph serves any routing of its number of tokens, also one that leaves experts or tokens without rows."""
    weights = expert_weights(16, 256, 128, dtype=torch.bfloat16, device="cuda")
    used = ScaledExpertWeights.quantize(weights, torch.int8) if scaled else weights
    hidden, factors = torch.randn(300, 256, device="cuda").bfloat16(), torch.rand(300, 8, device="cuda")
    ids = torch.randint(0, 16, (300, 8), device="cuda")
    experts = TritonRowsExperts()
    out = torch.empty_like(hidden)
    with no_waiting():
        experts.apply(hidden, factors, ids, used, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        experts.apply(hidden, factors, ids, used, out=out)
    for low, high in ((0, 16), (3, 4), (-1, 16), (-1, 0)):
        ids.copy_(torch.randint(low, high, (300, 8), device="cuda"))
        out.fill_(UNTOUCHED)
        graph.replay()
        captured = out.clone()
        assert torch.equal(captured, experts.apply(hidden, factors, ids, used))
        wanted = ReferenceExperts().apply(hidden.float(), factors, ids, used.dequantize() if scaled else weights)
        assert bool((captured[(ids < 0).all(1)] == 0).all())
        if high > 0:
            assert relative_error(captured, wanted) < (0.03 if scaled else 2 * TOLERANCE[torch.bfloat16])


def test_scaled_batched_experts_in_a_captured_graph_follow_the_counts():
    case = batched_case([64] * 8, 1024, 256, 160, dtype=torch.bfloat16, device="cuda")
    scaled = ScaledExpertWeights.quantize(case.weights, torch.int8)
    hidden = torch.randn(8, 1024, 256, device="cuda").bfloat16()
    experts = TritonBatchedExperts()
    out = torch.empty_like(hidden)
    with no_waiting():
        experts.apply_batched(hidden, case.counts, scaled, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        experts.apply_batched(hidden, case.counts, scaled, out=out)
    for counts in COUNTS.values():
        case.counts.copy_(torch.tensor(counts, dtype=torch.int32))
        out.fill_(UNTOUCHED)
        graph.replay()
        own = case.own()
        assert bool((out[~own] == UNTOUCHED).all())
        again = experts.apply_batched(hidden, case.counts, scaled)
        assert torch.equal(out[own], again[own])
