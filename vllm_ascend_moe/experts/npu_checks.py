"""What NPU experts can take, checked before the first operator."""

from __future__ import annotations

import torch

from vllm_ascend_moe.errors import DtypeError, ShapeError
from vllm_ascend_moe.experts.activation import check_activation, is_gated
from vllm_ascend_moe.experts.base import ExpertWeights
from vllm_ascend_moe.experts.scaled import ScaledExpertWeights

_FLOATING = (torch.bfloat16, torch.float16, torch.float32)
_W8A8 = (torch.bfloat16, torch.float16)  # what comes out of an int8 product, and what npu_dynamic_quant takes


def result_dtype(
    hidden: torch.Tensor, weights: ExpertWeights, scales: torch.Tensor | None, out: torch.Tensor | None
) -> torch.dtype:
    """What is computed in between the products, and returned. Raises DtypeError where dtypes do not fit."""
    quantized = isinstance(weights, ScaledExpertWeights)
    if quantized != (weights.w13.dtype == torch.int8) or weights.w13.dtype not in (torch.int8, *_FLOATING):
        raise DtypeError(
            "weights.w13.dtype",
            weights.w13.dtype,
            "int8 in ScaledExpertWeights, or bf16, fp16 or fp32 in ExpertWeights",
            "Convert the weights.",
        )
    if (scales is not None) != (hidden.dtype == torch.int8):
        raise DtypeError("hidden.dtype", hidden.dtype, "int8 with scales, floating without", "Pass both or neither.")
    if scales is None:
        allowed: tuple[torch.dtype, ...] = _W8A8 if quantized else (weights.w13.dtype,)
        if hidden.dtype not in allowed:
            raise DtypeError("hidden.dtype", hidden.dtype, f"one of {allowed} with these weights", "Cast hidden.")
        return hidden.dtype
    if not quantized:
        return weights.w13.dtype
    return out.dtype if out is not None and out.dtype in _W8A8 else torch.bfloat16


def check_shapes(hidden: torch.Tensor, weights: ExpertWeights, activation: str) -> None:
    """Raises ShapeError or InvalidValueError where shapes or the activation do not fit the weights."""
    check_activation(activation)
    num_experts, hidden_size, inner = weights.w2.shape
    rows = 2 * inner if is_gated(activation) else inner
    for name, got, want in (
        ("hidden.shape[-1]", hidden.shape[-1], hidden_size),
        ("weights.w13.shape", tuple(weights.w13.shape), (num_experts, rows, hidden_size)),
    ):
        if got != want:
            raise ShapeError(name, got, f"{want}, with w2 {tuple(weights.w2.shape)}, {activation}", "Pass what fits.")
