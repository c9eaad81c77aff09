"""Batched experts in Triton: NVIDIA GPUs and Ascend NPUs, torch and triton alone.

Import this module only where triton is installed (a MissingDependencyError says so otherwise).
"""

from __future__ import annotations

import torch

from vllm_ascend_moe.experts.base import ExpertWeights
from vllm_ascend_moe.experts.triton_mlp import TABLE, MlpTiles, expert_mlp_rows


class TritonBatchedExperts:
    """Experts of the batched format: time follows the real rows, not the capacity, and the host never waits.

    Args:
        expected_rows: about how many rows an expert will have, where the caller knows (tokens * top-k / experts). Only
            speed depends on it.
        tiles: of the two GEMMs, as ``triton_tune.fastest_mlp_tiles`` finds them; the table's by default.
    """

    def __init__(self, expected_rows: int | None = None, tiles: MlpTiles = TABLE) -> None:
        self.expected_rows, self.tiles = expected_rows, tiles

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
        """See :class:`~vllm_ascend_moe.experts.base.BatchedExperts`. ``weights`` may also be ScaledExpertWeights.

        Raises:
            ShapeError: shapes, strides or dtypes that do not fit. InvalidValueError: an unknown activation.
            UnsupportedError: a device Triton does not run on.
        """
        return expert_mlp_rows(
            hidden,
            expert_num_tokens,
            weights,
            activation=activation,
            scales=scales,
            expected_rows=self.expected_rows,
            tiles=self.tiles,
            out=out,
        )
