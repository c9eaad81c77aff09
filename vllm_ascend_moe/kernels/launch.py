"""expert_gemm(): checks the operands, describes them to the kernel and launches it. No host synchronisation."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from vllm_ascend_moe.kernels.descriptors import describable, results_view, rows_view, storable, weights_view
from vllm_ascend_moe.kernels.gemm import expert_gemm_kernel
from vllm_ascend_moe.kernels.operands import FP8, ActivationForm, Operands, activation_form, check_operands
from vllm_ascend_moe.kernels.targets import check_fp8, interpreted, processors, target_of
from vllm_ascend_moe.kernels.tiles import SMALLEST, GemmTiles, TilesError, tiles_for, without_tma


def expert_gemm(
    a: torch.Tensor,
    w: torch.Tensor,
    counts: torch.Tensor,
    *,
    starts: torch.Tensor | None = None,
    activation: str = "none",
    a_scale: torch.Tensor | None = None,
    w_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    expected_rows: int | None = None,
    tiles: GemmTiles | None = None,
) -> torch.Tensor:
    """``activation(a @ w^T * a_scale * w_scale + bias)`` for every expert's own rows, in one launch.

    Args:
        a: [E_l, rows, K], or [total, K] with ``starts``; a row is contiguous. bf16, fp16, fp32, int8, fp8.
        w: [E_l, N, K], or [E_l, 2N, K] for a gated activation; K contiguous. The dtype of a, or a wider floating
            type (a quantised payload against full weights).
        counts: int32 [E_l], rows of each expert. Rows at and past the count are neither read nor written.
        starts: int32 [E_l], each expert's first row of a ragged ``a``, within which every group must end: that is not
            checked, since the host would have to wait for the numbers.
        activation: a name of ACTIVATION_FORMS.
        a_scale: fp32 [E_l, rows] or [total], one per row; w_scale: fp32 [E_l, N or 2N], one per weight row.
        bias: [E_l, N or 2N], floating.
        out: [E_l, rows, N] or [total, N]; a row is contiguous. None: a new, uninitialised tensor.
        out_dtype: of a new tensor; None: w's dtype, bf16 for int8 and fp8 weights.
        expected_rows: about how many rows an expert will have, where the host knows; only speed depends on it.
        tiles: instead of the table's (see ``tune.fastest_tiles``).

    Returns:
        ``out``.

    Raises:
        ShapeError: shapes, strides or dtypes that do not fit. InvalidValueError: an unknown activation, or operands
        that are not on the current device. TilesError: ``tiles`` that these operands cannot have. UnsupportedError: a
        device Triton does not run on, or fp8 on hardware without it.
    """
    form = activation_form(activation)
    check_operands(a, w, counts, starts, a_scale, w_scale, bias, form)
    if out is None:
        shape = (*a.shape[:-1], w.shape[1] // form.parts)
        out = a.new_empty(shape, dtype=out_dtype or (w.dtype if w.dtype.itemsize > 1 else torch.bfloat16))
    operands = Operands.of(a, w, out, form, batched=starts is None)
    if operands.is_empty:
        return out
    target = target_of(a.device)
    if a.dtype in FP8 or w.dtype in FP8:
        check_fp8(target, a.device)
    if tiles is None:
        # The largest tile has no room for results wider than its weights.
        hint = expected_rows if out.element_size() <= w.element_size() else None
        weight_rows, programs = w.shape[0] * w.shape[1], processors(a.device)
        tiles = tiles_for(target, w.dtype, weight_rows, operands.k, programs, hint, form.name, form.parts)
        if tiles.tma and not describable(a, w, operands):
            tiles = without_tma(target, w.dtype)
    else:
        _check_tiles(tiles, a, w, operands)
    _launch(a, w, out, counts, starts, a_scale, w_scale, bias, form, operands, tiles)
    return out


def _check_tiles(tiles: GemmTiles, a: torch.Tensor, w: torch.Tensor, op: Operands) -> None:
    """Raises TilesError for tiles that these operands cannot have."""
    if tiles.tma and not describable(a, w, op):
        limit = "False for operands whose addresses or strides tensor descriptors cannot hold"
        raise TilesError("tiles.tma", True, limit, "Pass other tiles, or none, or contiguous operands.")
    for name, columns in (("block_n", tiles.block_n), ("few_n", tiles.few_n)):
        if columns // op.parts < SMALLEST:
            limit = f"{SMALLEST * op.parts} or more for {op.parts} parts"
            raise TilesError(f"tiles.{name}", columns, limit, "Pass wider tiles for a gated activation.")


def _launch(
    a: torch.Tensor,
    w: torch.Tensor,
    out: torch.Tensor,
    counts: torch.Tensor,
    starts: torch.Tensor | None,
    a_scale: torch.Tensor | None,
    w_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    form: ActivationForm,
    op: Operands,
    tiles: GemmTiles,
) -> None:
    parts = form.parts
    a_many, w_many, w_half, w_few = _inputs(a, w, op, tiles)
    integer = a.dtype == torch.int8 and w.dtype == torch.int8
    programs = processors(a.device) * tiles.programs
    width = min(tiles.store_n, tiles.block_n // parts)
    pieces = tiles.block_n // parts // width if tiles.tma and width and storable(out, w, op) else 0
    early = tiles.early and not interpreted()
    expert_gemm_kernel[(programs,)](
        a_many,
        w_many,
        out,
        results_view(out, op, tiles.block_m, width) if pieces else None,
        a,
        w_half,
        w_few,
        counts,
        starts,
        a_scale,
        w_scale,
        bias,
        op.experts,
        op.capacity,
        op.n,
        op.k,
        op.a_pitch,
        op.c_pitch,
        op.stride_ae,
        op.stride_am,
        op.stride_be,
        op.stride_bp,
        op.stride_bn,
        op.stride_ce,
        op.stride_cm,
        0 if a_scale is None or starts is not None else a_scale.stride(0),
        op.stride_vp,
        PROGRAMS=programs,
        E_BLOCK=max(4, triton.next_power_of_2(op.experts)),
        SCAN=tiles.scan,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n // parts,
        BLOCK_K=tiles.block_k,
        GROUP_M=tiles.group_m,
        STAGES=tiles.stages,
        HALVES=tiles.halves,
        FEW_M=tiles.few_m,
        FEW_N=tiles.few_n // parts,
        FEW_K=tiles.few_k,
        FEW_STAGES=tiles.few_stages,
        NARROW_STAGES=tiles.narrow_stages,
        STEP=op.step,
        PARTS=parts,
        ACTIVATION=form.name,
        ACC=tl.int32 if integer else tl.float32,
        IMPRECISE=128 if a.dtype in FP8 and w.dtype in FP8 else None,
        TMA=tiles.tma,
        # The interpreter holds bf16 and fp8 as raw bits, which it cannot multiply.
        WIDEN=interpreted() and not integer,
        PIECES=pieces,
        FLATTEN=tiles.tma and tiles.flatten,
        EARLY=early,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **({"launch_pdl": True} if early else {}),
    )


def _inputs(a: torch.Tensor, w: torch.Tensor, op: Operands, tiles: GemmTiles) -> tuple[Any, Any, Any, Any]:
    """a for many rows, w for many rows, half tiles and few rows: descriptors, or the tensors themselves."""
    if not tiles.tma:
        return a, w, w, w
    whole, half, few = (tiles.block_n, tiles.block_k), (tiles.block_n // 2, tiles.block_k), (tiles.few_n, tiles.few_k)
    if not tiles.halves:
        half = whole
    if not tiles.few_m:
        few = whole
    views = {block: weights_view(w, op, *block) for block in {whole, half, few}}
    return rows_view(a, op, tiles.block_m, tiles.block_k), views[whole], views[half], views[few]
