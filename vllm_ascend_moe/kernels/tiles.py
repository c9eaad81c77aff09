"""The tile table: which tile sizes the expert GEMM uses on which target. Chosen by measurement on the H200
(benchmarks/NOTES_triton.md) and, for Ascend A2, by what fits its buffers (docs/ascend_kernels.md).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from vllm_ascend_moe.errors import InvalidValueError

if TYPE_CHECKING:  # the Ascend check reads this table where torch is not installed
    import torch


SMALLEST = 16  # rows, columns or depth of what a matrix unit takes


class TilesError(InvalidValueError):
    """Tiles that contradict themselves, or that the operands at hand cannot have."""


@dataclass(frozen=True, kw_only=True)
class GemmTiles:
    """One row of the table.

    Args:
        block_m: rows of a tile.
        block_n: weight rows of a tile; a gated GEMM splits them evenly into gate and up.
        block_k: depth of one step.
        stages: steps whose loads are in flight at a time.
        warps: warps per program.
        programs: size of the persistent grid per multiprocessor.
        group_m: row tiles visited side by side (L2 reuse).
        halves: whether a sparse last round is cut into half tiles.
        flatten: whether loads of a program's next tile start before it has stored this one (with tma).
        store_n: the most columns of a full tile's result that are stored at a time through a descriptor, all or half
            of them (with tma); 0: they are stored through pointers.
        early: whether the kernel is set up while the one before it still runs (with tma).
        few_m: experts with fewer than block_m rows take tiles of block_m, few_m or 16 rows; 0: they take those above,
            which tiles through descriptors cannot: those must be full.
        few_n, few_k: weight rows and depth of these; few_stages, narrow_stages: stages of those of few_m and 16 rows.
        tma: read through tensor descriptors (Hopper).
        scan: find tiles in scalar code (Ascend; see schedule.py).

    Raises:
        TilesError: sizes that are no powers of two or below 16, or that contradict each other.
    """

    block_m: int
    block_n: int
    block_k: int
    stages: int = 1
    warps: int = 4
    programs: int = 1
    group_m: int = 1
    halves: bool = False
    flatten: bool = True
    store_n: int = 0
    early: bool = False
    few_m: int = 0
    few_n: int = 64
    few_k: int = 64
    few_stages: int = 1
    narrow_stages: int = 1
    tma: bool = False
    scan: bool = False

    def __post_init__(self) -> None:
        sizes = ["block_m", "block_n", "block_k", "few_n", "few_k", *(["few_m"] if self.few_m else [])]
        for name in sizes:
            size = getattr(self, name)
            if size < SMALLEST or size & (size - 1):
                raise TilesError(name, size, f"a power of two from {SMALLEST} on", "Pass one that is.")
        for name in ("stages", "few_stages", "narrow_stages", "warps", "programs", "group_m"):
            if getattr(self, name) < 1:
                raise TilesError(name, getattr(self, name), "1 or more", "Pass such a number.")
        least = SMALLEST + 1 if self.tma else 0
        if not least <= self.few_m <= self.block_m:
            limit = f"from {least} to block_m = {self.block_m}"
            raise TilesError("few_m", self.few_m, limit, "Fewer rows than block_m need tiles of their own.")
        if self.halves and self.block_n < 2 * SMALLEST:
            raise TilesError("halves", True, f"False where block_n = {self.block_n}", "Halves would be too narrow.")
        if self.store_n < 0 or self.store_n & (self.store_n - 1):
            raise TilesError("store_n", self.store_n, "0 or a power of two", "Pass one that is.")


# Two programs a multiprocessor: one multiplies while the other starts or stores its tile. Good at any row count.
_HOPPER_16BIT = GemmTiles(
    block_m=128,
    block_n=128,
    block_k=64,
    stages=3,
    warps=4,
    programs=2,
    group_m=16,
    store_n=64,
    few_m=64,
    few_n=128,
    few_k=64,
    few_stages=3,
    narrow_stages=4,
    tma=True,
)
# One program with the largest tile: faster where most experts have many rows.
_HOPPER_16BIT_MANY = replace(
    _HOPPER_16BIT,
    block_n=256,
    stages=4,
    warps=8,
    programs=1,
    halves=True,
    store_n=128,
    few_stages=6,
    narrow_stages=8,
)
# One smaller tile for each program and no more: nothing to overlap, so the plain loop, and more stages.
_HOPPER_16BIT_ROUND = replace(_HOPPER_16BIT_MANY, block_n=128, stages=6, halves=False, flatten=False, early=True)
# Half as wide: all experts' weights together have too few rows to give every multiprocessor a tile otherwise.
_HOPPER_16BIT_NARROW = replace(
    _HOPPER_16BIT,
    block_n=64,
    stages=4,
    programs=1,
    store_n=0,
    early=True,
    few_n=64,
    few_k=128,
    few_stages=4,
    narrow_stages=6,
)
# Three programs, with tiles half as wide: an even share for every multiprocessor where the general row would give one
# tile to some and two to others.
_HOPPER_16BIT_EVEN = replace(
    _HOPPER_16BIT,
    block_n=64,
    stages=3,
    programs=3,
    flatten=False,
    store_n=0,
    early=True,
    few_n=64,
    few_stages=4,
    narrow_stages=6,
)
_HOPPER_8BIT = replace(_HOPPER_16BIT, block_k=128, store_n=0, few_k=128)
_POINTERS_16BIT = GemmTiles(block_m=64, block_n=128, block_k=64, stages=3, group_m=8, programs=2)
_POINTERS_8BIT = replace(_POINTERS_16BIT, block_k=128)
_POINTERS_32BIT = GemmTiles(block_m=64, block_n=64, block_k=32, stages=2, programs=2)
# One program per cube core; 128 x 256 fp32 is the whole of L0C.
_ASCEND_16BIT = GemmTiles(block_m=128, block_n=256, block_k=64, scan=True)
_ASCEND_8BIT = replace(_ASCEND_16BIT, block_k=128)
_ASCEND_32BIT = replace(_ASCEND_16BIT, block_n=128, block_k=32)
# Small, so that small test inputs have several tiles of every kind.
_INTERPRETER = GemmTiles(block_m=64, block_n=32, block_k=32, group_m=2, halves=True, few_m=32, few_n=32, few_k=32)

# Up to so many rows per expert, also as a mean of very uneven counts, the even share is worth its narrow tiles.
_EVEN_SHARE_ROWS = 32
# From so many rows per expert on, the tiles for many rows are the faster ones.
_MANY_ROWS = 128
# But from so many on not where K is this short: two programs hide the stores, which are most of the time then.
_LONG_RUN_ROWS = 1024
_SHORT_DEPTH = 1024

# The rows for 16-bit weights on Hopper; TILE_TABLE holds the general one.
HOPPER_16BIT: dict[str, GemmTiles] = {
    "any_rows": _HOPPER_16BIT,
    "many_rows": _HOPPER_16BIT_MANY,
    "one_round": _HOPPER_16BIT_ROUND,
    "few_weights": _HOPPER_16BIT_NARROW,
    "even_share": _HOPPER_16BIT_EVEN,
}
# (target, bytes of a weight element) -> tiles
TILE_TABLE: dict[tuple[str, int], GemmTiles] = {
    ("hopper", 1): _HOPPER_8BIT,
    ("hopper", 2): _HOPPER_16BIT,
    ("hopper", 4): _POINTERS_32BIT,
    ("cuda", 1): _POINTERS_8BIT,
    ("cuda", 2): _POINTERS_16BIT,
    ("cuda", 4): _POINTERS_32BIT,
    ("ascend", 1): _ASCEND_8BIT,
    ("ascend", 2): _ASCEND_16BIT,
    ("ascend", 4): _ASCEND_32BIT,
    ("interpreter", 1): _INTERPRETER,
    ("interpreter", 2): _INTERPRETER,
    ("interpreter", 4): _INTERPRETER,
}


def tiles_for(
    target: str,
    dtype: torch.dtype,
    weight_rows: int,
    depth: int,
    programs: int,
    expected_rows: int | None = None,
    activation: str = "none",
    parts: int = 1,
) -> GemmTiles:
    """The tiles for weights of ``dtype`` on a target ("hopper", "cuda", "ascend" or "interpreter").

    Args:
        weight_rows: of all experts here, E_l * N (2N for a gated GEMM); depth: K.
        programs: multiprocessors.
        expected_rows: about how many rows an expert will have, where the host knows it. Only speed depends on it.
        activation, parts: of the epilogue, which on Ascend shares the buffers with the tile, and splits its columns.
    """
    tiles = TILE_TABLE[target, dtype.itemsize]
    if target == "ascend":
        return ascend_tiles(tiles, activation, parts)
    if tiles is not _HOPPER_16BIT:
        return tiles
    if expected_rows is None or expected_rows < _MANY_ROWS:
        if weight_rows < tiles.block_n * programs:
            return _HOPPER_16BIT_NARROW
        # A gated GEMM's tiles would be 32 columns of gate and 32 of up: that costs what the even share gains.
        few_rows = expected_rows is not None and expected_rows <= _EVEN_SHARE_ROWS and parts == 1
        return _HOPPER_16BIT_EVEN if few_rows and _shares_evenly(weight_rows, depth, programs) else tiles
    one = _HOPPER_16BIT_ROUND
    if -(-expected_rows // one.block_m) * -(-weight_rows // one.block_n) <= programs:
        return one
    return tiles if expected_rows >= _LONG_RUN_ROWS and depth < _SHORT_DEPTH else _HOPPER_16BIT_MANY


def _shares_evenly(weight_rows: int, depth: int, programs: int) -> bool:
    """Whether the narrow tiles of few rows fill three programs a multiprocessor once, and two would not hold them."""
    even = _HOPPER_16BIT_EVEN
    tiles = -(-weight_rows // even.few_n)
    return depth >= _SHORT_DEPTH and (even.programs - 1) * programs < tiles <= even.programs * programs


def rows_of_table(target: str, dtype: torch.dtype, activation: str = "none", parts: int = 1) -> list[GemmTiles]:
    """Every row of the table for weights of ``dtype`` on a target, the general one first, for pointers last.

    activation, parts: as for tiles_for.
    """
    if target == "ascend":
        return [ascend_tiles(TILE_TABLE[target, dtype.itemsize], activation, parts)]
    several = target == "hopper" and dtype.itemsize == 2
    rows = list(HOPPER_16BIT.values()) if several else [TILE_TABLE[target, dtype.itemsize]]
    return list(dict.fromkeys([*rows, without_tma(target, dtype)]))


def ascend_tiles(tiles: GemmTiles, activation: str, parts: int) -> GemmTiles:
    """Narrower where the epilogue's intermediate values would not fit UB beside a full tile."""
    heavy = activation == "swiglu_oai" or (parts == 1 and activation != "none")
    return replace(tiles, block_n=min(tiles.block_n, 128)) if heavy else tiles


