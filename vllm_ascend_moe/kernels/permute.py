"""Rows sorted by expert: a stable counting sort of the routing table on the device, and the copy of the rows.

Two passes over the choices (one where they fit in one block): each block counts its choices per expert, then each
block turns the counts of all blocks into the first position of its own. No atomics, so that the order, and with it
every sum, is the same in every run.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from vllm_ascend_moe.errors import InvalidValueError, ShapeError
from vllm_ascend_moe.kernels.rows import count_kernel, position_kernel, scatter_rows_kernel
from vllm_ascend_moe.kernels.targets import processors, same_device, summary, target_of
from vllm_ascend_moe.kernels.tiles import row_tiles_for, sort_block

_INDICES = (torch.int32, torch.int64)


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
        expert_map: int32 or int64 [E], contiguous, global id -> local expert or -1.

    Returns:
        The permutation. Ids that are out of range, not routed or another rank's have position -1.

    Raises:
        ShapeError: dtypes, shapes, strides or devices that do not fit. InvalidValueError: num_local is negative, or
        rows * K is more than int32 counts. InvalidValueError, UnsupportedError: see ``target_of``.
    """
    if topk_ids.dim() != 2 or topk_ids.dtype not in _INDICES:
        raise ShapeError("topk_ids", summary(topk_ids), "int32 or int64 [rows, K]", "Convert it.")
    if expert_map is not None:
        if expert_map.dim() != 1 or expert_map.dtype not in _INDICES or not expert_map.is_contiguous():
            raise ShapeError("expert_map", summary(expert_map), "int32 or int64 [E], contiguous", "Convert it.")
        same_device(topk_ids, expert_map=expert_map)
    if num_local < 0:
        raise InvalidValueError("num_local", num_local, "0 or more", "Pass how many experts are on this rank.")
    if (choices := topk_ids.numel()) >= 1 << 31:
        limit = "less than 2^31, since positions are int32"
        raise InvalidValueError("rows * K", choices, limit, "Send fewer tokens at a time.")
    ids = topk_ids.contiguous()
    counts, starts = ids.new_zeros((2, num_local), dtype=torch.int32).unbind()
    positions = torch.empty_like(ids, dtype=torch.int32)
    if choices == 0 or num_local == 0:
        return Permutation(positions=positions.fill_(-1), counts=counts, starts=starts)
    num_ids = num_local if expert_map is None else expert_map.numel()
    sizes = sort_block(num_local, target_of(ids.device))
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
        x: [rows, H], a row is contiguous; any dtype. scale: fp32 [rows], contiguous, moved along.

    Returns:
        [rows * K, H], of which only the rows of the permutation are written, and the scales [rows * K] or None.

    Raises:
        ShapeError: x or scale has another number of rows than the permutation, gaps, or another device; scale another
        dtype. InvalidValueError, UnsupportedError: see ``target_of``.
    """
    choices = permutation.positions.numel()
    out = x.new_empty((choices, *x.shape[1:]))
    out_scale = None if scale is None else scale.new_empty(choices)
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
        scale: fp32 [rows], moved to ``out_scale``, fp32 [rows of out], both contiguous; or neither.

    Raises:
        ShapeError: shapes, strides, dtypes or devices that do not fit. InvalidValueError, UnsupportedError: see
        ``target_of``.
    """
    if positions.dim() != 2 or positions.dtype != torch.int32 or not positions.is_contiguous():
        raise ShapeError("positions", summary(positions), "int32 [rows, K], contiguous", "Convert it.")
    rows, topk = positions.shape
    if x.dim() != 2 or x.shape[0] != rows or (x.shape[1] > 1 and x.stride(1) != 1):
        raise ShapeError("x", summary(x), f"[{rows}, H], last stride 1", "Copy it.")
    hidden = x.shape[1]
    if out.dim() != 2 or out.shape[1] != hidden or out.dtype != x.dtype or (hidden > 1 and out.stride(1) != 1):
        raise ShapeError("out", summary(out), f"{x.dtype} [any, {hidden}], last stride 1", "Pass such rows.")
    _check_scale("scale", scale, rows)
    _check_scale("out_scale", out_scale, out.shape[0])
    if (scale is None) != (out_scale is None):
        given = "scale" if out_scale is None else "out_scale"
        raise ShapeError("scale", f"{given} alone", "None, or given with out_scale", "Pass both or neither.")
    same_device(x, positions=positions, out=out, scale=scale, out_scale=out_scale)
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


def _check_scale(name: str, scale: torch.Tensor | None, rows: int) -> None:
    if scale is None:
        return
    if scale.shape != (rows,) or scale.dtype != torch.float32 or not scale.is_contiguous():
        raise ShapeError(name, summary(scale), f"float32 [{rows}], contiguous", "Reshape or convert it.")
