"""Experts in plain torch for any device and dtype: what runs where the native extension is not built.

Symbols: rows tokens; H hidden size; N expert intermediate size; K top-k; E_l experts on this rank.
"""

from __future__ import annotations

import torch

from vllm_ascend_moe.experts.base import ExpertWeights
from vllm_ascend_moe.experts.checks import check_batched, check_routing, counts_on_host
from vllm_ascend_moe.experts.reference import expert_mlp, local_slots


class TorchExperts:
    """Sorts the routed rows by expert once, then runs one MLP for each expert that has rows, in the rows' dtype."""

    def apply(
        self,
        hidden: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        weights: ExpertWeights,
        *,
        expert_map: torch.Tensor | None = None,
        activation: str = "silu",
        apply_router_weight_on_input: bool = False,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See :class:`~vllm_ascend_moe.experts.base.RowsExperts`. Reads the experts' row counts on the host."""
        check_routing(hidden, topk_weights, topk_ids)
        num_local, wide = weights.w13.shape[0], torch.promote_types(hidden.dtype, torch.float32)
        slots = local_slots(topk_ids, expert_map, num_local).flatten()
        order = torch.argsort(slots, stable=True)
        counts = torch.bincount(slots + 1, minlength=num_local + 1).tolist()
        total = torch.zeros(hidden.shape, dtype=wide, device=hidden.device)
        start = counts[0]  # pairs that are routed nowhere sort first
        for expert, count in enumerate(counts[1:]):
            if not count:
                continue
            pairs = order[start : start + count]
            start += count
            rows = pairs // max(1, topk_ids.shape[1])
            y = expert_mlp(hidden[rows], weights, expert, activation).to(wide)
            if not apply_router_weight_on_input:
                y = y * topk_weights.flatten()[pairs].to(wide)[:, None]
            total.index_add_(0, rows, y)
        return total.to(hidden.dtype) if out is None else out.copy_(total)

    def apply_batched(
        self,
        hidden: torch.Tensor,
        expert_num_tokens: torch.Tensor,
        weights: ExpertWeights,
        *,
        activation: str = "silu",
        scales: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See :class:`~vllm_ascend_moe.experts.base.BatchedExperts`. Rows past the count keep what ``out`` held.

        Raises:
            ShapeError: shapes that do not fit together. InvalidValueError: counts below 0 or above the rows.
        """
        check_batched(hidden, expert_num_tokens, scales, weights.w13.shape[0])
        if scales is not None:
            hidden = dequantize_rows(hidden, expert_num_tokens, scales, weights.w13.dtype)
        if out is None:
            out = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
        for expert, count in enumerate(counts_on_host(expert_num_tokens, hidden.shape[1])):
            if count:
                out[expert, :count] = expert_mlp(hidden[expert, :count], weights, expert, activation).to(out.dtype)
        return out


def dequantize_rows(
    hidden: torch.Tensor, expert_num_tokens: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """``hidden * scales`` in ``dtype``, for the experts' own rows alone: the others, most of them, stay unwritten.

    Args:
        hidden: [E_l, rows, H]; scales: fp32 [E_l, rows]; expert_num_tokens: [E_l], read on the host.
    """
    wide = torch.empty(hidden.shape, dtype=dtype, device=hidden.device)
    for expert, count in enumerate(counts_on_host(expert_num_tokens, hidden.shape[1])):
        wide[expert, :count] = hidden[expert, :count].to(torch.float32) * scales[expert, :count, None]
    return wide
