"""Expert weights in int8 or fp8 with one scale per output channel."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_ascend_moe.experts.base import ExpertWeights


@dataclass(frozen=True, kw_only=True)
class ScaledExpertWeights(ExpertWeights):
    """w13 and w2 are int8 or fp8; ``weight[e, n] * scale[e, n]`` is the weight row meant."""

    w13_scale: torch.Tensor  # fp32 [E_l, 2N or N]
    w2_scale: torch.Tensor  # fp32 [E_l, H]

    @staticmethod
    def quantize(weights: ExpertWeights, dtype: torch.dtype = torch.int8) -> ScaledExpertWeights:
        """Rounds floating weights to ``dtype`` (int8 or float8_e4m3fn), each row to its own largest value."""
        w13, w13_scale = _quantize_rows(weights.w13, dtype)
        w2, w2_scale = _quantize_rows(weights.w2, dtype)
        return ScaledExpertWeights(
            w13=w13,
            w2=w2,
            w13_scale=w13_scale,
            w2_scale=w2_scale,
            w13_bias=weights.w13_bias,
            w2_bias=weights.w2_bias,
        )

    def dequantize(self) -> ExpertWeights:
        """The weights meant, in fp32."""
        return ExpertWeights(
            w13=self.w13.float() * self.w13_scale[..., None],
            w2=self.w2.float() * self.w2_scale[..., None],
            w13_bias=self.w13_bias,
            w2_bias=self.w2_bias,
        )


def _quantize_rows(w: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    limit = 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
    scale = w.float().abs().amax(dim=-1).clamp(min=1e-20) / limit
    scaled = w.float() / scale[..., None]
    return (scaled.round() if dtype == torch.int8 else scaled).to(dtype), scale
