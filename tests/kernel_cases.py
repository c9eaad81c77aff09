"""Inputs and expectations shared by the kernel tests on the CPU (interpreter) and on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_ascend_moe.experts.activation import activate, is_gated
from vllm_ascend_moe.experts.base import ExpertWeights
from vllm_ascend_moe.experts.reference import ReferenceExperts

UNTOUCHED = 7.0  # what results hold before a kernel writes them
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1.5e-3, torch.bfloat16: 8e-3}


@dataclass(frozen=True)
class BatchedCase:
    """Rows past the counts are NaN, so that any use of them shows."""

    hidden: torch.Tensor  # [E_l, rows, H]
    counts: torch.Tensor  # int32 [E_l]
    weights: ExpertWeights
    activation: str

    def own(self) -> torch.Tensor:
        """bool [E_l, rows]: the rows that belong to an expert."""
        return torch.arange(self.hidden.shape[1], device=self.counts.device) < self.counts[:, None]


def expert_weights(
    experts: int,
    hidden: int,
    inner: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    activation: str = "silu",
    bias: bool = False,
    seed: int = 0,
) -> ExpertWeights:
    generator = torch.Generator(device=device).manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    rows = inner * (2 if is_gated(activation) else 1)
    return ExpertWeights(
        w13=(random(experts, rows, hidden) * hidden**-0.5).to(dtype),
        w2=(random(experts, hidden, inner) * inner**-0.5).to(dtype),
        w13_bias=random(experts, rows).to(dtype) if bias else None,
        w2_bias=random(experts, hidden).to(dtype) if bias else None,
    )


def batched_case(
    counts: list[int],
    rows: int,
    hidden: int,
    inner: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    activation: str = "silu",
    bias: bool = False,
    seed: int = 0,
) -> BatchedCase:
    generator = torch.Generator(device=device).manual_seed(seed + 1)
    x = torch.randn((len(counts), rows, hidden), generator=generator, device=device).to(dtype)
    for expert, count in enumerate(counts):
        x[expert, count:] = float("nan")
    weights = expert_weights(
        len(counts), hidden, inner, dtype=dtype, device=device, activation=activation, bias=bias, seed=seed
    )
    return BatchedCase(x, torch.tensor(counts, dtype=torch.int32, device=device), weights, activation)


def reference(case: BatchedCase, scales: torch.Tensor | None = None) -> torch.Tensor:
    """fp32 [own rows, H]."""
    hidden = case.hidden if scales is not None else case.hidden.float()
    out = torch.zeros(case.hidden.shape, device=case.hidden.device)
    ReferenceExperts().apply_batched(
        hidden, case.counts, case.weights, activation=case.activation, scales=scales, out=out
    )
    return out[case.own()]


def gemm_reference(a: torch.Tensor, w: torch.Tensor, activation: str, bias: torch.Tensor | None = None) -> torch.Tensor:
    """fp32 of one expert: [count, K] x [N, K]^T."""
    y = a.float() @ w.float().T
    if bias is not None:
        y = y + bias.float()
    return y if activation == "none" else activate(y, activation)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """||actual - expected|| / ||expected||, inf where anything is not finite; 0 for empty tensors."""
    if expected.numel() == 0:
        return 0.0
    difference = (actual.double() - expected.double()).norm()
    error = (difference / expected.double().norm().clamp(min=1e-12)).item()
    return error if error == error else float("inf")


def filled(shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    return torch.full(shape, UNTOUCHED, dtype=dtype, device=device)
