"""The device side of the all-to-all by row: which rank gets which token, rows of bytes, ids on arrival, sums at home.

One launch each (two for the plan of many tokens), and nothing is read back: rows are written from their tokens, so
that the host need not know how many there are.

Symbols: T tokens of this rank; K top-k; E experts; R ranks; W = min(K, R); H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from vllm_ascend_moe.errors import InvalidValueError, ShapeError
from vllm_ascend_moe.kernels.cached_launch import aligned, launch
from vllm_ascend_moe.kernels.combine import SUMMED
from vllm_ascend_moe.kernels.rows import combine_kernel
from vllm_ascend_moe.kernels.sent_row_kernels import look_up_kernel, pack_rows_kernel, row_count_kernel, row_plan_kernel
from vllm_ascend_moe.kernels.targets import processors, same_device, summary, target_of
from vllm_ascend_moe.kernels.tiles import COPY_LANES, PLAN_TILE, row_tiles_for

_ID_DTYPES = (torch.int32, torch.int64)
# Few tokens take a tile of fewer rows.
_FEW_TOKENS = 64
# Up to so many tiles each program counts them all, which takes less time than another launch.
_SELF_COUNTED = 4
_BLOCKS = 128  # programs of the plan, at most
_UNROLLED = 8  # choices of a token that are looked up at a time, at most
_LOOK_UP = 1024  # ids of a tile
_LAID_OUT = "Use RowFormat, which lays rows out."
_WORDS = {4: (torch.int32, tl.int32), 2: (torch.int16, tl.int16), 1: (torch.int8, tl.int8)}


# -- the plan --------------------------------------------------------------------------------------------------


class PlanTiles(NamedTuple):
    """How T tokens are divided: ``blocks`` programs of ``steps`` tiles of ``rows`` tokens times ``ranks`` ranks."""

    rows: int
    ranks: int
    tiles: int
    steps: int
    blocks: int

    @property
    def self_counted(self) -> bool:
        return self.tiles <= _SELF_COUNTED


@lru_cache(maxsize=4096)
def plan_tiles(tokens: int, ranks: int, target: str) -> PlanTiles:
    """The tiles of a plan."""
    r_block = max(4, triton.next_power_of_2(ranks))
    rows = max(1, PLAN_TILE[target] // r_block)
    if tokens <= _FEW_TOKENS:
        rows = min(rows, _FEW_TOKENS)
    tiles = triton.cdiv(tokens, rows)
    blocks = max(1, min(tiles, _BLOCKS))
    return PlanTiles(rows, r_block, tiles, triton.cdiv(tiles, blocks), blocks)


def plan_rows(
    topk_ids: torch.Tensor, owners: torch.Tensor, ep_size: int, code: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One row for each (token, rank) pair where the rank has one of the token's experts, by rank and then by token.

    Args:
        topk_ids: int32 or int64 [T, K], any values, any strides.
        owners: int32 [E + 2], contiguous: the rank of expert e at e + 1; R where it is on none, and at both ends.
        ep_size: R, 1 or more. code: added to every count.

    Returns:
        entries [T, K] in the ids' dtype, id + 1, or 0 or E + 1 for one outside [0, E); codes int64 [2, R], the rows
        for each rank plus ``code`` in the first line, the second not written; slots int32 [T, W], the rows of each
        token in the order of ranks, then -1.

    Raises:
        ShapeError: operands of another shape, dtype or device. InvalidValueError: ep_size is less than 1, or T * K is
        more than int32 counts. InvalidValueError, UnsupportedError: see ``target_of``.
    """
    if topk_ids.dim() != 2 or topk_ids.dtype not in _ID_DTYPES:
        raise ShapeError("topk_ids", summary(topk_ids), "int32 or int64 [T, K]", "Convert it.")
    if owners.dim() != 1 or owners.dtype != torch.int32 or owners.shape[0] < 2 or not owners.is_contiguous():
        raise ShapeError("owners", summary(owners), "int32 [E + 2], contiguous", "Use owner_table().")
    same_device(topk_ids, owners=owners)
    if ep_size < 1:
        raise InvalidValueError("ep_size", ep_size, "1 or more", "Pass the number of ranks.")
    (tokens, topk), device = topk_ids.shape, topk_ids.device
    if tokens * topk >= 1 << 31:
        limit = "less than 2^31, since rows are numbered in int32"
        raise InvalidValueError("T * K", tokens * topk, limit, "Send fewer tokens at a time.")
    width, num_experts = min(topk, ep_size), owners.shape[0] - 2
    entries = torch.empty((tokens, topk), dtype=topk_ids.dtype, device=device)
    slots = torch.empty((tokens, width), dtype=torch.int32, device=device)
    codes = torch.empty((2, ep_size), dtype=torch.int64, device=device)
    target = target_of(device)
    tiles = plan_tiles(tokens, ep_size, target)
    stride, stride_k = topk_ids.stride()
    sizes = (num_experts, ep_size, stride, stride_k)
    # Ascend's compiler takes minutes for the unrolled loop.
    last = (tiles.rows, tiles.ranks, 1 if target == "ascend" else min(_UNROLLED, max(1, topk)))
    key = (device, topk_ids.dtype, topk, *sizes, tiles.rows, aligned(topk_ids), aligned(owners))
    warps = 8 if tiles.rows * tiles.ranks > 4096 else 4
    block_counts = None
    if not tiles.self_counted:
        block_counts = torch.empty((tiles.blocks, tiles.ranks), dtype=torch.int32, device=device)
        launch(
            row_count_kernel,
            tiles.blocks,
            ("count", *key),
            (topk_ids, owners, block_counts, tokens, tiles.tiles, tiles.steps, *sizes, topk, *last),
            num_warps=warps,
        )
    launch(
        row_plan_kernel,
        tiles.blocks,
        ("plan", *key, tiles.self_counted, code >> 31 != 0),
        (topk_ids, owners, block_counts, entries, slots, codes, tokens, *tiles[2:], code, *sizes, topk, width, *last),
        num_warps=warps,
    )
    return entries, codes, slots


