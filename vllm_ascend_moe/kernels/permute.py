"""Rows sorted by expert: a stable counting sort of the routing table on the device, and the copy of the rows.

Two passes over the choices (one where they fit in one block): each block counts its choices per expert, then each
block turns the counts of all blocks into the first position of its own. No atomics, so that the order, and with it
every sum, is the same in every run.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from vllm_ascend_moe.errors import ShapeError
from vllm_ascend_moe.kernels.rows import count_kernel, position_kernel, scatter_rows_kernel
from vllm_ascend_moe.kernels.targets import processors, target_of
from vllm_ascend_moe.kernels.tiles import row_tiles_for


@dataclass(frozen=True, kw_only=True)
class Permutation:
    """Where each choice's row goes. All int32, on the device."""

    positions: torch.Tensor  # [rows, K], the row in expert order, or -1
    counts: torch.Tensor  # [E_l]
    starts: torch.Tensor  # [E_l], each expert's first row


def plan_permutation(topk_ids: torch.Tensor, num_local: int, expert_map: torch.Tensor | None = None) -> Permutation:
    """Sorts the choices by local expert; choices of one expert keep their order.

    Args:
        topk_ids: int32 or int64 [rows, K], global ids (local ones without ``expert_map``).
        num_local: E_l.
        expert_map: int32 or int64 [E], global id -> local expert or -1.

    Returns:
        The permutation. Ids that are out of range, not routed or another rank's have position -1.

    Raises:
        ShapeError: dtypes or shapes that do not fit.
    """
    if topk_ids.dim() != 2 or topk_ids.dtype not in (torch.int32, torch.int64):
        raise ShapeError(
            "topk_ids", f"{topk_ids.dtype} {list(topk_ids.shape)}", "int32 or int64 [rows, K]", "Convert it."
        )
    if expert_map is not None and (expert_map.dim() != 1 or expert_map.dtype not in (torch.int32, torch.int64)):
        raise ShapeError("expert_map", f"{expert_map.dtype} {list(expert_map.shape)}", "int32 [E]", "Convert it.")
    ids = topk_ids.contiguous()
    choices = ids.numel()
    counts, starts = ids.new_zeros((2, num_local), dtype=torch.int32).unbind()
    positions = torch.empty_like(ids, dtype=torch.int32)
    if choices == 0 or num_local == 0:
        return Permutation(positions=positions.fill_(-1), counts=counts, starts=starts)
    num_ids = num_local if expert_map is None else expert_map.numel()
    sizes = {
        "BLOCK": row_tiles_for(target_of(ids.device)).choices,
        "E_BLOCK": max(16, triton.next_power_of_2(num_local)),
    }
    blocks = triton.cdiv(choices, sizes["BLOCK"])
    block_counts = None
    if blocks > 1:
        block_counts = ids.new_empty((blocks, sizes["E_BLOCK"]), dtype=torch.int32)
        count_kernel[(blocks,)](ids, expert_map, block_counts, choices, num_ids, num_local, **sizes)
    position_kernel[(blocks,)](
        ids, expert_map, block_counts, positions, counts, starts, choices, num_ids, num_local, blocks, **sizes
    )
    return Permutation(positions=positions, counts=counts, starts=starts)


def permute_rows(
    x: torch.Tensor, permutation: Permutation, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Copies rows into expert order.

    Args:
        x: [rows, H], a row is contiguous; any dtype. scale: fp32 [rows], moved along.

    Returns:
        [rows * K, H], of which only the rows of the permutation are written, and the scales [rows * K] or None.

    Raises:
        ShapeError: x has another number of rows than the permutation, or strided rows.
    """
    rows, topk = permutation.positions.shape
    if x.dim() != 2 or x.shape[0] != rows or (x.shape[1] > 1 and x.stride(1) != 1):
        raise ShapeError("x", f"{list(x.shape)}, strides {list(x.stride())}", f"[{rows}, H], last stride 1", "Copy it.")
    out = x.new_empty((rows * topk, x.shape[1]))
    out_scale = None if scale is None else scale.new_empty(rows * topk)
    scatter_rows(x, permutation.positions, out, scale, out_scale)
    return out, out_scale


def scatter_rows(
    x: torch.Tensor,
    positions: torch.Tensor,
    out: torch.Tensor,
    scale: torch.Tensor | None = None,
    out_scale: torch.Tensor | None = None,
) -> None:
    """``out[positions[t, k]] = x[t]``, and its scale; a position of -1 writes nothing.

    Args:
        x: [rows, H] and out: [any, H], of one dtype, a row is contiguous; positions: int32 [rows, K], contiguous.
        scale: fp32 [rows], moved to ``out_scale``.

    Raises:
        ShapeError: shapes, strides or dtypes that do not fit.
    """
    (rows, topk), hidden = positions.shape, x.shape[1]
    strided = hidden > 1 and (x.stride(1) != 1 or out.stride(1) != 1)
    if x.shape[0] != rows or out.shape[1] != hidden or out.dtype != x.dtype or strided:
        raise ShapeError("out", f"{out.dtype} {list(out.shape)}", f"{x.dtype} [any, {hidden}], as x", "Pass such rows.")
    if positions.dtype != torch.int32 or not positions.is_contiguous():
        raise ShapeError("positions", positions.dtype, "int32, contiguous", "Convert it.")
    if x.numel() == 0 or out.numel() == 0:
        return
    tiles = row_tiles_for(target_of(x.device))
    pieces = rows * triton.cdiv(hidden, tiles.columns)
    scatter_rows_kernel[(min(pieces, processors(x.device) * tiles.programs),)](
        x,
        scale,
        positions,
        out,
        out_scale,
        rows,
        hidden,
        x.stride(0),
        out.stride(0),
        TOPK=topk,
        COLUMNS=tiles.columns,
    )
