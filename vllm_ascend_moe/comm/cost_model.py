"""What one MoE layer's communication costs with each strategy: bytes, memory and time, by formula.

Symbols: T_r tokens of rank r; R ranks; M max(T_r); H hidden size; K top-k; E experts; C capacity; L ranks of one node;
d and o bytes of a token on its way to experts and back; p the chance that a token has an expert on a given rank.

    time = collectives * link.collective_us + host waits * link.sync_us
           + for each direction, the slower of (bytes / link.gb_per_s) and (bytes between nodes / link.node_gb_per_s)

Bytes are those of the rank that sends or receives most. Rows a rank sends to all others, one way:

    padded_allgather    (R-1) * M       an all-gather brings a row into another node once: (R-L) * M / L of them cross
    all_to_all          (R-1) * M * p   a row for each rank with an expert of the token: (R-L) * M * p cross
    batched_all_to_all  (R-1) * C       out an all-gather, (R-L) * C / L cross; back an all-to-all, (R-L) * C cross

The model knows nothing of congestion, message sizes a link is slow at, or imbalance of experts. It ranks strategies.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from vllm_ascend_moe.comm.links import Link
from vllm_ascend_moe.errors import InvalidValueError

Strategy = Literal["padded_allgather", "all_to_all", "batched_all_to_all"]
STRATEGIES: tuple[Strategy, ...] = ("padded_allgather", "all_to_all", "batched_all_to_all")

_ID_AND_WEIGHT_BYTES = 4 + 4
_SCALE_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class MoEShape:
    """The sizes of a MoE layer that its communication depends on, the same on every rank and in every forward.

    Args:
        hidden_size: H; num_experts: E, physical experts, replicas counted; top_k: K.
        element_bytes: of a hidden element as experts return it.
        quantized: one byte an element and one fp32 scale a token on the way to the experts.

    Raises:
        InvalidValueError: a size below 1, or K above E.
    """

    hidden_size: int
    num_experts: int
    top_k: int
    element_bytes: int = 2
    quantized: bool = False

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_experts", "top_k", "element_bytes"):
            if getattr(self, name) < 1:
                raise InvalidValueError(name, getattr(self, name), "1 or more", "Pass the model's own sizes.")
        if self.top_k > self.num_experts:
            raise InvalidValueError(
                "top_k", self.top_k, f"at most num_experts = {self.num_experts}", "Pass the model's own sizes."
            )

    @property
    def dispatch_bytes(self) -> int:
        """d: hidden, scale, ids and weights of one token."""
        hidden = self.hidden_size + _SCALE_BYTES if self.quantized else self.return_bytes
        return hidden + self.top_k * _ID_AND_WEIGHT_BYTES

    @property
    def return_bytes(self) -> int:
        """o: one row of expert output."""
        return self.hidden_size * self.element_bytes


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Of one layer, on the rank that has most to do. Bytes travel to or from other ranks."""

    collectives: int
    syncs: int  # times the host waits for the device
    dispatch_bytes: int
    combine_bytes: int
    node_bytes: int  # part of both that crosses nodes
    memory_bytes: int  # buffers of dispatch, experts' output and combine, at most
    us: float


def rank_share(ranks: int, num_experts: int, top_k: int) -> float:
    """p: the chance that a token with K distinct, equally likely experts of E has one on a given rank of R.

    >>> rank_share(2, 8, 1), rank_share(4, 64, 64), round(rank_share(8, 64, 6), 3)
    (0.5, 1.0, 0.567)
    """
    none = 1.0
    for i in range(top_k):
        none *= max(0.0, num_experts - num_experts / ranks - i) / (num_experts - i)
    return 1.0 - none


@lru_cache(maxsize=4096)
def cost_of(
    strategy: Strategy, local_sizes: tuple[int, ...], shape: MoEShape, link: Link, capacity: int | None, packed: bool
) -> Cost:
    """The cost of one strategy.

    Args:
        local_sizes: T_r of every rank.
        capacity: C, needed for batched_all_to_all.
        packed: whether the padded all-gather sends all tensors in one collective.
    """
    ranks, most = len(local_sizes), max(local_sizes)
    d, o = shape.dispatch_bytes, shape.return_bytes
    node = min(ranks, link.ranks_per_node)
    if strategy == "padded_allgather":
        tensors = 4 if shape.quantized else 3
        return _cost(
            link,
            shape,
            rows=(ranks - 1) * most,
            node_rows=((ranks - node) * most / node,) * 2,
            collectives=2 if packed else tensors + 1,
            memory=ranks * most * (d + o) + most * o,
        )
    if strategy == "all_to_all":
        share = rank_share(ranks, shape.num_experts, shape.top_k)
        # At most: every token of every rank comes here, and every token of this rank goes to min(K, R) ranks.
        memory = (sum(local_sizes) + min(shape.top_k, ranks) * most) * (d + o) + most * o
        return _cost(
            link,
            shape,
            rows=(ranks - 1) * most * share,
            node_rows=((ranks - node) * most * share,) * 2,
            collectives=3,
            syncs=1,
            memory=memory,
        )
    assert capacity is not None
    # Rows gathered; tokens and outputs by expert; partial sums sent and received.
    experts = -(-shape.num_experts // ranks) * (_row_bytes(shape) + o)
    memory = ranks * capacity * (d + experts + 2 * o) + most * o
    return _cost(
        link,
        shape,
        rows=(ranks - 1) * capacity,
        node_rows=((ranks - node) * capacity / node, (ranks - node) * capacity),
        collectives=2,
        memory=memory,
    )


def _row_bytes(shape: MoEShape) -> int:
    """A token's hidden and scale alone."""
    return shape.dispatch_bytes - shape.top_k * _ID_AND_WEIGHT_BYTES


def _cost(
    link: Link,
    shape: MoEShape,
    *,
    rows: float,
    node_rows: tuple[float, float],
    collectives: int,
    memory: int,
    syncs: int = 0,
) -> Cost:
    """``rows`` a rank sends to others each way; ``node_rows`` of them, out and back, cross nodes."""
    us = collectives * link.collective_us + syncs * link.sync_us
    node_bytes = 0.0
    for row_bytes, crossing in zip((shape.dispatch_bytes, shape.return_bytes), node_rows, strict=True):
        us += max(rows * row_bytes / link.gb_per_s, crossing * row_bytes / link.node_gb_per_s) / 1e3
        node_bytes += crossing * row_bytes
    return Cost(
        collectives=collectives,
        syncs=syncs,
        dispatch_bytes=round(rows * shape.dispatch_bytes),
        combine_bytes=round(rows * shape.return_bytes),
        node_bytes=round(node_bytes),
        memory_bytes=memory,
        us=us,
    )