# -- rows of bytes ---------------------------------------------------------------------------------------------


class _Column(NamedTuple):
    """One tensor in words: where it begins in a row, its words and how far its rows are apart."""

    start: int
    words: int
    stride: int

    @staticmethod
    def of(x: torch.Tensor, start: int, word: int) -> _Column:
        size = x.element_size()
        count = x.shape[1:].numel() * size
        return _Column(start // word, count // word, (x.stride(0) if x.shape[0] > 1 else count // size) * size // word)


def pack_rows(
    columns: Sequence[torch.Tensor], starts: Sequence[int], row_bytes: int, slots: torch.Tensor, rows: int
) -> torch.Tensor:
    """Rows of several tensors side by side: ``wire[slots[t, j]]`` gets row t of each; slots of -1 write nothing.

    Args:
        columns: three or four tensors [T, ...], of any dtypes; rows may be strided.
        starts: the first byte of each in a row, 0 of the first; columns do not overlap.
        row_bytes: of a row, a multiple of 16, with room for the last column.
        slots: int32 [T, W], contiguous, each below ``rows``.

    Returns:
        uint8 [rows, row_bytes]; rows that no slot names, and bytes between columns, hold anything.

    Raises:
        ShapeError: another number of columns, or columns or slots of another shape, dtype or device. InvalidValueError:
        starts or row_bytes that are not those of such columns. InvalidValueError, UnsupportedError: see ``target_of``.
    """
    if slots.dim() != 2 or slots.dtype != torch.int32 or not slots.is_contiguous():
        raise ShapeError("slots", summary(slots), "int32 [T, W], contiguous", "Convert it.")
    tokens, device = slots.shape[0], slots.device
    if not 3 <= len(columns) <= 4 or any(x.shape[:1] != (tokens,) for x in columns):
        shapes = [list(x.shape) for x in columns]
        raise ShapeError("columns", shapes, f"3 or 4 tensors [{tokens}, ...]", "Pass one row per token.")
    if len(starts) != len(columns):
        raise InvalidValueError("starts", list(starts), f"{len(columns)} numbers, one a column", _LAID_OUT)
    if any(x.device != device for x in columns):
        same_device(slots, **{f"columns[{number}]": x for number, x in enumerate(columns)})
    wire = torch.empty((rows, row_bytes), dtype=torch.uint8, device=device)
    if tokens == 0 or rows == 0:
        return wire
    given = [x if x.is_contiguous() or _has_dense_rows(x) else x.contiguous() for x in columns]
    word = _word_bytes(given, starts)
    places = tuple(_Column.of(x, start, word) for x, start in zip(given, starts, strict=True))
    target = target_of(device)
    layout = (places, word, row_bytes, slots.shape[1])
    chunks, constants = _pack_constants(*layout, COPY_LANES[target])
    programs = min(tokens * chunks, processors(device) * row_tiles_for(target).programs)
    key = ("pack", device, layout, aligned(slots), *[(x.dtype, aligned(x)) for x in given])
    words = wire
    if target == "ascend":  # its compiler has no casts of pointers
        given, words = [_as_words(x, word) for x in given], _as_words(wire, word)
    scales = given[3] if len(given) == 4 else None
    launch(pack_rows_kernel, programs, key, (*given[:3], scales, slots, words, tokens, *constants))
    return wire


def _check_places(places: Sequence[_Column], word: int, row_bytes: int) -> None:
    """Raises InvalidValueError unless the columns follow each other in a row, from its first byte on, and end in it."""
    if row_bytes % 16:
        raise InvalidValueError("row_bytes", row_bytes, "a multiple of 16", _LAID_OUT)
    if places[0].start != 0:
        raise InvalidValueError("starts[0]", places[0].start * word, "0", _LAID_OUT)
    limits = [*[place.start * word for place in places[1:]], row_bytes]
    for number, (place, limit) in enumerate(zip(places, limits, strict=True)):
        if (place.start + place.words) * word > limit:
            latest = f"at most {limit - place.words * word}, since the next column or row begins at byte {limit}"
            raise InvalidValueError(f"starts[{number}]", place.start * word, latest, _LAID_OUT)


def _has_dense_rows(x: torch.Tensor) -> bool:
    return x.dim() == 1 or (x.dim() == 2 and (x.stride(1) == 1 or x.shape[1] == 1)) or x[0].is_contiguous()


def _word_bytes(columns: Sequence[torch.Tensor], starts: Sequence[int]) -> int:
    """The largest word that divides every address, row and distance of rows."""
    together = 0
    for x, start in zip(columns, starts, strict=True):
        size = x.element_size()
        together |= x.data_ptr() | start | x.shape[1:].numel() * size | x.stride(0) * size
    return 4 if together % 4 == 0 else 2 if together % 2 == 0 else 1


def _as_words(x: torch.Tensor, word: int) -> torch.Tensor:
    """The tensor's bytes as words; one-dimensional tensors get a dimension, since a view may change the last one."""
    return (x[:, None] if x.dim() == 1 else x).view(_WORDS[word][0])


@lru_cache(maxsize=256)
def _pack_constants(
    places: tuple[_Column, ...], word: int, row_bytes: int, width: int, lanes: int
) -> tuple[int, tuple[Any, ...]]:
    """Pieces of a token's first column, and the constants of pack_rows_kernel, in order."""
    _check_places(places, word, row_bytes)
    first, *others = places
    chunks = max(1, triton.cdiv(first.words, lanes))
    constants: list[Any] = [_WORDS[word][1], width, row_bytes // word, chunks, lanes, first.words, first.stride]
    for place in [*others, *[_Column(0, 0, 0)] * (3 - len(others))]:
        constants += [*place, min(lanes, triton.next_power_of_2(max(1, place.words)))]
    return chunks, tuple(constants)


# -- on arrival, and at home -----------------------------------------------------------------------------------


def look_up(index: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """``table[index]`` [rows, K], contiguous, and -1 for an index outside the table.

    Args:
        index: int32 or int64 [rows, K]; rows may be strided. table: [any], contiguous, of the same dtype.

    Raises:
        ShapeError: operands of another shape, dtype or device. InvalidValueError, UnsupportedError: see ``target_of``.
    """
    if index.dim() != 2 or index.dtype not in _ID_DTYPES or (index.shape[1] > 1 and index.stride(1) != 1):
        raise ShapeError("index", summary(index), "int32 or int64 [rows, K], last stride 1", "Convert it.")
    if table.dim() != 1 or table.dtype != index.dtype or not table.is_contiguous():
        raise ShapeError("table", summary(table), f"{index.dtype} [any], contiguous, as the index", "Convert it.")
    same_device(index, table=table)
    (rows, topk), device = index.shape, index.device
    out = torch.empty((rows, topk), dtype=index.dtype, device=device)
    if rows == 0 or topk == 0:
        return out
    k_block = triton.next_power_of_2(topk)
    target = target_of(device)
    tile = max(1, (64 if target == "interpreter" else _LOOK_UP) // k_block)
    sizes = (table.shape[0], index.stride(0))
    programs = min(triton.cdiv(rows, tile), processors(device) * row_tiles_for(target).programs)
    key = ("look up", device, index.dtype, *sizes, topk, aligned(index), aligned(table))
    launch(look_up_kernel, programs, key, (index, table, out, rows, *sizes, topk, tile, k_block))
    return out


def sum_rows(y: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """``out[t] = sum over j of y[slots[t, j]]`` in order of j, in fp32, rounded once; a slot of -1 adds exactly 0.

    Args:
        y: [rows, H], contiguous; bf16, fp16 or fp32. slots: int32 [T, W], contiguous.

    Returns:
        [T, H] in the dtype of y.

    Raises:
        ShapeError: operands of another shape, dtype or device, or with gaps. InvalidValueError, UnsupportedError: see
        ``target_of``.
    """
    if y.dim() != 2 or y.dtype not in SUMMED or not y.is_contiguous():
        raise ShapeError("y", summary(y), "bf16, fp16 or fp32 [rows, H], contiguous", "Convert it.")
    if slots.dim() != 2 or slots.dtype != torch.int32 or not slots.is_contiguous():
        raise ShapeError("slots", summary(slots), "int32 [T, W], contiguous", "Convert it.")
    same_device(y, slots=slots)
    (tokens, width), hidden, device = slots.shape, y.shape[1], y.device
    out = torch.empty((tokens, hidden), dtype=y.dtype, device=device)
    if y.shape[0] == 0 or out.numel() == 0:
        return out.zero_()
    tiles = row_tiles_for(target_of(device))
    programs = min(tokens * triton.cdiv(hidden, tiles.columns), processors(device) * tiles.programs)
    arguments = (y, slots, None, out, tokens, hidden, hidden, width, 0, hidden, width, tiles.columns)
    # combine_kernel specialises the number of tokens.
    key = ("sum", device, y.dtype, hidden, width, tokens == 1, tokens % 16 == 0, aligned(y), aligned(slots))
    launch(combine_kernel, programs, key, arguments)
    return out
