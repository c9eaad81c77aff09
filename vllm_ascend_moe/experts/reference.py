"""The plain reference: slow, obvious, fp32 (or wider) throughout. Every kernel is tested against it."""

from __future__ import annotations

import torch

from vllm_ascend_moe.experts.activation import activate
from vllm_ascend_moe.experts.base import ExpertWeights
from vllm_ascend_moe.experts.checks import check_batched, check_routing, counts_on_host


def local_slots(topk_ids: torch.Tensor, expert_map: torch.Tensor | None, num_local: int) -> torch.Tensor:
    """Which local expert each chosen id is.

    Args:
        topk_ids: integer tensor of any shape, global ids (local ids where ``expert_map`` is None).
        expert_map: [E] global id -> local slot or -1, or None.
        num_local: E_l.

    Returns:
        int64, same shape: 0..E_l-1, or -1 for an id that is out of range, not routed or another rank's.
    """
    ids = topk_ids.to(torch.int64)
    limit = num_local if expert_map is None else expert_map.numel()
    in_range = (ids >= 0) & (ids < limit)
    # An index of -1 would silently read the last entry, so ids are masked before the look-up.
    safe = torch.where(in_range, ids, 0)
    if expert_map is not None and limit:
        safe = expert_map.to(torch.int64)[safe]
    return torch.where(in_range & (safe >= 0) & (safe < num_local), safe, -1)


def expert_mlp(x: torch.Tensor, weights: ExpertWeights, expert: int, activation: str) -> torch.Tensor:
    """One expert's MLP: [n, H] -> [n, H], in the dtype of ``x`` (weights are cast to it)."""
    dtype = x.dtype
    h = x @ weights.w13[expert].to(dtype).T
    if weights.w13_bias is not None:
        h = h + weights.w13_bias[expert].to(dtype)
    y = activate(h, activation) @ weights.w2[expert].to(dtype).T
    if weights.w2_bias is not None:
        y = y + weights.w2_bias[expert].to(dtype)
    return y


class ReferenceExperts:
    """Both formats, one expert at a time, in fp32 (fp64 for fp64 inputs); the result is cast to the input's dtype."""

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
        """See :class:`~vllm_ascend_moe.experts.base.RowsExperts`."""
        check_routing(hidden, topk_weights, topk_ids)
        wide = torch.promote_types(hidden.dtype, torch.float32)
        slots = local_slots(topk_ids, expert_map, weights.w13.shape[0])
        total = torch.zeros(hidden.shape, dtype=wide, device=hidden.device)
        for expert in range(weights.w13.shape[0]):
            rows, choice = torch.nonzero(slots == expert, as_tuple=True)
            y = expert_mlp(hidden[rows].to(wide), weights, expert, activation)
            if not apply_router_weight_on_input:
                y = y * topk_weights[rows, choice].to(wide)[:, None]
            total.index_add_(0, rows, y)
        if out is None:
            return total.to(hidden.dtype)
        return out.copy_(total)

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
        """See :class:`~vllm_ascend_moe.experts.base.BatchedExperts`; rows past the count keep what ``out`` held.

        Raises:
            ShapeError: shapes that do not fit together. InvalidValueError: counts below 0 or above the rows.
        """
        check_batched(hidden, expert_num_tokens, scales, weights.w13.shape[0])
        if out is None:
            dtype = weights.w13.dtype if scales is not None else hidden.dtype
            out = torch.full(hidden.shape, float("nan"), dtype=dtype, device=hidden.device)
        wide = torch.promote_types(out.dtype, torch.float32)
        for expert, count in enumerate(counts_on_host(expert_num_tokens, hidden.shape[1])):
            x = hidden[expert, :count].to(wide)
            if scales is not None:
                x = x * scales[expert, :count, None].to(wide)
            out[expert, :count] = expert_mlp(x, weights, expert, activation).to(out.dtype)
        return out
