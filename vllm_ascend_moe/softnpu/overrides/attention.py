"""Matrix products of the ``atb::`` namespace that attention layers and warm-ups use."""

from __future__ import annotations

import torch

from vllm_ascend_moe.softnpu.overrides.emulate import emulate


def _matmul_add_fp32(x: torch.Tensor, weight: torch.Tensor, C: torch.Tensor) -> None:
    """C += x^T weight, in float32; x is [K, M], weight [K, N], of float16 or bfloat16."""
    if C.dtype != torch.float32 or x.dtype != weight.dtype or x.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(
            f"atb::_npu_matmul_add_fp32: x is {x.dtype}, weight is {weight.dtype}, C is {C.dtype}; wanted float16 or "
            "bfloat16 twice, and float32"
        )
    C.addmm_(x.float().t(), weight.float())


def install() -> None:
    """Registers the kernels."""
    emulate("atb::_npu_matmul_add_fp32", _matmul_add_fp32)
