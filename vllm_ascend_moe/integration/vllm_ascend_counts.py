"""Tokens of each DP rank, from before vllm-ascend makes them equal.

With sequence parallelism vllm-ascend tells vLLM that every DP rank has the largest rank's number of tokens, so that its
MoE layers would take the pad rows for tokens. All ranks have agreed on the true counts a moment earlier; they are kept
as an attribute of the tensor that becomes the forward's metadata.
"""

from __future__ import annotations

from functools import wraps
from inspect import signature
from typing import Any

import torch

_ATTRIBUTE = "ascend_moe_tokens"


def keep_counts(runner: type) -> None:
    """Wraps the model runner's agreement on token counts; it returns exactly what it did."""
    real = runner._sync_metadata_across_dp  # type: ignore[attr-defined]

    parameters = signature(real)

    @wraps(real)
    def agree(*args: Any, **kwargs: Any) -> tuple[int, torch.Tensor | None, Any]:
        call = parameters.bind(*args, **kwargs)
        call.apply_defaults()
        if not call.arguments["allow_dp_padding"]:
            return real(*args, **kwargs)
        call.arguments["allow_dp_padding"] = False
        largest, counts, mode = real(*call.args, **call.kwargs)
        if counts is None:
            return largest, counts, mode
        padded = torch.full_like(counts, largest)
        setattr(padded, _ATTRIBUTE, counts.tolist())
        return largest, padded, mode

    runner._sync_metadata_across_dp = agree  # type: ignore[attr-defined]


def tokens_across_dp(reported: torch.Tensor, padded_length: int, tp_size: int) -> list[int]:
    """Tokens of each DP rank: the true counts where they are known and lead to ``padded_length``, else those reported.

    They do not where a graph's size, or a dummy run, has made all ranks larger still.
    """
    true: list[int] | None = getattr(reported, _ATTRIBUTE, None)
    if true is not None and -(-max(true) // tp_size) * tp_size == padded_length:
        return true
    return reported.tolist()
