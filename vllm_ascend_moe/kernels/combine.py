"""Each token's weighted sum of its expert outputs: ``out[t] = sum_k weights[t, k] * y[slots[t, k]]``."""

from __future__ import annotations

import torch
import triton

from vllm_ascend_moe.errors import ShapeError
from vllm_ascend_moe.kernels.rows import combine_kernel
from vllm_ascend_moe.kernels.targets import processors, same_device, summary, target_of
from vllm_ascend_moe.kernels.tiles import row_tiles_for

SUMMED = (torch.bfloat16, torch.float16, torch.float32)


def combine(
    y: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor | None = None, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Weighted sum of expert outputs, in fp32, rounded once. Every row of the result is written.

    Args:
        y: [slots, H] or [E_l, rows, H] (slot = expert * rows + row), rows contiguous; bf16, fp16 or fp32.
        slots: int32 [T, K], or -1: adds exactly 0.
        weights: fp32 [T, K], or None: all 1.
        out: [T, H], bf16, fp16 or fp32, a row is contiguous; None: a new tensor of y's dtype.

    Returns:
        ``out``.

    Raises:
        ShapeError: shapes, strides, dtypes or devices that do not fit. InvalidValueError, UnsupportedError: see
        ``target_of``.
    """
    flat = y.flatten(0, -2) if y.dim() == 3 else y
    if flat.dim() != 2 or flat.dtype not in SUMMED or (flat.stride(-1) != 1 and flat.shape[-1] > 1):
        limit = "bf16, fp16 or fp32 [slots, H] or [E_l, rows, H] with contiguous rows"
        raise ShapeError("y", summary(y), limit, "Reshape or convert it.")
    if slots.dim() != 2 or slots.dtype != torch.int32 or (slots.shape[1] > 1 and slots.stride(1) != 1):
        raise ShapeError("slots", summary(slots), "int32 [T, K], last stride 1", "Convert it.")
    if weights is not None and (weights.shape != slots.shape or weights.dtype != torch.float32):
        raise ShapeError("weights", summary(weights), f"float32 {list(slots.shape)}", "Convert it.")
    tokens, hidden = slots.shape[0], flat.shape[1]
    if out is None:
        out = flat.new_empty((tokens, hidden))
    if out.shape != (tokens, hidden) or out.dtype not in SUMMED or (hidden > 1 and out.stride(1) != 1):
        limit = f"bf16, fp16 or fp32 [{tokens}, {hidden}], last stride 1"
        raise ShapeError("out", summary(out), limit, "Pass such a tensor.")
    same_device(y, slots=slots, weights=weights, out=out)
    if tokens == 0 or hidden == 0:
        return out
    if weights is not None and weights.stride(1) != 1:
        weights = weights.contiguous()
    tiles = row_tiles_for(target_of(y.device))
    pieces = tokens * triton.cdiv(hidden, tiles.columns)
    combine_kernel[(min(pieces, processors(y.device) * tiles.programs),)](
        flat,
        slots,
        weights,
        out,
        tokens,
        hidden,
        flat.stride(0),
        slots.stride(0),
        0 if weights is None else weights.stride(0),
        out.stride(0),
        TOPK=slots.shape[1],
        COLUMNS=tiles.columns,
    )
    return out
