"""What the tests of the native experts share: every kind there is on this processor, weights, the reference."""

from __future__ import annotations

import torch

from vllm_ascend_moe.experts.activation import is_gated
from vllm_ascend_moe.experts.base import ExpertWeights
from vllm_ascend_moe.experts.native import NATIVE_DTYPES, available_isas
from vllm_ascend_moe.experts.reference import ReferenceExperts

KINDS = [(dtype, isa) for dtype in NATIVE_DTYPES for isa in available_isas(dtype)]
KIND_IDS = [f"{str(dtype).removeprefix('torch.')}-{isa}" for dtype, isa in KINDS]
REFERENCE = ReferenceExperts()


def make_weights(experts, hidden, inner, dtype, activation="silu", bias=False) -> ExpertWeights:
    rows = 2 * inner if is_gated(activation) else inner
    return ExpertWeights(
        w13=(torch.randn(experts, rows, hidden) / hidden**0.5).to(dtype),
        w2=(torch.randn(experts, hidden, inner) / inner**0.5).to(dtype),
        w13_bias=torch.randn(experts, rows).to(dtype) if bias else None,
        w2_bias=torch.randn(experts, hidden).to(dtype) if bias else None,
    )


def copy_of(weights: ExpertWeights) -> ExpertWeights:
    return ExpertWeights(
        w13=weights.w13.clone(), w2=weights.w2.clone(), w13_bias=weights.w13_bias, w2_bias=weights.w2_bias
    )


def wide(weights: ExpertWeights) -> ExpertWeights:
    return ExpertWeights(
        **{name: None if (x := getattr(weights, name)) is None else x.float() for name in weights.__dataclass_fields__}
    )
