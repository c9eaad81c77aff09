"""The expert MLP in Triton, for batched and for ragged rows: two GEMM launches, the first with the activation."""

from __future__ import annotations

from typing import NamedTuple

import torch

from vllm_ascend_moe.errors import ShapeError
from vllm_ascend_moe.experts.activation import check_activation
from vllm_ascend_moe.experts.base import ExpertWeights
from vllm_ascend_moe.experts.scaled import ScaledExpertWeights
from vllm_ascend_moe.kernels.launch import expert_gemm
from vllm_ascend_moe.kernels.quantize import activate_rows
from vllm_ascend_moe.kernels.tiles import GemmTiles


class MlpTiles(NamedTuple):
    """Tiles of the two GEMMs; None: those of the table."""

    w13: GemmTiles | None = None
    w2: GemmTiles | None = None


TABLE = MlpTiles()


def expert_mlp_rows(
    hidden: torch.Tensor,
    counts: torch.Tensor,
    weights: ExpertWeights,
    *,
    starts: torch.Tensor | None = None,
    activation: str = "silu",
    scales: torch.Tensor | None = None,
    expected_rows: int | None = None,
    tiles: MlpTiles = TABLE,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``activation(x @ w13^T + b13) @ w2^T + b2`` for every expert's own rows. Rows past the counts stay untouched.

    Args:
        hidden: [E_l, rows, H], or [total, H] with ``starts``; with ``scales`` int8 or fp8.
        counts: int32 [E_l]; starts: int32 [E_l], each expert's first row, or None.
        weights: floating, or ScaledExpertWeights: then rows are quantised too, each with its own scale.
        activation: a name of ``experts.activation.ACTIVATIONS``.
        scales: fp32 [E_l, rows] or [total].
        expected_rows: about how many rows an expert will have, where the host knows; only speed depends on it.
        tiles: of the GEMMs, as ``triton_tune.fastest_mlp_tiles`` finds them.
        out: same shape as hidden, floating; None: a new tensor.

    Returns:
        ``out``.

    Raises:
        ShapeError: operands that do not fit. InvalidValueError: an unknown activation, or operands that are not on the
        current device. TilesError: ``tiles`` that the operands cannot have. UnsupportedError: see expert_gemm.
    """
    check_activation(activation)
    scaled = weights if isinstance(weights, ScaledExpertWeights) else None
    if scaled is None and weights.w13.dtype.itemsize == 1:
        raise ShapeError("weights.w13.dtype", weights.w13.dtype, "floating", "Pass ScaledExpertWeights.")
    if scales is not None and hidden.dtype.itemsize > 1:
        raise ShapeError("hidden.dtype", hidden.dtype, "int8 or fp8 where scales are given", "Pass no scales.")
    dtype = _result_dtype(hidden, weights, out)
    if scaled is not None and hidden.dtype != weights.w13.dtype:
        if scales is not None:
            raise ShapeError("hidden.dtype", hidden.dtype, f"{weights.w13.dtype}, as the weights", "Requantise it.")
        hidden, scales = activate_rows(hidden, counts, starts=starts, activation="none", quantize_to=weights.w13.dtype)
    middle = expert_gemm(
        hidden,
        weights.w13,
        counts,
        starts=starts,
        activation=activation,
        a_scale=scales,
        w_scale=None if scaled is None else scaled.w13_scale,
        bias=weights.w13_bias,
        out_dtype=dtype,
        expected_rows=expected_rows,
        tiles=tiles.w13,
    )
    middle_scale = None
    if scaled is not None:
        middle, middle_scale = activate_rows(
            middle, counts, starts=starts, activation="none", quantize_to=weights.w2.dtype
        )
    return expert_gemm(
        middle,
        weights.w2,
        counts,
        starts=starts,
        a_scale=middle_scale,
        w_scale=None if scaled is None else scaled.w2_scale,
        bias=weights.w2_bias,
        out=out,
        out_dtype=dtype,
        expected_rows=expected_rows,
        tiles=tiles.w2,
    )


def _result_dtype(hidden: torch.Tensor, weights: ExpertWeights, out: torch.Tensor | None) -> torch.dtype:
    """Of the result and of what lies between the GEMMs: the first 16-bit or wider type among hidden, w13 and out."""
    for dtype in (hidden.dtype, weights.w13.dtype, None if out is None else out.dtype):
        if dtype is not None and dtype.itemsize > 1:
            return dtype
    return torch.bfloat16
