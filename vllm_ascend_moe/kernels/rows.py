# Device code: arguments are Triton values, whose types come from the call.
# ruff: noqa: ANN001, ANN201, ANN202, SIM102
# mypy: disable-error-code="no-untyped-def"
"""The kernels that work on rows: activation with quantisation, weighted combine, sorting by expert, copying."""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_ascend_moe.kernels.activation import gated, pointwise
from vllm_ascend_moe.kernels.schedule import load_counts, locate, tile_ranges, total_tiles


@triton.jit
def _chunk(x, mask, stride_xp, PARTS: tl.constexpr, ACTIVATION: tl.constexpr):
    """The activation of one chunk of rows, fp32."""
    y = tl.load(x, mask=mask, other=0.0).to(tl.float32)
    if PARTS == 2:
        y = gated(y, tl.load(x + stride_xp, mask=mask, other=0.0).to(tl.float32), ACTIVATION)
    elif ACTIVATION != "none":
        y = pointwise(y, ACTIVATION)
    return y


@triton.jit
def activate_kernel(
    x, out, scale, counts_ptr, starts, num_experts, capacity, N,
    stride_xe, stride_xm, stride_xp, stride_oe, stride_om, stride_se, limit,
    STEP: tl.constexpr, PARTS: tl.constexpr, ACTIVATION: tl.constexpr, INTEGER: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, E_BLOCK: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    """out = activation(x), or with ``scale`` the same divided by each row's own scale, max(|row|) / limit.

    x: [E_l, rows, PARTS * N] or ragged, STEP from column to column of a part; out: [E_l, rows, N];
    scale: fp32 [E_l, rows], NaN for a row with NaN or infinity. Rows past the count stay.
    """
    pid = tl.program_id(0)
    counts = load_counts(counts_ptr, num_experts, E_BLOCK, SCAN)
    total = total_tiles(counts, counts_ptr, num_experts, capacity, 1, ROWS, 0, -1, SCAN)
    begins, ends = tile_ranges(counts, capacity, 1, ROWS, 0, -1, SCAN)
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    for tile in range(pid, total, tl.num_programs(0)):
        expert, local, count = locate(
            tile, counts, begins, ends, counts_ptr, num_experts, capacity, 1, ROWS, 0, -1, E_BLOCK, SCAN
        )
        wide = expert.to(tl.int64)
        start = tl.full([], 0, tl.int32)
        if starts is not None:
            start = tl.load(starts + expert)
        first = (start + local * ROWS).to(tl.int64)
        left = count - local * ROWS
        x_tile = x + wide * stride_xe + first * stride_xm + rows[:, None] * stride_xm + columns[None, :] * STEP
        out_tile = out + wide * stride_oe + first * stride_om + rows[:, None] * stride_om + columns[None, :]
        inverse = tl.full([ROWS], 1.0, tl.float32)
        if scale is not None:
            largest = tl.zeros([ROWS], tl.float32)
            fault = tl.zeros([ROWS], tl.float32)
            for column in range(0, N, COLUMNS):
                mask = (rows[:, None] < left) & (columns[None, :] < N - column)
                y = _chunk(x_tile + column * STEP, mask, stride_xp, PARTS, ACTIVATION)
                largest = tl.maximum(largest, tl.max(tl.abs(y), 1))
                # NaN for a row with NaN or infinity, which a maximum may drop and one byte cannot hold.
                fault += tl.sum(y * 0.0, 1)
            # A row of zeros gets a scale that is not zero, so that nothing is divided by zero.
            row_scale = tl.maximum(largest, 1e-20) / limit + fault
            tl.store(scale + wide * stride_se + first + rows, row_scale, mask=rows < left)
            inverse = 1.0 / row_scale
        for column in range(0, N, COLUMNS):
            mask = (rows[:, None] < left) & (columns[None, :] < N - column)
            y = _chunk(x_tile + column * STEP, mask, stride_xp, PARTS, ACTIVATION)
            if scale is not None:
                y = tl.minimum(tl.maximum(y * inverse[:, None], -limit), limit)
                if INTEGER:
                    y = tl.math.floor(y + 0.5)
            tl.store(out_tile + column, y.to(out.dtype.element_ty), mask=mask)


@triton.jit
def combine_kernel(
    y, slots, weights, out, tokens, H, stride_ym, stride_sm, stride_wm, stride_om,
    TOPK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """See combine(). One piece of work is a token's COLUMNS columns."""
    chunks = tl.cdiv(H, COLUMNS)
    lanes = tl.arange(0, COLUMNS)
    for piece in range(tl.program_id(0), tokens * chunks, tl.num_programs(0)):
        token = (piece // chunks).to(tl.int64)
        column = (piece % chunks) * COLUMNS
        mask = lanes < H - column
        total = tl.zeros([COLUMNS], tl.float32)
        for k in tl.static_range(TOPK):
            slot = tl.load(slots + token * stride_sm + k)
            # An unrouted choice is not read: what its slot holds, NaN too, cannot reach the sum.
            row = y + tl.maximum(slot, 0).to(tl.int64) * stride_ym + column
            value = tl.load(row + lanes, mask=lanes < tl.where(slot >= 0, H - column, 0), other=0.0).to(tl.float32)
            if weights is not None:
                value = value * tl.where(slot >= 0, tl.load(weights + token * stride_wm + k), 0.0)
            total += value
        tl.store(out + token * stride_om + column + lanes, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _local_experts(ids, expert_map, choices, block, num_ids, num_local, BLOCK: tl.constexpr):
    """The local expert of each of the block's choices, or -1: not routed, out of range, or another rank's."""
    lanes = block * BLOCK + tl.arange(0, BLOCK)
    chosen = tl.load(ids + lanes, mask=lanes < choices, other=-1)
    known = (chosen >= 0) & (chosen < num_ids)
    # Masked before the look-up: an index of -1 would read outside the map.
    local = tl.where(known, chosen, -1).to(tl.int32)
    if expert_map is not None:
        local = tl.load(expert_map + tl.where(known, chosen, 0), mask=known, other=-1).to(tl.int32)
    return tl.where((local >= 0) & (local < num_local), local, -1)


@triton.jit
def count_kernel(
    ids, expert_map, block_counts, choices, num_ids, num_local, BLOCK: tl.constexpr, E_BLOCK: tl.constexpr
):
    """block_counts[b, e]: how many choices of block b go to expert e."""
    block = tl.program_id(0)
    local = _local_experts(ids, expert_map, choices, block, num_ids, num_local, BLOCK)
    experts = tl.arange(0, E_BLOCK)
    hits = (local[:, None] == experts[None, :]).to(tl.int32)
    tl.store(block_counts + block * E_BLOCK + experts, tl.sum(hits, 0))


@triton.jit
def position_kernel(
    ids, expert_map, block_counts, positions, counts, starts, choices, num_ids, num_local, blocks,
    BLOCK: tl.constexpr, E_BLOCK: tl.constexpr,
):  # fmt: skip
    """positions[c]: the row of choice c in expert order, or -1; and the experts' counts and first rows.

    block_counts: None where there is one block.
    """
    block = tl.program_id(0)
    local = _local_experts(ids, expert_map, choices, block, num_ids, num_local, BLOCK)
    experts = tl.arange(0, E_BLOCK)
    hits = (local[:, None] == experts[None, :]).to(tl.int32)
    before = tl.zeros([E_BLOCK], tl.int32)
    total = tl.zeros([E_BLOCK], tl.int32)
    if block_counts is None:
        total += tl.sum(hits, 0)
    else:
        for other in range(0, blocks):
            theirs = tl.load(block_counts + other * E_BLOCK + experts)
            total += theirs
            before += tl.where(other < block, theirs, 0)
    first = tl.cumsum(total, 0) - total
    within = tl.cumsum(hits, 0) - 1
    position = tl.sum(hits * (within + (first + before)[None, :]), 1)
    lanes = block * BLOCK + tl.arange(0, BLOCK)
    tl.store(positions + lanes, tl.where(local >= 0, position, -1), mask=lanes < choices)
    if block == 0:
        tl.store(counts + experts, total, mask=experts < num_local)
        tl.store(starts + experts, first, mask=experts < num_local)


@triton.jit
def scatter_rows_kernel(
    x, scale, positions, out, out_scale, tokens, H, stride_xm, stride_om, TOPK: tl.constexpr, COLUMNS: tl.constexpr
):
    """out[positions[t, k]] = x[t], and its scale; unrouted choices write nothing."""
    chunks = tl.cdiv(H, COLUMNS)
    lanes = tl.arange(0, COLUMNS)
    for piece in range(tl.program_id(0), tokens * chunks, tl.num_programs(0)):
        token = (piece // chunks).to(tl.int64)
        column = (piece % chunks) * COLUMNS
        mask = lanes < H - column
        value = tl.load(x + token * stride_xm + column + lanes, mask=mask)
        for k in tl.static_range(TOPK):
            position = tl.load(positions + token * TOPK + k)
            row = out + tl.maximum(position, 0).to(tl.int64) * stride_om + column
            tl.store(row + lanes, value, mask=lanes < tl.where(position >= 0, H - column, 0))
            if scale is not None:  # known at compile time
                if column == 0:
                    tl.store(out_scale + tl.maximum(position, 0), tl.load(scale + token), mask=position >= 0)
