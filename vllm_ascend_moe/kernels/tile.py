# Device code: arguments are Triton values, whose types come from the call.
# ruff: noqa: ANN001, ANN201, ANN202
# mypy: disable-error-code="no-untyped-def"
"""One output tile of the expert GEMM: product, epilogue (scales, bias, activation, all in fp32), store."""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_ascend_moe.kernels.activation import gated, pointwise
from vllm_ascend_moe.kernels.product import descriptor_product, pointer_product, split_parts


# Argument lists stay packed.
# fmt: off
@triton.jit
def _rescale(acc, columns, limit, row_scale, column_scale, bias, offset, STEP: tl.constexpr):
    """One part's accumulator to fp32, with its row scale, column scale and bias where they exist."""
    y = acc.to(tl.float32)
    if row_scale is not None:
        y = y * row_scale[:, None]
    if column_scale is not None:
        scale = tl.load(column_scale + offset + columns * STEP, mask=columns < limit, other=0.0)
        y = y * scale.to(tl.float32)[None, :]
    if bias is not None:
        shift = tl.load(bias + offset + columns * STEP, mask=columns < limit, other=0.0)
        y = y + shift.to(tl.float32)[None, :]
    return y


@triton.jit
def compute_tile(
    expert, count, row, column, a, b, c, c_whole, starts, a_scale, b_scale, bias, N, K, a_pitch, c_pitch, stride_ae,
    stride_am, stride_be, stride_bp, stride_bn, stride_ce, stride_cm, stride_se, stride_vp, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, FEW: tl.constexpr, STAGES: tl.constexpr, STEP: tl.constexpr,
    PARTS: tl.constexpr, ACTIVATION: tl.constexpr, ACC: tl.constexpr, IMPRECISE: tl.constexpr, TMA: tl.constexpr,
    WIDEN: tl.constexpr, PIECES: tl.constexpr,
):
    """One output tile: product, epilogue, store; with PIECES > 0 through the descriptor c_whole, in so many pieces.

    expert, count: whose tile, and how many rows it has; row, column: the tile's first, counted within the expert.
    """
    # Scalar bases are 64 bits wide, so that the offsets inside a tile can be 32.
    wide = expert.to(tl.int64)
    start = tl.full([], 0, tl.int32)
    if starts is not None:
        start = tl.load(starts + expert)
    if TMA and not FEW:
        # The last tile is moved up so that it is full: it computes some rows twice, to the same values, and neither
        # reads nor writes a row past the count.
        row = tl.minimum(row, count - BLOCK_M)
    first = (start + row).to(tl.int64)
    left = count - row
    if TMA:
        acc = descriptor_product(
            a + wide * stride_ae + first * stride_am if FEW else a,
            b,
            expert * a_pitch + start + row,
            left, expert, column, K, stride_am, BLOCK_M, BLOCK_N, BLOCK_K, PARTS, FEW, ACC, STAGES, IMPRECISE,
            WIDEN,
        )
        gate, up = split_parts(acc, BLOCK_M, BLOCK_N, PARTS, FEW)
    else:
        gate, up = pointer_product(
            a + wide * stride_ae + first * stride_am,
            b + wide * stride_be + column.to(tl.int64) * stride_bn,
            left,
            N - column,
            K, stride_am, stride_bp, stride_bn, BLOCK_M, BLOCK_N, BLOCK_K, PARTS, ACC, IMPRECISE, WIDEN,
        )
    rows = tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_N)
    row_scale = None
    if a_scale is not None:
        row_scale = tl.load(a_scale + wide * stride_se + first + rows, mask=rows < left, other=0.0)
    vectors = wide * PARTS * N + column * STEP
    y = _rescale(gate, columns, N - column, row_scale, b_scale, bias, vectors, STEP)
    if PARTS == 2:
        up = _rescale(up, columns, N - column, row_scale, b_scale, bias, vectors + stride_vp, STEP)
        y = gated(y, up, ACTIVATION)
    elif ACTIVATION != "none":
        y = pointwise(y, ACTIVATION)
    y = y.to(c.dtype.element_ty)
    if PIECES > 0:
        # All of the tile's rows are the expert's own. The copy engine takes them while the next tile is multiplied.
        at = expert * c_pitch + start + row
        if PIECES == 2:
            former, latter = y.reshape(BLOCK_M, 2, BLOCK_N // 2).permute(0, 2, 1).split()
            c_whole.store([at, column], former)
            c_whole.store([at, column + BLOCK_N // 2], latter)
        else:
            tl.static_assert(PIECES == 1, "one or two pieces")
            c_whole.store([at, column], y)
    else:
        c_tile = c + wide * stride_ce + first * stride_cm + column + rows[:, None] * stride_cm + columns[None, :]
        tl.store(c_tile, y, mask=(rows[:, None] < left) & (columns[None, :] < N - column))
