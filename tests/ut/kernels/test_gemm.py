"""expert_gemm in the interpreter against torch, through both ways of reading and both ways of finding tiles."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernel_cases import TOLERANCE, UNTOUCHED, filled, gemm_reference, relative_error
from vllm_ascend_moe.experts.activation import is_gated
from vllm_ascend_moe.kernels.launch import expert_gemm
from vllm_ascend_moe.kernels.operands import ACTIVATION_FORMS
from vllm_ascend_moe.kernels.tiles import TILE_TABLE, GemmTiles

BASE = TILE_TABLE["interpreter", 4]
# Descriptors as on Hopper; pointers; tiles found in scalar code, as on Ascend, without and with all passes.
PATHS = {
    "descriptors": replace(BASE, tma=True),
    "descriptor_stores": replace(BASE, tma=True, store_n=16, flatten=False),
    "pointers": BASE,
    "scan": replace(BASE, scan=True, few_m=0, halves=False, group_m=1),
    "scan_all_passes": replace(BASE, scan=True),
}
paths = pytest.mark.parametrize("tiles", PATHS.values(), ids=PATHS)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def poisoned(counts: list[int], rows: int, k: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    a = torch.randn((len(counts), rows, k), generator=torch.Generator().manual_seed(seed)).to(dtype)
    for expert, count in enumerate(counts):
        a[expert, count:] = float("nan")
    return a


def weights(experts: int, n: int, k: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    w = torch.randn((experts, n, k), generator=torch.Generator().manual_seed(seed + 1))
    return (w * k**-0.5).to(dtype)


def parts(activation: str) -> int:
    return 2 if activation != "none" and is_gated(activation) else 1


def assert_own_rows(
    out: torch.Tensor, a: torch.Tensor, w: torch.Tensor, counts: list[int], activation: str, tolerance: float
) -> None:
    for expert, count in enumerate(counts):
        wanted = gemm_reference(a[expert, :count], w[expert], activation)
        assert relative_error(out[expert, :count], wanted) < tolerance, (expert, count)
        assert bool((out[expert, count:] == UNTOUCHED).all()), f"expert {expert}: wrote past its {count} rows"


@settings(deadline=None, max_examples=60)
@given(
    counts=st.lists(st.sampled_from([0, 1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 130]), min_size=1, max_size=5),
    spare=st.integers(0, 3),
    n=st.integers(1, 70),
    k=st.integers(1, 70),
    path=st.sampled_from(sorted(PATHS)),
    dtype=st.sampled_from(DTYPES),
    activation=st.sampled_from(["none", "silu"]),
    seed=st.integers(0, 1000),
)
def test_any_counts_and_sizes(counts, spare, n, k, path, dtype, activation, seed):
    tiles = PATHS[path]
    if tiles.tma:  # descriptors need strides of 16 bytes; everything else goes through pointers anyway
        k = -(-k // 8) * 8
    rows = max(counts) + spare
    a, w = poisoned(counts, rows, k, dtype, seed), weights(len(counts), n * parts(activation), k, dtype, seed)
    out = filled((len(counts), rows, n), dtype)
    result = expert_gemm(
        a, w, torch.tensor(counts, dtype=torch.int32), activation=activation, out=out, tiles=tiles if rows else None
    )
    assert result is out
    assert_own_rows(out, a, w, counts, activation, TOLERANCE[dtype])


@paths
@pytest.mark.parametrize("activation", ACTIVATION_FORMS)
def test_every_activation_with_bias(tiles, activation):
    counts, n, k = [40, 0, 3], 24, 48
    a = poisoned(counts, 41, k, torch.float32, 3)
    w = weights(3, n * parts(activation), k, torch.float32, 3)
    bias = torch.randn(3, w.shape[1], generator=torch.Generator().manual_seed(5))
    out = expert_gemm(a, w, torch.tensor(counts, dtype=torch.int32), activation=activation, bias=bias, tiles=tiles)
    for expert, count in enumerate(counts):
        wanted = gemm_reference(a[expert, :count], w[expert], activation, bias[expert])
        assert relative_error(out[expert, :count], wanted) < 2e-6


@paths
def test_ragged_groups_in_any_order_with_gaps(tiles):
    counts, starts, k, n = [5, 0, 70, 33], [90, 0, 3, 100], 32, 40
    a = torch.full((140, k), float("nan"))
    for count, start in zip(counts, starts, strict=True):
        a[start : start + count] = torch.randn(count, k, generator=torch.Generator().manual_seed(count))
    w = weights(4, n, k, torch.float32, 1)
    out = filled((140, n), torch.float32)
    index = torch.tensor([counts, starts], dtype=torch.int32)
    expert_gemm(a, w, index[0], starts=index[1], out=out, tiles=tiles)
    touched = torch.zeros(140, dtype=torch.bool)
    for expert, (count, start) in enumerate(zip(counts, starts, strict=True)):
        wanted = gemm_reference(a[start : start + count], w[expert], "none")
        assert relative_error(out[start : start + count], wanted) < 2e-6
        touched[start : start + count] = True
    assert bool((out[~touched] == UNTOUCHED).all())


@paths
def test_strided_rows_experts_weights_and_results(tiles):
    counts, n, k = [66, 1, 20], 24, 32
    a = torch.full((6, 70, 48), float("nan"))[::2, :, 8:40]
    a.copy_(poisoned(counts, 70, k, torch.float32, 2))
    w = torch.full((3, n, 2 * k), float("nan"))[:, :, :k]
    w.copy_(weights(3, n, k, torch.float32, 2))
    whole = filled((3, 140, 64), torch.float32)
    out = whole[:, ::2, 16 : 16 + n]
    expert_gemm(a, w, torch.tensor(counts, dtype=torch.int32), out=out, tiles=tiles)
    assert_own_rows(out, a, w, counts, "none", 2e-6)
    out.fill_(UNTOUCHED)
    assert bool((whole == UNTOUCHED).all())


@paths
@pytest.mark.parametrize(("counts", "n"), [([128], 60), ([256, 5], 30), ([256, 5, 7], 30)])
def test_last_rounds_of_one_tile(tiles, counts, n):
    """Three programs, four tiles of 64 x 32: the last is cut in half, but not where two more tiles follow."""
    a, w = poisoned(counts, 256, 32, torch.float32, 7), weights(len(counts), n, 32, torch.float32, 7)
    out = filled((len(counts), 256, n), torch.float32)
    expert_gemm(a, w, torch.tensor(counts, dtype=torch.int32), out=out, tiles=tiles)
    assert_own_rows(out, a, w, counts, "none", 2e-6)


@paths
@pytest.mark.parametrize("spare", [0, 1], ids=["whole_rows_apart", "half_a_row_apart"])
def test_strided_half_precision_results(tiles, spare):
    """Descriptors can store the first, not the second: the experts' results are no whole number of rows apart."""
    counts, n, k = [130, 64, 3], 40, 32
    a, w = poisoned(counts, 130, k, torch.bfloat16, 8), weights(3, n, k, torch.bfloat16, 8)
    whole = filled((3, 260 + spare, 64), torch.bfloat16)
    out = whole[:, :260:2, 8 : 8 + n]
    expert_gemm(a, w, torch.tensor(counts, dtype=torch.int32), out=out, tiles=tiles)
    assert_own_rows(out, a, w, counts, "none", TOLERANCE[torch.bfloat16])
    out.fill_(UNTOUCHED)
    assert bool((whole == UNTOUCHED).all())


