"""vllm-ascend's own norm, ``_C_ascend::npu_add_rms_norm_bias``."""

from __future__ import annotations

import torch

from vllm_ascend_moe.softnpu.overrides.emulate import emulate_undefined

_SCHEMA = (
    "(Tensor x1, Tensor x2, Tensor gamma, Tensor? beta=None, float epsilon=1e-6) -> (Tensor y, Tensor rstd, Tensor x)"
)

Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _add_rms_norm_bias(
    x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor | None = None, epsilon: float = 1e-6
) -> Three:
    """x = x1 + x2; y = x / rms(x) * gamma + beta, with the roundings of vllm-ascend's kernel.

    Returns y and x, like x1, and 1 / rms(x), float, with ones for the dimensions of gamma.
    """
    if x1.shape != x2.shape or x1.dtype != x2.dtype or x1.shape[x1.dim() - gamma.dim() :] != gamma.shape:
        raise ValueError(
            f"_C_ascend::npu_add_rms_norm_bias: x1 {x1.dtype} {tuple(x1.shape)}, x2 {x2.dtype} {tuple(x2.shape)} and "
            f"gamma {tuple(gamma.shape)} do not fit"
        )
    wide = torch.float32 if x1.dtype == torch.bfloat16 else x1.dtype  # what bfloat16 is computed in
    total = x1.to(wide) + x2.to(wide)
    dims = list(range(x1.dim() - gamma.dim(), x1.dim()))
    rstd = total.float().square().mean(dims, keepdim=True).add(epsilon).rsqrt()
    y = (total.float() * rstd).to(x1.dtype).to(wide) * gamma.to(wide)
    if beta is not None:
        y = y + beta.to(wide)
    return y.to(x1.dtype), rstd, total.to(x1.dtype)


def install() -> None:
    """Registers the kernel."""
    emulate_undefined("_C_ascend::npu_add_rms_norm_bias", _SCHEMA, _add_rms_norm_bias)
