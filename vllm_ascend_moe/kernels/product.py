# Device code: arguments are Triton values, whose types come from the call.
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def"
"""One tile of the expert GEMM: ``x[rows, K] @ w[columns, K]^T``, accumulated in fp32 (int32 for int8 by int8).

Two ways to read the operands. Tensor descriptors (Hopper's copy engine): ``x`` is read through a ragged descriptor,
whose upper bound is the expert's own row count, so that rows past the count are not read even inside a tile. Plain
pointers (Ascend, older GPUs, odd strides): masks do the same. A gated GEMM reads PARTS = 2 slices of w, gate and up.
"""

from __future__ import annotations

import triton
import triton.language as tl

# A ragged descriptor has two leading dimensions whose strides cancel: index (RAGGED, end, RAGGED - count + row, k) is
# the address of row ``end - count + row``, and its third index passes the bound exactly where row reaches count.
RAGGED = tl.constexpr(1 << 30)


# Argument lists stay packed.
# fmt: off
@triton.jit
def descriptor_product(
    a, b, first, count, row, expert, column, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr, SWAP: tl.constexpr, ACC: tl.constexpr, STAGES: tl.constexpr, IMPRECISE: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """The product through descriptors, gate and up in one accumulator.

    Args:
        a: ragged descriptor of the rows [1, 1, BLOCK_M, BLOCK_K]; first: the expert's first row in it.
        b: descriptor of the weights [1, PARTS, BLOCK_N, BLOCK_K].

    Returns:
        [BLOCK_M, PARTS * BLOCK_N], or its transpose with SWAP: the matrix unit's fixed side of 64 then holds weight
        rows, and few tokens waste nothing.
    """
    if SWAP:
        acc = tl.zeros([PARTS * BLOCK_N, BLOCK_M], ACC)
    else:
        acc = tl.zeros([BLOCK_M, PARTS * BLOCK_N], ACC)
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        x = a.load([RAGGED, first + count, row - count + RAGGED, k]).reshape(BLOCK_M, BLOCK_K)
        w = b.load([expert, 0, column, k]).reshape(PARTS * BLOCK_N, BLOCK_K)
        if WIDEN:
            x = x.to(ACC)
            w = w.to(ACC)
        x = x.to(w.dtype)
        if SWAP:
            acc = tl.dot(w, tl.trans(x), acc, max_num_imprecise_acc=IMPRECISE, input_precision="ieee", out_dtype=ACC)
        else:
            acc = tl.dot(x, tl.trans(w), acc, max_num_imprecise_acc=IMPRECISE, input_precision="ieee", out_dtype=ACC)
    return acc


@triton.jit
def split_parts(acc, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr, SWAP: tl.constexpr):
    """gate and up [BLOCK_M, BLOCK_N] of descriptor_product's accumulator (the same tensor twice for PARTS = 1)."""
    if PARTS == 2:
        if SWAP:
            gate, up = acc.reshape(2, BLOCK_N, BLOCK_M).permute(1, 2, 0).split()
        else:
            gate, up = acc.reshape(BLOCK_M, 2, BLOCK_N).permute(0, 2, 1).split()
    else:
        gate = acc
        up = acc
    if SWAP:
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