def without_tma(target: str, dtype: torch.dtype) -> GemmTiles:
    """The tiles for operands that tensor descriptors cannot read (odd strides or addresses)."""
    return TILE_TABLE["cuda" if target == "hopper" else target, dtype.itemsize]


@dataclass(frozen=True, kw_only=True)
class RowTiles:
    """Tiles of the kernels that copy, sum and quantise rows.

    Args:
        rows: rows of a tile that needs whole rows (quantisation).
        columns: columns of a tile.
        choices: routing choices counted in one block.
        programs: size of the persistent grid per multiprocessor (per cube core on Ascend).
        scan: as in GemmTiles.
    """

    rows: int
    columns: int
    choices: int
    programs: int
    scan: bool = False


ROW_TILES: dict[str, RowTiles] = {
    "hopper": RowTiles(rows=4, columns=1024, choices=256, programs=16),
    "cuda": RowTiles(rows=4, columns=1024, choices=256, programs=16),
    # The largest chunk whose quantisation fits the 192 KiB of UB with double buffering.
    "ascend": RowTiles(rows=16, columns=256, choices=64, programs=2, scan=True),
    "interpreter": RowTiles(rows=4, columns=32, choices=16, programs=2),
}


# Half as wide: the largest for which what this activation keeps fits UB too, with interleaved columns and fp32 as well.
_ASCEND_HEAVY_ROWS = replace(ROW_TILES["ascend"], columns=128)