@paths
def test_row_and_column_scales(tiles):
    counts, n, k = [35, 2], 40, 32
    a, w = poisoned(counts, 36, k, torch.float32, 4), weights(2, 2 * n, k, torch.float32, 4)
    a_scale, w_scale = torch.rand(2, 36) + 0.5, torch.rand(2, 2 * n) + 0.5
    out = expert_gemm(
        a,
        w,
        torch.tensor(counts, dtype=torch.int32),
        activation="silu",
        a_scale=a_scale,
        w_scale=w_scale,
        tiles=tiles,
    )
    for expert, count in enumerate(counts):
        scaled = a[expert, :count] * a_scale[expert, :count, None], w[expert] * w_scale[expert, :, None]
        assert relative_error(out[expert, :count], gemm_reference(*scaled, "silu")) < 2e-6


@paths
def test_int8_products_are_exact(tiles):
    generator = torch.Generator().manual_seed(0)
    a = torch.randint(-127, 128, (2, 40, 64), dtype=torch.int8, generator=generator)
    w = torch.randint(-127, 128, (2, 16, 64), dtype=torch.int8, generator=generator)
    out = expert_gemm(a, w, torch.tensor([40, 9], dtype=torch.int32), out_dtype=torch.float32, tiles=tiles)
    exact = a.long() @ w.long().mT
    assert torch.equal(out[0].long(), exact[0])
    assert torch.equal(out[1, :9].long(), exact[1, :9])


