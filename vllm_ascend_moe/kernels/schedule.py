# Device code: arguments are Triton values, whose types come from the call.
# ruff: noqa: ANN001, ANN201, ANN202
# mypy: disable-error-code="no-untyped-def"
"""Which tile a program works on, found on the device, so that time follows the real rows and not the capacity.

A persistent grid walks a list of tiles that is never written down: expert e has ``ceil(count[e] / BLOCK_M) * n_tiles``
tiles, which are those from ``begins[e]`` to ``ends[e] - 1`` of the list. An expert without rows has no tile, and
neither has one whose count is not of this pass (LEAST to MOST rows; MOST = -1: no limit).

Two ways to search the list. On a GPU the counts stay in registers and three small reductions, none of which waits for
another, find the expert. With SCAN (Ascend) scalar code runs through the counts instead: there a reduction belongs to
the vector cores, and the cube core would have to wait for its result through global memory at every tile.
"""

from __future__ import annotations

import triton
import triton.language as tl


# Argument lists stay packed.
# fmt: off
@triton.jit
def _of_this_pass(counts, capacity, LEAST: tl.constexpr, MOST: tl.constexpr):
    """The counts, never more than capacity, and 0 where the expert is not of this pass."""
    counts = tl.minimum(counts, capacity)
    mine = counts >= LEAST
    if MOST >= 0:
        mine = mine & (counts <= MOST)
    return tl.where(mine, counts, 0)


@triton.jit
def load_counts(counts_ptr, num_experts, E_BLOCK: tl.constexpr, SCAN: tl.constexpr):
    """int32 [E_BLOCK]; with SCAN a placeholder."""
    if SCAN:
        counts = 0
    else:
        lanes = tl.arange(0, E_BLOCK)
        counts = tl.load(counts_ptr + lanes, mask=lanes < num_experts, other=0)
    return counts


@triton.jit
def total_tiles(
    counts, counts_ptr, num_experts, capacity, n_tiles, BLOCK_M: tl.constexpr, LEAST: tl.constexpr,
    MOST: tl.constexpr, SCAN: tl.constexpr,
):
    """How many tiles a pass has."""
    if SCAN:
        total = 0
        for expert in range(0, num_experts):
            count = _of_this_pass(tl.load(counts_ptr + expert), capacity, LEAST, MOST)
            total += tl.cdiv(count, BLOCK_M) * n_tiles
    else:
        total = tl.sum(tl.cdiv(_of_this_pass(counts, capacity, LEAST, MOST), BLOCK_M), 0) * n_tiles
    return total


@triton.jit
def tile_ranges(
    counts, capacity, n_tiles, BLOCK_M: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr, SCAN: tl.constexpr
):
    """begins, ends, int32 [E_BLOCK]; with SCAN placeholders."""
    if SCAN:
        begins = 0
        ends = 0
    else:
        tiles = tl.cdiv(_of_this_pass(counts, capacity, LEAST, MOST), BLOCK_M) * n_tiles
        ends = tl.cumsum(tiles, 0)
        begins = ends - tiles
    return begins, ends


@triton.jit
def locate(
    tile, counts, begins, ends, counts_ptr, num_experts, capacity, n_tiles, BLOCK_M: tl.constexpr,
    LEAST: tl.constexpr, MOST: tl.constexpr, E_BLOCK: tl.constexpr, SCAN: tl.constexpr,
):
    """The expert of a tile, the tile's number within that expert, and the expert's row count.

    Args:
        tile: scalar, 0 to total_tiles - 1; counts: from load_counts; begins, ends: from tile_ranges.
    """
    if SCAN:
        expert = 0
        local = 0
        count = 0
        first = 0
        for candidate in range(0, num_experts):
            rows = _of_this_pass(tl.load(counts_ptr + candidate), capacity, LEAST, MOST)
            end = first + tl.cdiv(rows, BLOCK_M) * n_tiles
            here = (tile >= first) & (tile < end)
            expert = tl.where(here, candidate, expert)
            local = tl.where(here, tile - first, local)
            count = tl.where(here, rows, count)
            first = end
    else:
        here = (begins <= tile) & (tile < ends)
        expert = tl.sum(tl.where(here, tl.arange(0, E_BLOCK), 0), 0)
        local = tile - tl.sum(tl.where(here, begins, 0), 0)
        count = tl.sum(tl.where(here, tl.minimum(counts, capacity), 0), 0)
    return expert, local, count


@triton.jit
def place(local, m_tiles, n_tiles, GROUP_M: tl.constexpr):
    """(m, n) of an expert's tile: GROUP_M row tiles side by side, so that programs running at the same time share
    both rows and weights in the L2 cache."""
    width = GROUP_M * n_tiles
    group_m = (local // width) * GROUP_M
    size = tl.minimum(m_tiles - group_m, GROUP_M)
    inner = local % width
    return group_m + inner % size, inner // size
