"""Checks of inputs that kernels of either format make."""

from __future__ import annotations

import torch

from vllm_ascend_moe.errors import InvalidValueError, ShapeError


def check_routing(hidden: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> None:
    """Raises ShapeError where ids and weights are not [rows, K] for the same rows as ``hidden`` [rows, H]."""
    if topk_ids.shape != topk_weights.shape or topk_ids.shape[:1] != hidden.shape[:1]:
        raise ShapeError(
            "topk_ids.shape",
            tuple(topk_ids.shape),
            f"[{hidden.shape[0]}, K], as topk_weights {tuple(topk_weights.shape)}",
            "Pass one row of ids and weights for each row of hidden.",
        )


def check_batched(
    hidden: torch.Tensor, expert_num_tokens: torch.Tensor, scales: torch.Tensor | None, num_local: int
) -> None:
    """Raises ShapeError unless hidden is [E_l, rows, H], counts are integers [E_l] and scales [E_l, rows]."""
    if hidden.dim() != 3 or hidden.shape[0] != num_local:
        wanted = f"[{num_local}, rows, H], one block of rows for each expert of the weights"
        raise ShapeError("hidden.shape", tuple(hidden.shape), wanted, "Pass such blocks.")
    counts = expert_num_tokens
    if counts.shape != (num_local,) or counts.dtype not in (torch.int32, torch.int64):
        given = f"{counts.dtype} {list(counts.shape)}"
        raise ShapeError("expert_num_tokens", given, f"int32 [{num_local}]", "Pass one number for each expert.")
    if scales is not None and scales.shape != hidden.shape[:2]:
        wanted = f"{list(hidden.shape[:2])}, one for each row of hidden"
        raise ShapeError("scales.shape", list(scales.shape), wanted, "Pass one scale for each row.")


def counts_on_host(expert_num_tokens: torch.Tensor, rows: int) -> list[int]:
    """The numbers, read on the host. Raises InvalidValueError for one that is negative or above ``rows``."""
    counts: list[int] = expert_num_tokens.tolist()
    for expert, count in enumerate(counts):
        if not 0 <= count <= rows:
            limit = f"from 0 to {rows}, the rows of an expert's block"
            raise InvalidValueError(f"expert_num_tokens[{expert}]", count, limit, "Make the blocks larger.")
    return counts
