# Device code: arguments are Triton values, whose types come from the call.
# ruff: noqa: ANN001, ANN201, ANN202
# mypy: disable-error-code="no-untyped-def"
"""The kernels of slots.py: a counting sort by expert that counts a row once for an expert it names twice."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _local_expert(ids, expert_map, row, live, k, num_ids, num_local, stride):
    """The local expert of each row's k-th choice, or -1: not routed, out of range, or another rank's."""
    chosen = tl.load(ids + row.to(tl.int64) * stride + k, mask=live, other=-1)
    known = (chosen >= 0) & (chosen < num_ids)
    # Masked before the look-up: an index of -1 would read outside the map.
    local = tl.load(expert_map + tl.where(known, chosen, 0), mask=known, other=-1)
    return tl.where((local >= 0) & (local < num_local), local, -1)


@triton.jit
def _members(
    ids, expert_map, row, live, num_ids, num_local, stride,
    TOPK: tl.constexpr, ROWS: tl.constexpr, E_BLOCK: tl.constexpr,
):  # fmt: skip
    """int32 [ROWS, E_BLOCK]: 1 where the row names the expert, however often."""
    experts = tl.arange(0, E_BLOCK)
    member = tl.zeros([ROWS, E_BLOCK], tl.int32)
    for k in tl.static_range(TOPK):
        local = _local_expert(ids, expert_map, row, live, k, num_ids, num_local, stride)
        member |= (local[:, None] == experts[None, :]).to(tl.int32)
    return member


@triton.jit
def slot_count_kernel(
    ids, expert_map, block_counts, rows, num_ids, num_local, stride,
    TOPK: tl.constexpr, ROWS: tl.constexpr, E_BLOCK: tl.constexpr,
):  # fmt: skip
    """block_counts[b, e]: how many rows of block b go to expert e."""
    block = tl.program_id(0)
    row = block * ROWS + tl.arange(0, ROWS)
    member = _members(ids, expert_map, row, row < rows, num_ids, num_local, stride, TOPK, ROWS, E_BLOCK)
    tl.store(block_counts + block * E_BLOCK + tl.arange(0, E_BLOCK), tl.sum(member, 0))


@triton.jit
def slot_kernel(
    ids, expert_map, block_counts, slots, counts, rows, num_ids, num_local, stride, blocks,
    TOPK: tl.constexpr, ROWS: tl.constexpr, E_BLOCK: tl.constexpr,
):  # fmt: skip
    """slots[row, k] and the experts' counts. block_counts: None where there is one block."""
    block = tl.program_id(0)
    row = block * ROWS + tl.arange(0, ROWS)
    live = row < rows
    experts = tl.arange(0, E_BLOCK)
    member = _members(ids, expert_map, row, live, num_ids, num_local, stride, TOPK, ROWS, E_BLOCK)
    before = tl.zeros([E_BLOCK], tl.int32)
    total = tl.zeros([E_BLOCK], tl.int32)
    if block_counts is None:
        total += tl.sum(member, 0)
    else:
        for other in range(0, blocks):
            theirs = tl.load(block_counts + other * E_BLOCK + experts)
            total += theirs
            before += tl.where(other < block, theirs, 0)
    slot = tl.cumsum(member, 0) - 1 + (before + experts * rows)[None, :]
    for k in tl.static_range(TOPK):
        local = _local_expert(ids, expert_map, row, live, k, num_ids, num_local, stride)
        mine = tl.sum(tl.where(local[:, None] == experts[None, :], slot, 0), 1)
        tl.store(slots + row * TOPK + k, tl.where(local >= 0, mine, -1), mask=live)
    if block == 0:
        tl.store(counts + experts, total, mask=experts < num_local)
