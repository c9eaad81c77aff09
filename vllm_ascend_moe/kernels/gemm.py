# Device code: arguments are Triton values, whose types come from the call.
# ruff: noqa: ANN001, ANN201, ANN202
# mypy: disable-error-code="no-untyped-def"
"""The expert GEMM: every expert's rows times its own weights, for batched and for ragged rows, in one launch.

    batched   a [E_l, rows, K], expert e has the rows 0 .. count[e]-1 of its own slice
    ragged    a [total, K], expert e has the rows start[e] .. start[e]+count[e]-1

A persistent grid takes tiles in up to five passes, chosen on the device from the counts alone:

1. experts with BLOCK_M rows and more, in BLOCK_M x BLOCK_N tiles, as many whole rounds of the grid as there are;
2. what is left of them, in half tiles if the last round has room for these;
3. experts with fewer rows, whose time is reading weights: the product transposed, in tiles of BLOCK_M,
4. of FEW_M,
5. and of 16 rows.

With FEW_M = 0 the first pass takes every expert. In passes 3 to 5 an expert is one tile high.

Rows at and past the count are neither read nor written.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_ascend_moe.kernels.schedule import load_counts, locate, place, tile_ranges, total_tiles
from vllm_ascend_moe.kernels.tile import compute_tile

# The narrowest tile a matrix unit takes.
_NARROW = tl.constexpr(16)


# Argument lists stay packed.
# fmt: off
@triton.jit
def _walk(
    begin, end, base, counts, counts_ptr, num_experts, capacity, n_tiles, a, b, c, c_whole, starts, a_scale, b_scale,
    bias, N, K, a_pitch, c_pitch, stride_ae, stride_am, stride_be, stride_bp, stride_bn, stride_ce, stride_cm,
    stride_se, stride_vp, LEAST: tl.constexpr, MOST: tl.constexpr, PROGRAMS: tl.constexpr, E_BLOCK: tl.constexpr,
    SCAN: tl.constexpr, SPLIT: tl.constexpr, FLATTEN: tl.constexpr, GROUP_M: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, FEW: tl.constexpr, STAGES: tl.constexpr, STEP: tl.constexpr,
    PARTS: tl.constexpr, ACTIVATION: tl.constexpr, ACC: tl.constexpr, IMPRECISE: tl.constexpr, TMA: tl.constexpr,
    WIDEN: tl.constexpr, PIECES: tl.constexpr,
):
    """This program's share of one pass: tiles begin, begin + PROGRAMS, ... below end.

    index: of a tile, or of one of its SPLIT column slices; base: the number of the pass's first tile.
    """
    begins, ends = tile_ranges(counts, capacity, n_tiles, BLOCK_M, LEAST, MOST, SCAN)
    if FLATTEN:
        # One loop over tiles and K together: the next tile's loads start while this one's results are stored.
        for index in tl.range(begin, end, PROGRAMS, flatten=True):
            expert, local, count = locate(
                base + index // SPLIT,
                counts, begins, ends, counts_ptr, num_experts, capacity, n_tiles, BLOCK_M, LEAST, MOST, E_BLOCK, SCAN,
            )
            m, n = place(local, tl.cdiv(count, BLOCK_M), n_tiles, GROUP_M)
            compute_tile(
                expert, count,
                m * BLOCK_M,
                (n * SPLIT + index % SPLIT) * BLOCK_N,
                a, b, c, c_whole, starts, a_scale, b_scale, bias, N, K, a_pitch, c_pitch, stride_ae, stride_am,
                stride_be, stride_bp, stride_bn, stride_ce, stride_cm, stride_se, stride_vp, BLOCK_M, BLOCK_N, BLOCK_K,
                FEW, STAGES, STEP, PARTS, ACTIVATION, ACC, IMPRECISE, TMA, WIDEN, PIECES,
            )
    else:
        for index in range(begin, end, PROGRAMS):
            expert, local, count = locate(
                base + index // SPLIT,
                counts, begins, ends, counts_ptr, num_experts, capacity, n_tiles, BLOCK_M, LEAST, MOST, E_BLOCK, SCAN,
            )
            if MOST >= 0:
                m = 0
                n = local
            else:
                m, n = place(local, tl.cdiv(count, BLOCK_M), n_tiles, GROUP_M)
            compute_tile(
                expert, count,
                m * BLOCK_M,
                (n * SPLIT + index % SPLIT) * BLOCK_N,
                a, b, c, c_whole, starts, a_scale, b_scale, bias, N, K, a_pitch, c_pitch, stride_ae, stride_am,
                stride_be, stride_bp, stride_bn, stride_ce, stride_cm, stride_se, stride_vp, BLOCK_M, BLOCK_N, BLOCK_K,
                FEW, STAGES, STEP, PARTS, ACTIVATION, ACC, IMPRECISE, TMA, WIDEN, PIECES,
            )


@triton.jit
def expert_gemm_kernel(
    a, b, c, c_whole, a_few, b_half, b_few, counts_ptr, starts, a_scale, b_scale, bias, num_experts, capacity, N, K,
    a_pitch, c_pitch, stride_ae, stride_am, stride_be, stride_bp, stride_bn, stride_ce, stride_cm, stride_se, stride_vp,
    PROGRAMS: tl.constexpr, E_BLOCK: tl.constexpr, SCAN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, STAGES: tl.constexpr, HALVES: tl.constexpr, FEW_M: tl.constexpr,
    FEW_N: tl.constexpr, FEW_K: tl.constexpr, FEW_STAGES: tl.constexpr, NARROW_STAGES: tl.constexpr,
    STEP: tl.constexpr, PARTS: tl.constexpr, ACTIVATION: tl.constexpr, ACC: tl.constexpr, IMPRECISE: tl.constexpr,
    TMA: tl.constexpr, WIDEN: tl.constexpr, PIECES: tl.constexpr, FLATTEN: tl.constexpr, EARLY: tl.constexpr,
):
    """See the module docstring. With TMA a, b, b_half and b_few are descriptors, else all are pointers.

    c_whole: where PIECES > 0 the descriptor of c for the first pass; c_pitch: stride_ce in rows.
    capacity: no expert is taken to have more rows than this, whatever its count says.
    PROGRAMS: the grid. EARLY: launched while the kernel before it still runs (programmatic dependent launch).
    """
    if EARLY:
        # Nothing is read or written before the kernel before this one has ended; the next one may be set up meanwhile.
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    pid = tl.program_id(0)
    least: tl.constexpr = BLOCK_M if FEW_M > 0 else 1
    n_tiles = tl.cdiv(N, BLOCK_N)
    counts = load_counts(counts_ptr, num_experts, E_BLOCK, SCAN)
    total = total_tiles(counts, counts_ptr, num_experts, capacity, n_tiles, BLOCK_M, least, -1, SCAN)
    tail = 0
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
        tail = under + few + narrow
    whole = total
    if HALVES:
        # A last round is over sooner in half tiles, if these and the tiles that follow them fit in it.
        rest = total % PROGRAMS
        whole = tl.where(rest * 2 + tail <= PROGRAMS, total - rest, total)
    if pid < whole:
        _walk(
            pid, whole, 0, counts, counts_ptr, num_experts, capacity, n_tiles, a, b, c, c_whole, starts, a_scale,
            b_scale, bias, N, K, a_pitch, c_pitch, stride_ae, stride_am, stride_be, stride_bp, stride_bn, stride_ce,
            stride_cm, stride_se, stride_vp, least, -1, PROGRAMS, E_BLOCK, SCAN, 1, FLATTEN, GROUP_M, BLOCK_M,
            BLOCK_N, BLOCK_K, False, STAGES, STEP, PARTS, ACTIVATION, ACC, IMPRECISE, TMA, WIDEN, PIECES,
        )
    used = total - whole
    if HALVES:
        # In the memory of a whole tile's stages.
        half_stages: tl.constexpr = STAGES * (BLOCK_M + PARTS * BLOCK_N) // (BLOCK_M + PARTS * (BLOCK_N // 2))
        used *= 2
        if pid < used:
            _walk(
                pid, used, whole, counts, counts_ptr, num_experts, capacity, n_tiles, a, b_half, c, c_whole, starts,
                a_scale, b_scale, bias, N, K, a_pitch, c_pitch, stride_ae, stride_am, stride_be, stride_bp, stride_bn,
                stride_ce, stride_cm, stride_se, stride_vp, least, -1, PROGRAMS, E_BLOCK, SCAN, 2, False, GROUP_M,
                BLOCK_M, BLOCK_N // 2, BLOCK_K, False, half_stages, STEP, PARTS, ACTIVATION, ACC, IMPRECISE, TMA,
                WIDEN, 0,
            )
    if FEW_M > 0:
        # Programs that had nothing to do in the last round of one pass begin the next.
        busy = tl.where(used > 0, used, total)
        turn = (pid + PROGRAMS - busy % PROGRAMS) % PROGRAMS
        if turn < under:
            _walk(
                turn, under, 0, counts, counts_ptr, num_experts, capacity, few_tiles, a_few, b_few, c, c_whole,
                starts, a_scale, b_scale, bias, N, K, a_pitch, c_pitch, stride_ae, stride_am, stride_be, stride_bp,
                stride_bn, stride_ce, stride_cm, stride_se, stride_vp, FEW_M + 1, BLOCK_M - 1, PROGRAMS, E_BLOCK, SCAN,
                1, False, 1, BLOCK_M, FEW_N, FEW_K, TMA, STAGES, STEP, PARTS, ACTIVATION, ACC, IMPRECISE, TMA, WIDEN,
                0,
            )
        turn = (turn + PROGRAMS - under % PROGRAMS) % PROGRAMS
        if turn < few:
            _walk(
                turn, few, 0, counts, counts_ptr, num_experts, capacity, few_tiles, a_few, b_few, c, c_whole, starts,
                a_scale, b_scale, bias, N, K, a_pitch, c_pitch, stride_ae, stride_am, stride_be, stride_bp, stride_bn,
                stride_ce, stride_cm, stride_se, stride_vp, _NARROW + 1, FEW_M, PROGRAMS, E_BLOCK, SCAN, 1, False, 1,
                FEW_M, FEW_N, FEW_K, TMA, FEW_STAGES, STEP, PARTS, ACTIVATION, ACC, IMPRECISE, TMA, WIDEN, 0,
            )
        turn = (turn + PROGRAMS - few % PROGRAMS) % PROGRAMS
        if turn < narrow:
            _walk(
                turn, narrow, 0, counts, counts_ptr, num_experts, capacity, few_tiles, a_few, b_few, c, c_whole,
                starts, a_scale, b_scale, bias, N, K, a_pitch, c_pitch, stride_ae, stride_am, stride_be, stride_bp,
                stride_bn, stride_ce, stride_cm, stride_se, stride_vp, 0, _NARROW, PROGRAMS, E_BLOCK, SCAN, 1, False, 1,
                _NARROW, FEW_N, FEW_K, TMA, NARROW_STAGES, STEP, PARTS, ACTIVATION, ACC, IMPRECISE, TMA, WIDEN, 0,
            )
