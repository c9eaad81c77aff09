# Device code: arguments are Triton values, whose types come from the call.
# ruff: noqa: ANN001, ANN201, ANN202
# mypy: disable-error-code="no-untyped-def"
"""The kernels of sent_rows.py.

A tile is ROWS tokens times R_BLOCK ranks; no atomics, so that the order of rows is the same in every run. Numbers of
tokens are not specialised: a new one compiles nothing. UNROLL choices of a token are looked up at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _entry(ids, token, live, k, num_experts, stride, stride_k):
    """id + 1 of each token's k-th choice; 0 or E + 1 where it is outside [0, E)."""
    column = (tl.zeros([], tl.int64) + k) * stride_k
    chosen = tl.load(ids + token.to(tl.int64) * stride + column, mask=live, other=-1)
    chosen = tl.where(chosen < 0, -1, chosen)
    return tl.where(chosen > num_experts, num_experts, chosen) + 1


@triton.jit
def _members(
    ids, owners, token, live, num_experts, num_ranks, stride, stride_k,
    TOPK: tl.constexpr, ROWS: tl.constexpr, R_BLOCK: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """int32 [ROWS, R_BLOCK]: 1 where the rank has one of the token's experts, however many."""
    ranks = tl.arange(0, R_BLOCK)
    member = tl.zeros([ROWS, R_BLOCK], tl.int32)
    for k in tl.range(0, TOPK, loop_unroll_factor=UNROLL):
        entry = _entry(ids, token, live, k, num_experts, stride, stride_k)
        owner = tl.load(owners + entry, mask=live, other=-1)
        # Nowhere is R, which may be a column of the tile.
        owner = tl.where(owner < num_ranks, owner, -1)
        member |= (owner[:, None] == ranks[None, :]).to(tl.int32)
    return member


@triton.jit(do_not_specialize=["tokens", "tiles", "steps"])
def row_count_kernel(
    ids, owners, block_counts, tokens, tiles, steps, num_experts, num_ranks, stride, stride_k,
    TOPK: tl.constexpr, ROWS: tl.constexpr, R_BLOCK: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """block_counts[b, r]: how many tokens of the ``steps`` tiles of block b go to rank r."""
    block = tl.program_id(0)
    ranks = tl.arange(0, R_BLOCK)
    total = tl.zeros([R_BLOCK], tl.int32)
    for tile in range(block * steps, tl.minimum(block * steps + steps, tiles)):
        token = tile * ROWS + tl.arange(0, ROWS)
        member = _members(
            ids, owners, token, token < tokens, num_experts, num_ranks, stride, stride_k, TOPK, ROWS, R_BLOCK, UNROLL
        )
        total += tl.sum(member, 0)
    tl.store(block_counts + block * R_BLOCK + ranks, total)


@triton.jit(do_not_specialize=["tokens", "tiles", "steps", "blocks", "code"])
def row_plan_kernel(
    ids, owners, block_counts, entries, slots, codes, tokens, tiles, steps, blocks, code,
    num_experts, num_ranks, stride, stride_k,
    TOPK: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, R_BLOCK: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """entries [T, TOPK], slots [T, WIDTH] and codes [R], rows for each rank plus ``code``.

    block_counts: None where each program counts all tiles itself, which saves a launch where they are few.
    """
    block = tl.program_id(0)
    ranks = tl.arange(0, R_BLOCK)
    before = tl.zeros([R_BLOCK], tl.int32)
    total = tl.zeros([R_BLOCK], tl.int32)
    if block_counts is None:
        for tile in range(0, tiles):
            token = tile * ROWS + tl.arange(0, ROWS)
            member = _members(
                ids,
                owners,
                token,
                token < tokens,
                num_experts,
                num_ranks,
                stride,
                stride_k,
                TOPK,
                ROWS,
                R_BLOCK,
                UNROLL,
            )
            theirs = tl.sum(member, 0)
            total += theirs
            before += tl.where(tile < block * steps, theirs, 0)
    else:
        for first in range(0, blocks, ROWS):
            other = first + tl.arange(0, ROWS)
            cells = block_counts + other[:, None] * R_BLOCK + ranks[None, :]
            theirs = tl.load(cells, mask=other[:, None] < blocks, other=0)
            total += tl.sum(theirs, 0)
            before += tl.sum(theirs * (other < block).to(tl.int32)[:, None], 0)
    if block < 1:
        tl.store(codes + ranks, total.to(tl.int64) + code, mask=ranks < num_ranks)
    # The row of the next token for each rank.
    free = tl.cumsum(total, 0) - total + before
    for tile in range(block * steps, tl.minimum(block * steps + steps, tiles)):
        token = tile * ROWS + tl.arange(0, ROWS)
        live = token < tokens
        for k in tl.range(0, TOPK, loop_unroll_factor=UNROLL):
            entry = _entry(ids, token, live, k, num_experts, stride, stride_k)
            tl.store(entries + token * TOPK + k, entry, mask=live)
        member = _members(
            ids, owners, token, live, num_experts, num_ranks, stride, stride_k, TOPK, ROWS, R_BLOCK, UNROLL
        )
        row = tl.cumsum(member, 0) + free[None, :]
        # Column by column the next rank of each token is the largest key, and is then taken away. Ascend's compiler is
        # quick with sums, products and equality of whole tiles, but not with scans along ranks or other comparisons.
        key = member * (R_BLOCK - ranks)[None, :]
        for column in range(0, WIDTH):
            largest = tl.max(key, 1)
            hit = (key == largest[:, None]).to(tl.int32)
            slot = tl.where(largest > 0, tl.sum(hit * row, 1), 0) - 1
            tl.store(slots + token * WIDTH + column, slot, mask=live)
            key -= hit * largest[:, None]
        free += tl.sum(member, 0)


@triton.jit
def _words(x, WORD: tl.constexpr):
    """A pointer to words of this type."""
    if x.dtype.element_ty != WORD:
        x = x.to(tl.pointer_type(WORD), bitcast=True)
    return x


@triton.jit
def _copy_column(
    x, slots, wire, token,
    START: tl.constexpr, COUNT: tl.constexpr, STRIDE: tl.constexpr, WIDTH: tl.constexpr, PITCH: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """COUNT words of a token into each of its rows, from word START on."""
    lanes = tl.arange(0, LANES)
    for first in range(0, COUNT, LANES):
        value = tl.load(x + token * STRIDE + first + lanes, mask=lanes < COUNT - first)
        for column in range(0, WIDTH):
            slot = tl.load(slots + token * WIDTH + column)
            row = wire + tl.maximum(slot, 0).to(tl.int64) * PITCH + START + first
            tl.store(row + lanes, value, mask=lanes < tl.where(slot >= 0, COUNT - first, 0))


@triton.jit(do_not_specialize=["tokens"])
def pack_rows_kernel(
    x, weights, entries, scales, slots, wire, tokens,
    WORD: tl.constexpr, WIDTH: tl.constexpr, PITCH: tl.constexpr, CHUNKS: tl.constexpr, LANES: tl.constexpr,
    X_COUNT: tl.constexpr, X_STRIDE: tl.constexpr,
    W_START: tl.constexpr, W_COUNT: tl.constexpr, W_STRIDE: tl.constexpr, W_LANES: tl.constexpr,
    E_START: tl.constexpr, E_COUNT: tl.constexpr, E_STRIDE: tl.constexpr, E_LANES: tl.constexpr,
    S_START: tl.constexpr, S_COUNT: tl.constexpr, S_STRIDE: tl.constexpr, S_LANES: tl.constexpr,
):  # fmt: skip
    """wire[slots[t, j]] = all columns of token t side by side, in words; a slot of -1 writes nothing.

    One piece of work is LANES words of a token's first column; the one that has the first words has the others' too.
    """
    lanes = tl.arange(0, LANES)
    wire = _words(wire, WORD)
    x = _words(x, WORD)
    for piece in range(tl.program_id(0), tokens * CHUNKS, tl.num_programs(0)):
        token = tl.zeros([], tl.int64) + piece // CHUNKS
        first = (piece % CHUNKS) * LANES
        value = tl.load(x + token * X_STRIDE + first + lanes, mask=lanes < X_COUNT - first)
        for column in range(0, WIDTH):
            slot = tl.load(slots + token * WIDTH + column)
            row = wire + tl.maximum(slot, 0).to(tl.int64) * PITCH + first
            tl.store(row + lanes, value, mask=lanes < tl.where(slot >= 0, X_COUNT - first, 0))
        if first == 0:
            _copy_column(_words(weights, WORD), slots, wire, token, W_START, W_COUNT, W_STRIDE, WIDTH, PITCH, W_LANES)
            _copy_column(_words(entries, WORD), slots, wire, token, E_START, E_COUNT, E_STRIDE, WIDTH, PITCH, E_LANES)
            if scales is not None:
                _copy_column(
                    _words(scales, WORD), slots, wire, token, S_START, S_COUNT, S_STRIDE, WIDTH, PITCH, S_LANES
                )


@triton.jit(do_not_specialize=["rows"])
def look_up_kernel(
    index, table, out, rows, size, stride, TOPK: tl.constexpr, ROWS: tl.constexpr, K_BLOCK: tl.constexpr
):
    """out[i, k] = table[index[i, k]], or -1 for an index outside the table."""
    columns = tl.arange(0, K_BLOCK)
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = tile * ROWS + tl.arange(0, ROWS)
        live = (row < rows)[:, None] & (columns < TOPK)[None, :]
        found = tl.load(index + row.to(tl.int64)[:, None] * stride + columns[None, :], mask=live, other=-1)
        known = (found >= 0) & (found < size)
        value = tl.load(table + tl.where(known, found, 0), mask=known, other=-1)
        tl.store(out + row.to(tl.int64)[:, None] * TOPK + columns[None, :], value, mask=live)
