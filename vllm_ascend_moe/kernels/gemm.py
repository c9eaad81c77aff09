# Device code: arguments are Triton values, whose types come from the call.
# ruff: noqa: ANN001, ANN201, ANN202
# mypy: disable-error-code="no-untyped-def"
"""The expert GEMM: every expert's rows times its own weights, for batched and for ragged rows, in one launch.

    batched   a [E_l, rows, K], expert e has the rows 0 .. count[e]-1 of its own slice
    ragged    a [total, K], expert e has the rows start[e] .. start[e]+count[e]-1

A persistent grid takes tiles in up to five passes, chosen on the device from the counts alone:

1. experts with BLOCK_M rows and more, in BLOCK_M x BLOCK_N tiles, as many whole rounds of the grid as there are;
2. what is left of them, in half tiles if that fills the last round better;
3. experts with fewer rows, whose time is reading weights: the product transposed, in tiles of BLOCK_M,
4. of FEW_M,
5. and of 16 rows.

With FEW_M = 0 the first pass takes every expert.

Rows at and past the count are neither read nor written.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_ascend_moe.kernels.schedule import load_counts, locate, place, running_total, total_tiles
from vllm_ascend_moe.kernels.tile import compute_tile

# The narrowest tile a matrix unit takes.
_NARROW = tl.constexpr(16)


# Argument lists stay packed.
# fmt: off
@triton.jit
def _walk(
    begin, end, base, counts, counts_ptr, num_experts, capacity, n_tiles, a, b, c, starts, a_scale, b_scale, bias, N,
    K, a_pitch, stride_ae, stride_am, stride_be, stride_bp, stride_bn, stride_ce, stride_cm, stride_se, stride_vp,
    LEAST: tl.constexpr, MOST: tl.constexpr, E_BLOCK: tl.constexpr, SCAN: tl.constexpr,
    SPLIT: tl.constexpr, FLATTEN: tl.constexpr, GROUP_M: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, FEW: tl.constexpr, STAGES: tl.constexpr, STEP: tl.constexpr, PARTS: tl.constexpr,
    ACTIVATION: tl.constexpr, ACC: tl.constexpr, IMPRECISE: tl.constexpr, TMA: tl.constexpr, WIDEN: tl.constexpr,
):
    """This program's share of one pass: tiles begin, begin + programs, ... below end.

    index: of a tile, or of one of its SPLIT column slices; base: the number of the pass's first tile.
    """
    ends = running_total(counts, capacity, n_tiles, BLOCK_M, LEAST, MOST, SCAN)
    if FLATTEN:
        # One loop over tiles and K together: the next tile's loads start while this one's results are stored.
        for index in tl.range(begin, end, tl.num_programs(0), flatten=True):
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
                stride_bn, stride_ce, stride_cm, stride_se, stride_vp, BLOCK_M, BLOCK_N, BLOCK_K, FEW,
                STAGES, STEP, PARTS, ACTIVATION, ACC, IMPRECISE, TMA, WIDEN,
            )
    else:
        for index in range(begin, end, tl.num_programs(0)):
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
                stride_bn, stride_ce, stride_cm, stride_se, stride_vp, BLOCK_M, BLOCK_N, BLOCK_K, FEW,
                STAGES, STEP, PARTS, ACTIVATION, ACC, IMPRECISE, TMA, WIDEN,
            )


@triton.jit
def expert_gemm_kernel(
    a, b, c, a_few, b_half, b_few, counts_ptr, starts, a_scale, b_scale, bias, num_experts, capacity, N, K, a_pitch,
    stride_ae, stride_am, stride_be, stride_bp, stride_bn, stride_ce, stride_cm, stride_se, stride_vp,
    E_BLOCK: tl.constexpr, SCAN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, STAGES: tl.constexpr, HALVES: tl.constexpr, FEW_M: tl.constexpr, FEW_N: tl.constexpr,
    FEW_K: tl.constexpr, FEW_STAGES: tl.constexpr, NARROW_STAGES: tl.constexpr, STEP: tl.constexpr,
    PARTS: tl.constexpr, ACTIVATION: tl.constexpr, ACC: tl.constexpr, IMPRECISE: tl.constexpr, TMA: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """See the module docstring. With TMA a, b, b_half and b_few are descriptors, else all are pointers.

    capacity: no expert is taken to have more rows than this, whatever its count says.
    """
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    least: tl.constexpr = BLOCK_M if FEW_M > 0 else 1
    n_tiles = tl.cdiv(N, BLOCK_N)
    counts = load_counts(counts_ptr, num_experts, E_BLOCK, SCAN)
    total = total_tiles(counts, counts_ptr, num_experts, capacity, n_tiles, BLOCK_M, least, -1, SCAN)
    whole = total
    if HALVES:
        # A last round that keeps at most half of the programs busy is over sooner in half tiles.
        rest = total % programs
        whole = tl.where(rest * 2 <= programs, total - rest, total)
    if pid < whole:
        _walk(
            pid, whole, 0, counts, counts_ptr, num_experts, capacity, n_tiles, a, b, c, starts, a_scale, b_scale,
            bias, N, K, a_pitch, stride_ae, stride_am, stride_be, stride_bp, stride_bn, stride_ce, stride_cm,
            stride_se, stride_vp, least, -1, E_BLOCK, SCAN, 1, TMA, GROUP_M, BLOCK_M, BLOCK_N, BLOCK_K,
            False, STAGES, STEP, PARTS, ACTIVATION, ACC, IMPRECISE, TMA, WIDEN,
        )
    used = total - whole
    if HALVES:
        used *= 2
        if pid < used:
            _walk(
                pid, used, whole, counts, counts_ptr, num_experts, capacity, n_tiles, a, b_half, c, starts, a_scale,
                b_scale, bias, N, K, a_pitch, stride_ae, stride_am, stride_be, stride_bp, stride_bn, stride_ce,
                stride_cm, stride_se, stride_vp, least, -1, E_BLOCK, SCAN, 2, False, GROUP_M, BLOCK_M,
                BLOCK_N // 2, BLOCK_K, False, STAGES, STEP, PARTS, ACTIVATION, ACC, IMPRECISE, TMA, WIDEN,
            )
    if FEW_M > 0:
        few_tiles = tl.cdiv(N, FEW_N)
        under = total_tiles(
            counts, counts_ptr, num_experts, capacity, few_tiles, BLOCK_M, FEW_M + 1, BLOCK_M - 1, SCAN
        )
        few = total_tiles(
            counts, counts_ptr, num_experts, capacity, few_tiles, FEW_M, _NARROW + 1, FEW_M, SCAN
        )
        narrow = total_tiles(
            counts, counts_ptr, num_experts, capacity, few_tiles, _NARROW, 0, _NARROW, SCAN
        )
        # Programs that had nothing to do in the last round of one pass begin the next.
        busy = tl.where(used > 0, used, total)
        turn = (pid + programs - busy % programs) % programs
        if turn < under:
            _walk(
                turn, under, 0, counts, counts_ptr, num_experts, capacity, few_tiles, a_few, b_few, c, starts,
                a_scale, b_scale, bias, N, K, a_pitch, stride_ae, stride_am, stride_be, stride_bp, stride_bn,
                stride_ce, stride_cm, stride_se, stride_vp, FEW_M + 1, BLOCK_M - 1, E_BLOCK, SCAN, 1,
                False, 1, BLOCK_M, FEW_N, FEW_K, TMA, STAGES, STEP, PARTS, ACTIVATION, ACC, IMPRECISE, TMA, WIDEN,
            )
        turn = (turn + programs - under % programs) % programs
        if turn < few:
            _walk(
                turn, few, 0, counts, counts_ptr, num_experts, capacity, few_tiles, a_few, b_few, c, starts, a_scale,
                b_scale, bias, N, K, a_pitch, stride_ae, stride_am, stride_be, stride_bp, stride_bn, stride_ce,
                stride_cm, stride_se, stride_vp, _NARROW + 1, FEW_M, E_BLOCK, SCAN, 1, False, 1, FEW_M,
                FEW_N, FEW_K, TMA, FEW_STAGES, STEP, PARTS, ACTIVATION, ACC, IMPRECISE, TMA, WIDEN,
            )
        turn = (turn + programs - few % programs) % programs
        if turn < narrow:
            _walk(
                turn, narrow, 0, counts, counts_ptr, num_experts, capacity, few_tiles, a_few, b_few, c, starts,
                a_scale, b_scale, bias, N, K, a_pitch, stride_ae, stride_am, stride_be, stride_bp, stride_bn,
                stride_ce, stride_cm, stride_se, stride_vp, 0, _NARROW, E_BLOCK, SCAN, 1, False, 1,
                _NARROW, FEW_N, FEW_K, TMA, NARROW_STAGES, STEP, PARTS, ACTIVATION, ACC, IMPRECISE, TMA, WIDEN,
            )