@paths
@pytest.mark.parametrize("payload", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_quantised_rows_against_full_weights(tiles, payload):
    generator = torch.Generator().manual_seed(1)
    a = torch.randint(-8, 9, (1, 20, 32), generator=generator).to(payload)  # exact in both types
    w = weights(1, 24, 32, torch.bfloat16, 1)
    scale = torch.rand(1, 20, generator=generator) + 0.5
    out = expert_gemm(a, w, torch.tensor([20], dtype=torch.int32), a_scale=scale, out_dtype=torch.float32, tiles=tiles)
    assert relative_error(out[0], gemm_reference(a[0].float() * scale[0, :, None], w[0], "none")) < 2e-6


@paths
def test_fp8_by_fp8(tiles):
    a = torch.randn(1, 20, 32, generator=torch.Generator().manual_seed(1)).to(torch.float8_e4m3fn)
    w = torch.randn(1, 24, 32, generator=torch.Generator().manual_seed(2)).to(torch.float8_e4m3fn)
    out = expert_gemm(a, w, torch.tensor([20], dtype=torch.int32), out_dtype=torch.float32, tiles=tiles)
    assert relative_error(out[0], gemm_reference(a[0], w[0], "none")) < 2e-6


@paths
def test_a_count_above_the_capacity_stays_inside_the_tensor(tiles):
    a, w = torch.randn(2, 10, 32), torch.randn(2, 16, 32)
    whole = filled((3, 10, 16), torch.float32)
    expert_gemm(a, w, torch.tensor([99, 4], dtype=torch.int32), out=whole[:2], tiles=tiles)
    assert relative_error(whole[0], a[0] @ w[0].T) < 2e-6
    assert bool((whole[1, 4:] == UNTOUCHED).all())
    assert bool((whole[2] == UNTOUCHED).all())


def test_the_result_does_not_depend_on_the_tiles():
    counts = [70, 3, 64]
    a, w = poisoned(counts, 70, 64, torch.float32, 9), weights(3, 40, 64, torch.float32, 9)
    index = torch.tensor(counts, dtype=torch.int32)
    own = torch.arange(70) < index[:, None]
    results = [expert_gemm(a, w, index, tiles=tiles)[own] for tiles in PATHS.values()]
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("experts", "rows", "n"), [(0, 4, 8), (2, 0, 8), (2, 4, 0)])
def test_nothing_to_do(experts, rows, n):
    out = expert_gemm(torch.randn(experts, rows, 16), torch.randn(experts, n, 16), torch.zeros(experts).int())
    assert out.shape == (experts, rows, n)


def test_all_counts_zero_writes_nothing():
    out = filled((2, 4, 8), torch.float32)
    expert_gemm(torch.full((2, 4, 16), float("nan")), torch.randn(2, 8, 16), torch.zeros(2).int(), out=out)
    assert bool((out == UNTOUCHED).all())


def test_a_new_result_has_the_weights_dtype_or_bf16():
    a, w, counts = torch.randn(1, 4, 16), torch.randn(1, 8, 16), torch.tensor([4], dtype=torch.int32)
    assert expert_gemm(a.half(), w.half(), counts).dtype == torch.float16
    assert expert_gemm(a.to(torch.int8), w.to(torch.int8), counts).dtype == torch.bfloat16


def test_table_tiles_are_used_without_an_argument():
    assert isinstance(BASE, GemmTiles)
    counts = [70, 5]
    a, w = poisoned(counts, 70, 33, torch.float32, 6), weights(2, 17, 33, torch.float32, 6)  # 33: no descriptor
    out = filled((2, 70, 17), torch.float32)
    expert_gemm(a, w, torch.tensor(counts, dtype=torch.int32), out=out)
    assert_own_rows(out, a, w, counts, "none", 2e-6)
