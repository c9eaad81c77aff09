"""What the fused strategy can take, checked when it is made: from what all ranks share, so alike on every rank.

Symbols: R ranks; K top-k; E_l local experts; H hidden size; A rows that may arrive on a rank.
"""

from __future__ import annotations

import os

from vllm_ascend_moe.errors import CapacityError, ConfigError, PlacementError, ShapeError
from vllm_ascend_moe.placement import ExpertPlacement

MAX_TOKENS, MAX_TOP_K, MAX_EXPERTS, MAX_HIDDEN, HIDDEN_UNIT = 512, 16, 1024, 10240, 32
_MIB = 1 << 20
_DEFAULT_BUFFER_MIB = 200  # of HCCL, where HCCL_BUFFSIZE is not set


def buffer_mib_needed(max_tokens: int, ranks: int, local_experts: int, top_k: int, hidden_size: int) -> int:
    """HCCL_BUFFSIZE in MiB that the operators need on Atlas A2: two buffers of A rows of 16-bit values and 2 MiB.

    >>> buffer_mib_needed(128, 16, 16, 8, 7168)
    452
    """
    rows = max_tokens * ranks * min(local_experts, top_k)
    return -(-2 * (rows * hidden_size * 2 + 2 * _MIB) // _MIB)


def check_sizes(placement: ExpertPlacement, max_tokens: int, hidden_size: int, top_k: int) -> None:
    """Raises what :class:`~vllm_ascend_moe.comm.mc2.MC2` says."""
    ranks, experts = placement.ep_size, placement.num_experts
    counts = set(placement.local_counts)
    if ranks < 2 or len(counts) != 1 or not 0 < experts <= MAX_EXPERTS or experts % ranks:
        raise PlacementError(
            "experts by rank",
            list(placement.local_counts),
            f"equal, on 2 or more ranks, {MAX_EXPERTS} in all at most",
            "Use all_to_all, which takes any placement.",
        )
    if not 1 <= max_tokens <= MAX_TOKENS:
        raise CapacityError("max_tokens", max_tokens, f"1 to {MAX_TOKENS}", "Use all_to_all for larger steps.")
    if not 1 <= top_k <= min(MAX_TOP_K, experts):
        raise ShapeError("top_k", top_k, f"1 to {min(MAX_TOP_K, experts)}", "Use another strategy.")
    if hidden_size % HIDDEN_UNIT or not 0 < hidden_size <= MAX_HIDDEN:
        raise ShapeError(
            "hidden_size", hidden_size, f"a multiple of {HIDDEN_UNIT} up to {MAX_HIDDEN}", "Use another strategy."
        )
    needed = buffer_mib_needed(max_tokens, ranks, experts // ranks, top_k, hidden_size)
    text = os.environ.get("HCCL_BUFFSIZE", str(_DEFAULT_BUFFER_MIB))
    if not text.isdecimal() or int(text) < needed:
        raise ConfigError(
            "HCCL_BUFFSIZE",
            text,
            f"at least {needed} (MiB) for {max_tokens} tokens on each of {ranks} ranks",
            f"Set HCCL_BUFFSIZE={needed} on every rank, or lower max_tokens.",
        )
