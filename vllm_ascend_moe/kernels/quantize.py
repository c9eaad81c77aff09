"""Activation of expert outputs on their own ([gate; up] -> one half), and per-token quantisation of the result.

The expert GEMM applies the activation itself; this kernel is for what it cannot do: a row's scale needs the whole row.
"""

from __future__ import annotations

import torch
import triton

from vllm_ascend_moe.errors import ShapeError
from vllm_ascend_moe.kernels.operands import FP8, activation_form, check_counts
from vllm_ascend_moe.kernels.rows import activate_kernel
from vllm_ascend_moe.kernels.targets import check_fp8, processors, same_device, target_of
from vllm_ascend_moe.kernels.tiles import row_tiles_for

_INPUTS = (torch.bfloat16, torch.float16, torch.float32)
# Largest value of each quantised type; rows are scaled to it.
_LIMITS = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


def activate_rows(
    x: torch.Tensor,
    counts: torch.Tensor,
    *,
    starts: torch.Tensor | None = None,
    activation: str = "silu",
    quantize_to: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The activation of every expert's own rows, quantised per row if asked.

    Args:
        x: [E_l, rows, 2N] (gated activations) or [E_l, rows, N], or [total, ...] with ``starts``; bf16, fp16 or fp32,
            a row is contiguous.
        counts: int32 [E_l]; starts: int32 [E_l], each expert's first row, or None. Rows past the count are neither
            read nor written. A ragged group must end within ``x``: that is not checked, since the host would have to
            wait for the numbers.
        activation: a name of ACTIVATION_FORMS; "none" only quantises.
        quantize_to: int8 (nearest, halves up), float8_e4m3fn or float8_e5m2; None: keep x's dtype.

    Returns:
        The result [.., N], and its fp32 scales [E_l, rows] or [total] (None unless quantised): result * scale is the
        activation. A row with NaN or infinity has a scale of NaN, so that the fault stays visible.

    Raises:
        ShapeError: shapes, strides, dtypes or devices that do not fit. InvalidValueError: an unknown activation, or
        operands that are not on the current device. UnsupportedError: a device Triton does not run on, or fp8 on
        hardware without it.
    """
    form = activation_form(activation)
    if x.dtype not in _INPUTS or x.dim() != (3 if starts is None else 2) or x.shape[-1] % form.parts:
        wanted = "bf16, fp16 or fp32 [E_l, rows, columns], or ragged"
        raise ShapeError("x", f"{x.dtype} {list(x.shape)}", wanted, "Convert or reshape it.")
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        raise ShapeError("x.stride(-1)", x.stride(-1), "1", "Call .contiguous().")
    if quantize_to is not None and quantize_to not in _LIMITS:
        raise ShapeError("quantize_to", quantize_to, f"one of {', '.join(map(str, _LIMITS))}", "Pass one of them.")
    experts = x.shape[0] if starts is None else counts.numel()
    check_counts(counts, starts, experts)
    same_device(x, counts=counts, starts=starts)
    target = target_of(x.device)
    if quantize_to in FP8:
        check_fp8(target, x.device)
    n = x.shape[-1] // form.parts
    out = x.new_empty((*x.shape[:-1], n), dtype=quantize_to or x.dtype)
    scale = None if quantize_to is None else x.new_empty(x.shape[:-1], dtype=torch.float32)
    if x.numel() == 0 or experts == 0:
        return out, scale
    tiles = row_tiles_for(target, form.name)
    batched = starts is None
    activate_kernel[(processors(x.device) * tiles.programs,)](
        x,
        out,
        scale,
        counts,
        starts,
        experts,
        x.shape[-2],
        n,
        x.stride(0) if batched else 0,
        x.stride(-2),
        1 if form.interleaved else n,
        out.stride(0) if batched else 0,
        out.stride(-2),
        x.shape[-2] if batched else 0,
        1.0 if quantize_to is None else _LIMITS[quantize_to],
        STEP=2 if form.interleaved else 1,
        PARTS=form.parts,
        ACTIVATION=form.name,
        INTEGER=quantize_to == torch.int8,
        ROWS=tiles.rows,
        COLUMNS=tiles.columns,
        E_BLOCK=max(16, triton.next_power_of_2(experts)),
        SCAN=tiles.scan,
    )
    return out, scale
