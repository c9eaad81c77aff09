"""Rows experts in Triton: rows sorted by expert, a grouped GEMM over the ragged groups, and the weighted sum back.

Import this module only where triton is installed (a MissingDependencyError says so otherwise).
"""

from __future__ import annotations

import torch

from vllm_ascend_moe.experts.base import ExpertWeights
from vllm_ascend_moe.experts.triton_mlp import TABLE, MlpTiles, expert_mlp_rows
from vllm_ascend_moe.kernels.combine import combine
from vllm_ascend_moe.kernels.permute import permute_rows, plan_permutation


class TritonRowsExperts:
    """Experts of the rows format. Pad rows, unrouted ids and other ranks' experts are never copied or computed.

    Args:
        tiles: of the two GEMMs, as ``triton_tune.fastest_mlp_tiles`` finds them; the table's by default.
    """

    def __init__(self, tiles: MlpTiles = TABLE) -> None:
        self.tiles = tiles

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
        """See :class:`~vllm_ascend_moe.experts.base.RowsExperts`. ``weights`` may also be ScaledExpertWeights.

        Raises:
            ShapeError: shapes, strides or dtypes that do not fit. InvalidValueError: an unknown activation.
            UnsupportedError: a device Triton does not run on.
        """
        plan = plan_permutation(topk_ids, weights.w13.shape[0], expert_map)
        rows, _ = permute_rows(hidden, plan)
        # Choices spread over all experts, of which these are a part.
        experts = weights.w13.shape[0] if expert_map is None else expert_map.numel()
        expected = topk_ids.numel() // max(experts, 1)
        y = expert_mlp_rows(
            rows,
            plan.counts,
            weights,
            starts=plan.starts,
            activation=activation,
            expected_rows=expected,
            tiles=self.tiles,
        )
        factors = None if apply_router_weight_on_input else topk_weights.to(torch.float32)
        if out is None:
            out = torch.empty_like(hidden, memory_format=torch.contiguous_format)
        return combine(y, plan.positions, factors, out=out)
