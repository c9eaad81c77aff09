# Device code: arguments are Triton values, whose types come from the call.
# ruff: noqa: ANN001, ANN201, ANN202
# mypy: disable-error-code="no-untyped-def"
"""The expert GEMM: every expert's rows times its own weights, for batched and for ragged rows, in one launch.

    batched   a [E_l, rows, K], expert e has the rows 0 .. count[e]-1 of its own slice
    ragged    a [total, K], expert e has the rows start[e] .. start[e]+count[e]-1

A persistent grid takes tiles in three passes, all chosen on the device from the counts alone:

1. experts with more than SMALL_ROWS rows, in BLOCK_M x BLOCK_N tiles, as many whole rounds of the grid as there are;
2. what is left of them, in half tiles if that fills the last round better;
3. experts with few rows, whose time is reading weights: narrow tiles with the product transposed.

Rows at and past the count are neither read nor written.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_ascend_moe.kernels.schedule import list_tiles, locate, place
from vllm_ascend_moe.kernels.tile import compute_tile


# Argument lists stay packed.
# fmt: off
@triton.jit
def _walk(
    begin, end, base, counts, ends, counts_ptr, num_experts, capacity, n_tiles, a, b, c, starts, a_scale, b_scale,
    bias, N, K, a_pitch, stride_ae, stride_am, stride_be, stride_bp, stride_bn, stride_ce, stride_cm, stride_se,
    stride_vp, stride_vn, LEAST: tl.constexpr, MOST: tl.constexpr, E_BLOCK: tl.constexpr, SCAN: tl.constexpr,
    SPLIT: tl.constexpr, FLATTEN: tl.constexpr, GROUP_M: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, SWAP: tl.constexpr, STAGES: tl.constexpr, PARTS: tl.constexpr, ACTIVATION: tl.constexpr,
    ACC: tl.constexpr, IMPRECISE: tl.constexpr, TMA: tl.constexpr, WIDEN: tl.constexpr,
):
    """This program's share of one pass: tiles begin, begin + programs, ... below end.

    index: of a tile, or of one of its SPLIT column slices; base: the number of the pass's first tile.
    """
    step = tl.num_programs(0)
    if FLATTEN:
        # One loop over tiles and K together: the next tile's loads start while this one's results are stored.
        for index in tl.range(begin, end, step, flatten=True):
            expert, local, count = locate(
                base + index // SPLIT,
                counts, ends, counts_ptr, num_experts, capacity, n_tiles, BLOCK_M, LEAST, MOST, E_BLOCK, SCAN,
            )
            m, n = place(local, tl.cdiv(count, BLOCK_M), n_tiles, GROUP_M)
            compute_tile(
                expert, count,
                m * BLOCK_M,
                (n * SPLIT + index % SPLIT) * BLOCK_N,
                a, b, c, starts, a_scale, b_scale, bias, N, K, a_pitch, stride_ae, stride_am, stride_be, stride_bp,
                stride_bn, stride_ce, stride_cm, stride_se, stride_vp, stride_vn, BLOCK_M, BLOCK_N, BLOCK_K, SWAP,
                STAGES, PARTS, ACTIVATION, ACC, IMPRECISE, TMA, WIDEN,
            )
    else:
        for index in range(begin, end, step):
            expert, local, count = locate(
                base + index // SPLIT,
                counts, ends, counts_ptr, num_experts, capacity, n_tiles, BLOCK_M, LEAST, MOST, E_BLOCK, SCAN,
            )
            m, n = place(local, tl.cdiv(count, BLOCK_M), n_tiles, GROUP_M)
            compute_tile(
                expert, count,
                m * BLOCK_M,
                (n * SPLIT + index % SPLIT) * BLOCK_N,
                a, b, c, starts, a_scale, b_scale, bias, N, K, a_pitch, stride_ae, stride_am, stride_be, stride_bp,
                stride_bn, stride_ce, stride_cm, stride_se, stride_vp, stride_vn, BLOCK_M, BLOCK_N, BLOCK_K, SWAP,
                STAGES, PARTS, ACTIVATION, ACC, IMPRECISE, TMA, WIDEN,
            )


@triton.jit
def expert_gemm_kernel(
    a, b, c, a_small, b_half, b_small, counts_ptr, starts, a_scale, b_scale, bias, num_experts, capacity, N, K,
    a_pitch, stride_ae, stride_am, stride_be, stride_bp, stride_bn, stride_ce, stride_cm, stride_se, stride_vp,
    stride_vn, E_BLOCK: tl.constexpr, SCAN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, STAGES: tl.constexpr, HALVES: tl.constexpr,
    SMALL_ROWS: tl.constexpr, SMALL_M: tl.constexpr, SMALL_N: tl.constexpr, SMALL_K: tl.constexpr,
    SMALL_STAGES: tl.constexpr, FLATTEN: tl.constexpr, PARTS: tl.constexpr, ACTIVATION: tl.constexpr,
    ACC: tl.constexpr, IMPRECISE: tl.constexpr, TMA: tl.constexpr, WIDEN: tl.constexpr,
):
    """See the module docstring. Descriptors with TMA, else pointers, in a, b, a_small, b_half and b_small.

    capacity: no expert is taken to have more rows than this, whatever its count says.
    """
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    n_tiles = tl.cdiv(N, BLOCK_N)
    counts, ends, total = list_tiles(
        counts_ptr, num_experts, capacity, n_tiles, BLOCK_M, SMALL_ROWS + 1, -1, E_BLOCK, SCAN
    )
    whole = total
    if HALVES:
        # A last round that keeps at most half of the programs busy is over sooner in half tiles.
        rest = total % programs
        whole = tl.where(rest * 2 <= programs, total - rest, total)
    _walk(
        pid, whole, 0, counts, ends, counts_ptr, num_experts, capacity, n_tiles, a, b, c, starts, a_scale, b_scale,
        bias, N, K, a_pitch, stride_ae, stride_am, stride_be, stride_bp, stride_bn, stride_ce, stride_cm, stride_se,
        stride_vp, stride_vn, SMALL_ROWS + 1, -1, E_BLOCK, SCAN, 1, FLATTEN, GROUP_M, BLOCK_M, BLOCK_N, BLOCK_K,
        False, STAGES, PARTS, ACTIVATION, ACC, IMPRECISE, TMA, WIDEN,
    )
    used = total
    if HALVES:
        used = (total - whole) * 2
        _walk(
            pid, used, whole, counts, ends, counts_ptr, num_experts, capacity, n_tiles, a, b_half, c, starts, a_scale,
            b_scale, bias, N, K, a_pitch, stride_ae, stride_am, stride_be, stride_bp, stride_bn, stride_ce, stride_cm,
            stride_se, stride_vp, stride_vn, SMALL_ROWS + 1, -1, E_BLOCK, SCAN, 2, FLATTEN, GROUP_M, BLOCK_M,
            BLOCK_N // 2, BLOCK_K, False, STAGES, PARTS, ACTIVATION, ACC, IMPRECISE, TMA, WIDEN,
        )
    if SMALL_ROWS > 0:
        small_tiles = tl.cdiv(N, SMALL_N)
        few, few_ends, few_total = list_tiles(
            counts_ptr, num_experts, capacity, small_tiles, SMALL_M, 0, SMALL_ROWS, E_BLOCK, SCAN
        )
        # Programs that had nothing to do in the last round above begin here.
        turn = (pid + programs - used % programs) % programs
        _walk(
            turn, few_total, 0, few, few_ends, counts_ptr, num_experts, capacity, small_tiles, a_small, b_small, c,
            starts, a_scale, b_scale, bias, N, K, a_pitch, stride_ae, stride_am, stride_be, stride_bp, stride_bn,
            stride_ce, stride_cm, stride_se, stride_vp, stride_vn, 0, SMALL_ROWS, E_BLOCK, SCAN, 1, FLATTEN, 1,
            SMALL_M, SMALL_N, SMALL_K, TMA, SMALL_STAGES, PARTS, ACTIVATION, ACC, IMPRECISE, TMA, WIDEN,
        )
