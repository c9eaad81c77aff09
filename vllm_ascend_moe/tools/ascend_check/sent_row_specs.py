"""The kernels of the all-to-all by row, as their launches pass them for Ascend A2. Needs no torch."""

from __future__ import annotations

from typing import Any

import triton.language as tl

from vllm_ascend_moe.kernels import sent_row_kernels
from vllm_ascend_moe.kernels.tiles import COPY_LANES, PLAN_TILE
from vllm_ascend_moe.tools.ascend_check.spec import KernelSpec


def sent_row_specs() -> list[KernelSpec]:
    """The kernels of the all-to-all by row: DeepSeek-V3's sizes in bf16, with and without scales."""
    plan = {"ids": "*i32", "owners": "*i32", "block_counts": "*i32", "entries": "*i32", "slots": "*i32"}
    plan |= {"codes": "*i64", "code": "i64"}
    specs = []
    for ranks in (4, 8, 16, 32, 64, 128, 256):
        tokens = PLAN_TILE["ascend"] // ranks
        sizes, area = {"TOPK": 8, "ROWS": tokens, "R_BLOCK": ranks, "UNROLL": 1}, f"{tokens}x{ranks}"
        placed = {**sizes, "WIDTH": min(8, ranks)}
        specs.append(KernelSpec(f"row_count_{ranks}", sent_row_kernels.row_count_kernel, plan, sizes, area))
        specs.append(KernelSpec(f"row_plan_{ranks}", sent_row_kernels.row_plan_kernel, plan, placed, area))
    wide = plan | {"ids": "*i64", "entries": "*i64"}
    alone: dict[str, Any] = {"TOPK": 8, "ROWS": 32, "R_BLOCK": 8, "UNROLL": 1, "WIDTH": 8, "block_counts": None}
    specs.append(KernelSpec("row_plan_one_launch", sent_row_kernels.row_plan_kernel, wide, alone, "32x8"))
    lanes = COPY_LANES["ascend"]
    words = dict.fromkeys(("x", "weights", "entries", "scales", "slots", "wire"), "*i32")
    for name, columns in {"pack_rows": (3584, 8, 8), "pack_rows_scales": (1792, 8, 8, 1)}.items():
        constants = {"WORD": tl.int32, "WIDTH": 8, **pack_layout(columns, lanes)}
        if len(columns) == 3:
            constants["scales"] = None
        specs.append(KernelSpec(name, sent_row_kernels.pack_rows_kernel, words, constants, f"{lanes}"))
    for size in (32, 64):
        ids = dict.fromkeys(("index", "table", "out"), f"*i{size}")
        tile = {"TOPK": 8, "ROWS": 128, "K_BLOCK": 8}
        specs.append(KernelSpec(f"look_up_{size}", sent_row_kernels.look_up_kernel, ids, tile, "128x8"))
    return specs


def pack_layout(columns: tuple[int, ...], lanes: int) -> dict[str, int]:
    """Sizes of pack_rows_kernel for dense columns of so many words, which follow each other."""
    layout = {"PITCH": -(-sum(columns) // 4) * 4, "CHUNKS": -(-columns[0] // lanes), "LANES": lanes}
    layout |= {"X_COUNT": columns[0], "X_STRIDE": columns[0]}
    start = columns[0]
    for name, count in zip("WES", (*columns[1:], 0, 0), strict=False):
        layout |= {f"{name}_START": start, f"{name}_COUNT": count, f"{name}_STRIDE": count}
        layout[f"{name}_LANES"] = 1 << max(0, count - 1).bit_length()
        start += count
    return layout