def row_tiles_for(target: str, activation: str = "none") -> RowTiles:
    """The row tiles of a target; activation: as kernels name it, where they compute one."""
    return _ASCEND_HEAVY_ROWS if target == "ascend" and activation == "swiglu_oai" else ROW_TILES[target]


# All-to-all by row: tokens times ranks of a tile of the plan, few of which fit UB on Ascend; words of a tile of a copy.
PLAN_TILE = {"hopper": 8192, "cuda": 8192, "ascend": 256, "interpreter": 128}
COPY_LANES = {"hopper": 2048, "cuda": 2048, "ascend": 2048, "interpreter": 32}
# Choices times experts of a block of the sort by expert, which are a tile of its program, at most: Ascend's UB does not
# hold twice as many.
SORT_TILE = {"hopper": 1 << 16, "cuda": 1 << 16, "ascend": 1 << 14, "interpreter": 1 << 14}
# The same of slots, rows times experts, but up to four times as many where there would be fewer than 16 rows.
SLOT_TILE = 2048


def sort_block(num_local: int, target: str) -> dict[str, int]:
    """Choices and experts of a block of the sort by expert, as its kernels name them."""
    experts = _padded(num_local)
    return {"BLOCK": max(1, min(row_tiles_for(target).choices, SORT_TILE[target] // experts)), "E_BLOCK": experts}


def slot_block(rows: int, num_local: int) -> dict[str, int]:
    """Rows and experts of a block of slots, the same everywhere, as its kernels name them."""
    experts = _padded(num_local)
    fewest = min(16, 4 * SLOT_TILE // experts)
    return {"ROWS": max(1, fewest, min(SLOT_TILE // experts, _power_of_two(rows))), "E_BLOCK": experts}


def _padded(experts: int) -> int:
    return max(16, _power_of_two(experts))


def _power_of_two(number: int) -> int:
    """The first one that is not below ``number``."""
    return 1 << max(0, number - 1).bit_length()
