"""Test data as a pure function of (seed, global token id or global expert id).

Every rank can so compute any other rank's tokens, and the right answer, alone and without communication; and the
same token has the same values in whatever rank, batch or layout it appears.

Symbols: n tokens asked for; H hidden size; N expert intermediate size; K top-k; E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import torch

from vllm_ascend_moe.experts.base import ExpertWeights
from vllm_ascend_moe.layout import TokenLayout

# What a choice that is not routed may hold besides -1: other negatives, E itself, and a far id (added to E).
_INVALID_OFFSETS = (-1, -7, 0, 1000)


class Routing(Enum):
    """How tokens choose experts."""

    UNIFORM = "uniform"  # K distinct experts, all equally likely
    SKEWED = "skewed"  # K distinct experts, low ids far more likely than high ones
    ONE_EXPERT = "one_expert"  # every token chooses the last expert alone; its other choices are -1
    FIRST_EXPERTS = "first_experts"  # every token chooses experts 0..K-1
    NOWHERE = "nowhere"  # every choice is -1


def _hash_uniform(seed: int, stream: int, ids: torch.Tensor, columns: int) -> torch.Tensor:
    """float64 [n, columns] in [0, 1), the same for the same (seed, stream, id, column) on every machine."""
    grid = ids.to("cpu", torch.int64)[:, None] * 1_000_003 + torch.arange(columns)
    x = grid + (seed * 7919 + stream) * 0x9E3779B1
    for multiplier, shift in ((0x9E3779B97F4A7C15, 30), (0xBF58476D1CE4E5B9, 27), (0x94D049BB133111EB, 31)):
        # int64 wraps as the uint64 of splitmix64 does; the mask makes the shift a logical one.
        x = x * (multiplier - (1 << 64))
        x = x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))
    return ((x >> 11) & ((1 << 53) - 1)).to(torch.float64) / float(1 << 53)


def token_ids(layout: TokenLayout, rank: int) -> torch.Tensor:
    """int64 [T_rank]: global ids of a rank's tokens, which are numbered rank after rank."""
    start = sum(layout.local_sizes[:rank])
    return torch.arange(start, start + layout.local_sizes[rank])


def hidden_states(seed: int, tokens: torch.Tensor, hidden_size: int, dtype: torch.dtype) -> torch.Tensor:
    """[n, H] in [-1, 1)."""
    return (_hash_uniform(seed, 1, tokens, hidden_size) * 2 - 1).to(dtype)


def topk_ids(
    seed: int,
    tokens: torch.Tensor,
    top_k: int,
    num_experts: int,
    routing: Routing = Routing.UNIFORM,
    *,
    invalid_share: float = 0.0,
    dtype: torch.dtype = torch.int32,
) -> torch.Tensor:
    """[n, K]: the experts each token chooses.

    Args:
        invalid_share: this share of the choices is replaced by -1, other negatives, E, or ids far above.
    """
    n = tokens.numel()
    if routing in (Routing.UNIFORM, Routing.SKEWED):
        u = _hash_uniform(seed, 2, tokens, num_experts)
        # The K largest of u^(1/weight) are K draws without replacement, in proportion to the weights.
        weights = 1.0 / (1 + torch.arange(num_experts, dtype=torch.float64)) ** (2 if routing is Routing.SKEWED else 0)
        ids = (u.clamp(min=1e-300).log() / weights).topk(top_k, dim=1).indices
    elif routing is Routing.FIRST_EXPERTS:
        ids = torch.arange(top_k).expand(n, top_k).clone()
    else:
        ids = torch.full((n, top_k), -1)
        if routing is Routing.ONE_EXPERT:
            ids[:, 0] = num_experts - 1
    if invalid_share:
        u = _hash_uniform(seed, 3, tokens, 2 * top_k)
        offsets = torch.tensor(_INVALID_OFFSETS)
        invalid = offsets[(u[:, top_k:] * len(_INVALID_OFFSETS)).long()]
        invalid = torch.where(invalid >= 0, invalid + num_experts, invalid)
        ids = torch.where(u[:, :top_k] < invalid_share, invalid, ids)
    return ids.to(dtype)


def topk_weights(seed: int, tokens: torch.Tensor, top_k: int) -> torch.Tensor:
    """fp32 [n, K], each above 0; a token's weights sum to 1."""
    u = _hash_uniform(seed, 4, tokens, top_k) + 0.1
    return (u / u.sum(1, keepdim=True)).float()


def expert_weights(
    seed: int,
    experts: Sequence[int],
    hidden_size: int,
    intermediate_size: int,
    dtype: torch.dtype = torch.float32,
    *,
    gated: bool = True,
    bias: bool = False,
) -> ExpertWeights:
    """Weights of these global experts, in this order, scaled so that outputs are about as large as inputs.

    Returns:
        w13 [len(experts), 2N or N, H], w2 [len(experts), H, N], biases [len(experts), 2N or N] and [len(experts), H].
    """
    ids = torch.tensor(list(experts), dtype=torch.int64)
    up_rows = intermediate_size * (2 if gated else 1)

    def matrix(stream: int, rows: int, columns: int) -> torch.Tensor:
        u = _hash_uniform(seed, stream, ids, rows * columns).view(len(ids), rows, columns) * 2 - 1
        return (u * (3.0 / columns) ** 0.5).to(dtype)

    return ExpertWeights(
        w13=matrix(5, up_rows, hidden_size),
        w2=matrix(6, hidden_size, intermediate_size),
        w13_bias=matrix(7, up_rows, 1)[..., 0] if bias else None,
        w2_bias=matrix(8, hidden_size, 1)[..., 0] if bias else None,
    )


def local_experts(num_experts: int, rank: int, ep_size: int, placement: str = "linear") -> list[int]:
    """Global ids of the experts of a rank, in slot order. Counts differ by at most 1 between ranks.

    Args:
        placement: "linear" (consecutive ids, the first ranks take one more) or "round_robin" (id % R), as vLLM places.

    >>> [local_experts(5, r, 2) for r in range(2)], [local_experts(5, r, 2, "round_robin") for r in range(2)]
    ([[0, 1, 2], [3, 4]], [[0, 2, 4], [1, 3]])
    """
    if placement == "round_robin":
        return list(range(rank, num_experts, ep_size))
    if placement != "linear":
        raise ValueError(f"placement is linear or round_robin, not {placement!r}")
    base, more = divmod(num_experts, ep_size)
    start = rank * base + min(rank, more)
    return list(range(start, start + base + (rank < more)))


def expert_map(num_experts: int, local: Sequence[int]) -> torch.Tensor:
    """int32 [E]: global id -> slot in ``local``, or -1 for an expert of another rank."""
    slots = torch.full((num_experts,), -1, dtype=torch.int32)
    slots[torch.tensor(list(local), dtype=torch.int64)] = torch.arange(len(local), dtype=torch.int32)
    return slots
