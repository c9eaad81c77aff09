"""The contract of expert kernels, for both activation formats.

Symbols: rows tokens (padded ones included); H hidden size; N expert intermediate size; K top-k; E experts, global;
E_l experts on this rank. Gated activations read w13 as [gate; up] halves of 2N rows ("swigluoai": interleaved);
activations whose name ends in ``_no_mul`` have N rows. Pad rows, ids outside [0, E) and experts that live on other
ranks cost no computation and add exactly 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, kw_only=True)
class ExpertWeights:
    """Weights of this rank's experts."""

    w13: torch.Tensor  # [E_l, 2N or N, H]
    w2: torch.Tensor  # [E_l, H, N]
    w13_bias: torch.Tensor | None = None  # [E_l, 2N or N]
    w2_bias: torch.Tensor | None = None  # [E_l, H]


class RowsExperts(Protocol):
    """Experts of the rows format: each row's weighted sum over the experts it chose that live here."""

    def apply(
        self,
        hidden: torch.Tensor,  # [rows, H]; rows may be strided, a row is contiguous
        topk_weights: torch.Tensor,  # fp32 [rows, K]
        topk_ids: torch.Tensor,  # int32 or int64 [rows, K], global ids
        weights: ExpertWeights,
        *,
        expert_map: torch.Tensor | None = None,  # int32 [E], global id -> local slot or -1; None: ids are local
        activation: str = "silu",
        apply_router_weight_on_input: bool = False,  # the weights already multiply hidden: do not multiply again
        out: torch.Tensor | None = None,  # [rows, H], every row is written (0 where nothing is routed)
    ) -> torch.Tensor: ...


class BatchedExperts(Protocol):
    """Experts of the batched format: unweighted outputs, expert by expert."""

    def apply_batched(
        self,
        hidden: torch.Tensor,  # [E_l, rows, H]
        expert_num_tokens: torch.Tensor,  # int32 [E_l]; rows at and past the count are never read nor written
        weights: ExpertWeights,
        *,
        activation: str = "silu",
        scales: torch.Tensor | None = None,  # fp32 [E_l, rows] of a quantised payload
        out: torch.Tensor | None = None,  # [E_l, rows, H]
    ) -> torch.Tensor: ...
