# Device code: arguments are Triton values, whose types come from the call.
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def"
"""One tile of the expert GEMM: ``x[rows, K] @ w[columns, K]^T``, accumulated in fp32 (int32 for int8 by int8).

Two ways to read the weights: a tensor descriptor (Hopper's copy engine), or plain pointers (Ascend, older GPUs, odd
strides). Rows come through a descriptor where a tile is full of an expert's own rows, else through pointers with a
mask. A gated GEMM reads PARTS = 2 slices of w, gate and up.
"""

from __future__ import annotations

import triton
import triton.language as tl


# Argument lists stay packed.
# fmt: off
@triton.jit
def descriptor_product(
    a, b, first, left, expert, column, K, stride_am, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, PARTS: tl.constexpr, FEW: tl.constexpr, ACC: tl.constexpr, STAGES: tl.constexpr,
    IMPRECISE: tl.constexpr, WIDEN: tl.constexpr,
):
    """The product with weights read through a descriptor, gate and up in one accumulator.

    Args:
        a: descriptor of the rows [BLOCK_M, BLOCK_K]; first: the tile's first row in it; all of the tile's rows are the
            expert's own. With FEW a pointer to the tile's first row, of which ``left`` are its own.
        b: descriptor of the weights [1, PARTS, BLOCK_N, BLOCK_K].

    Returns:
        [BLOCK_M, PARTS * BLOCK_N], or its transpose with FEW: the matrix unit's fixed side of 64 then holds weight
        rows, and few tokens waste nothing.
    """
    if FEW:
        acc = tl.zeros([PARTS * BLOCK_N, BLOCK_M], ACC)
        rows = tl.arange(0, BLOCK_M)
        depth = tl.arange(0, BLOCK_K)
        a_tile = a + rows[:, None] * stride_am + depth[None, :]
        own = rows[:, None] < left
    else:
        acc = tl.zeros([BLOCK_M, PARTS * BLOCK_N], ACC)
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        if FEW:
            x = tl.load(a_tile + k, mask=own & (depth[None, :] < K - k), other=0.0)
        else:
            x = a.load([first, k])
        w = b.load([expert, 0, column, k]).reshape(PARTS * BLOCK_N, BLOCK_K)
        if WIDEN:
            x = x.to(ACC)
            w = w.to(ACC)
        x = x.to(w.dtype)
        if FEW:
            acc = tl.dot(w, tl.trans(x), acc, max_num_imprecise_acc=IMPRECISE, input_precision="ieee", out_dtype=ACC)
        else:
            acc = tl.dot(x, tl.trans(w), acc, max_num_imprecise_acc=IMPRECISE, input_precision="ieee", out_dtype=ACC)
    return acc


@triton.jit
def split_parts(acc, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr, FEW: tl.constexpr):
    """gate and up [BLOCK_M, BLOCK_N] of descriptor_product's accumulator (the same tensor twice for PARTS = 1)."""
    if PARTS == 2:
        if FEW:
            gate, up = acc.reshape(2, BLOCK_N, BLOCK_M).permute(1, 2, 0).split()
        else:
            gate, up = acc.reshape(BLOCK_M, 2, BLOCK_N).permute(0, 2, 1).split()
    else:
        gate = acc
        up = acc
    if FEW:
        gate = tl.trans(gate)
        up = tl.trans(up)
    return gate, up


@triton.jit
def pointer_product(
    a, b, rows_left, columns_left, K, stride_am, stride_bp, stride_bn, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, PARTS: tl.constexpr, ACC: tl.constexpr, IMPRECISE: tl.constexpr, WIDEN: tl.constexpr,
):
    """The product through pointers, gate and up in two accumulators (the same one twice for PARTS = 1).

    Args:
        a, b: pointers to the tile's first row and first weight row; stride_bp: from a gate row to its up row.
        rows_left, columns_left: how many are the expert's own from there on.
    """
    rows = tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    a_tile = a + rows[:, None] * stride_am + depth[None, :]
    b_tile = b + columns[:, None] * stride_bn + depth[None, :]
    gate = tl.zeros([BLOCK_M, BLOCK_N], ACC)
    up = tl.zeros([BLOCK_M, BLOCK_N], ACC)
    for k in range(0, K, BLOCK_K):
        x = tl.load(a_tile + k, mask=(rows[:, None] < rows_left) & (depth[None, :] < K - k), other=0.0)
        w_mask = (columns[:, None] < columns_left) & (depth[None, :] < K - k)
        w = tl.load(b_tile + k, mask=w_mask, other=0.0)
        if WIDEN:
            x = x.to(ACC)
            w = w.to(ACC)
        x = x.to(w.dtype)
        gate = tl.dot(x, tl.trans(w), gate, max_num_imprecise_acc=IMPRECISE, input_precision="ieee", out_dtype=ACC)
        if PARTS == 2:
            v = tl.load(b_tile + stride_bp + k, mask=w_mask, other=0.0)
            if WIDEN:
                v = v.to(ACC)
            up = tl.dot(x, tl.trans(v), up, max_num_imprecise_acc=IMPRECISE, input_precision="ieee", out_dtype=ACC)
    return gate, up
