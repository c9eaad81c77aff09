"""Checks of inputs that every kernel of the rows format makes."""

from __future__ import annotations

import torch

from vllm_ascend_moe.errors import ShapeError


def check_routing(hidden: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> None:
    """Raises ShapeError where ids and weights are not [rows, K] for the same rows as ``hidden`` [rows, H]."""
    if topk_ids.shape != topk_weights.shape or topk_ids.shape[:1] != hidden.shape[:1]:
        raise ShapeError(
            "topk_ids.shape",
            tuple(topk_ids.shape),
            f"[{hidden.shape[0]}, K], as topk_weights {tuple(topk_weights.shape)}",
            "Pass one row of ids and weights for each row of hidden.",
        )
