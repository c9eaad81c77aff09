"""What one MoE layer's communication costs with each strategy: bytes, memory and time, by formula.

Symbols: T_r tokens of rank r, T of all; R ranks; M max(T_r); H hidden size; K top-k; E experts; C capacity; L ranks of
one node; d and o bytes of a token on its way to experts and back; p the chance that it has an expert on a given rank.

    time = collectives * link.collective_us + host waits * link.sync_us
           + for each direction, the slower of (bytes / link.gb_per_s) and (bytes between nodes / link.node_gb_per_s)

Bytes are those of the rank that sends or receives most. Rows a rank sends to all others, one way:

    padded_allgather    (R-1) * M       an all-gather brings a row into another node once: (R-L) * M / L of them cross
    all_to_all          (R-1) * M * p   a row for each rank with an expert of the token: (R-L) * M * p cross
    batched_all_to_all  (R-1) * C       out an all-gather, (R-L) * C / L cross; back an all-to-all, (R-L) * C cross
    mc2                 M * K * (R-1)/R a row for each choice of a token, of which (R-L)/R cross, all where the link has
                                        mc2_by_network; a launch is assumed to take a collective's time
    uneven_allgather    (R-1) * M       where its own rank sends each row to all others; T - min(T_r) where rows are
                                        forwarded from rank to rank (Link.uneven). Nodes as for padded_allgather

The model knows nothing of congestion, message sizes a link is slow at, or imbalance of experts. It ranks strategies.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from typing import Literal, get_args

from vllm_ascend_moe.comm.links import Link
from vllm_ascend_moe.errors import InvalidValueError

Strategy = Literal["padded_allgather", "all_to_all", "batched_all_to_all", "mc2", "uneven_allgather"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
Payload = Literal["none", "int8", "fp8"]

_ID_AND_WEIGHT_BYTES = 4 + 4
_SCALE_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class MoEShape:
    """The sizes of a MoE layer that its communication depends on, the same on every rank and in every forward.

    Args:
        hidden_size: H; num_experts: E, physical experts, replicas counted; top_k: K.
        element_bytes: of a hidden element as experts return it.
        payload: int8 and fp8 are one byte an element and one fp32 scale a token on the way to the experts.
        splits: groups that share the E experts: each has E / splits of them, and all have the same tokens (TP ranks
            without sequence parallelism).

    Raises:
        InvalidValueError: a size below 1, or K above E.
    """

    hidden_size: int
    num_experts: int
    top_k: int
    element_bytes: int = 2
    payload: Payload = "none"
    splits: int = 1

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_experts", "top_k", "element_bytes", "splits"):
            if getattr(self, name) < 1:
                raise InvalidValueError(name, getattr(self, name), "1 or more", "Pass the model's own sizes.")
        if self.top_k > self.num_experts:
            raise InvalidValueError(
                "top_k", self.top_k, f"at most num_experts = {self.num_experts}", "Pass the model's own sizes."
            )

    @property
    def quantized(self) -> bool:
        """Whether tokens travel in one byte an element."""
        return self.payload != "none"

    @property
    def row_bytes(self) -> int:
        """Hidden and scale of one token on its way out."""
        return self.hidden_size + _SCALE_BYTES if self.quantized else self.return_bytes

    @property
    def dispatch_bytes(self) -> int:
        """d: hidden, scale, ids and weights of one token."""
        return self.row_bytes + self.top_k * _ID_AND_WEIGHT_BYTES

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


def rank_share(held: float, num_experts: int, top_k: int) -> float:
    """p: the chance that a token with K distinct, equally likely experts of E has one of the ``held`` ones of a rank.

    >>> rank_share(4, 8, 1), rank_share(16, 64, 64), round(rank_share(8, 64, 6), 3)
    (0.5, 1.0, 0.567)
    """
    none = 1.0
    for i in range(top_k):
        none *= max(0.0, num_experts - held - i) / (num_experts - i)
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
    ranks, most, total = len(local_sizes), max(local_sizes), sum(local_sizes)
    d, o = shape.dispatch_bytes, shape.return_bytes
    node = min(ranks, link.ranks_per_node)
    held = shape.num_experts / (ranks * shape.splits)
    tensors = 1 if packed else 4 if shape.quantized else 3
    gathered = (ranks - 1) * most
    if strategy == "padded_allgather":
        memory = ranks * most * (d + o) + most * o
        return _cost(link, shape, gathered, ((ranks - node) * most / node,) * 2, tensors + 1, memory)
    if strategy == "uneven_allgather":
        moved = total - min(local_sizes) if link.uneven == "forwarded" else gathered
        memory = total * (d + o) + most * o
        crossing = (ranks - node) / max(1, ranks - 1) * moved / node
        return _cost(link, shape, moved, (crossing,) * 2, tensors + 1, memory)
    if strategy == "all_to_all":
        share = rank_share(held, shape.num_experts, shape.top_k)
        # At most: every token of every rank comes here, and every token of this rank goes to min(K, R) ranks.
        memory = (total + min(shape.top_k, ranks) * most) * (d + o) + most * o
        return _cost(link, shape, gathered * share, ((ranks - node) * most * share,) * 2, 3, memory, syncs=1)
    if strategy == "mc2":
        choices = most * shape.top_k  # those of other groups' experts too: they go somewhere, with a weight of 0
        arriving = most * ranks * min(ceil(held), shape.top_k)
        memory = arriving * (shape.row_bytes + o) + most * o
        rows = choices * (ranks - 1) / ranks
        crossing = rows if link.mc2_by_network else choices * (ranks - node) / ranks
        return _cost(link, shape, rows, (crossing,) * 2, 2, memory, out_bytes=shape.row_bytes)
    assert capacity is not None
    # Rows gathered; tokens and outputs by expert; partial sums sent and received.
    memory = ranks * capacity * (d + ceil(held) * (shape.row_bytes + o) + 2 * o) + most * o
    crossing_out, crossing_back = (ranks - node) * capacity / node, (ranks - node) * capacity
    return _cost(link, shape, (ranks - 1) * capacity, (crossing_out, crossing_back), 2, memory)


def _cost(
    link: Link,
    shape: MoEShape,
    rows: float,
    node_rows: tuple[float, float],
    collectives: int,
    memory: int,
    *,
    syncs: int = 0,
    out_bytes: int | None = None,
) -> Cost:
    """``rows`` a rank sends to others each way, of ``out_bytes`` (None: d) and o bytes; ``node_rows`` of them, out and
    back, cross nodes."""
    widths = shape.dispatch_bytes if out_bytes is None else out_bytes, shape.return_bytes
    us = collectives * link.collective_us + syncs * link.sync_us
    node_bytes = 0.0
    for row_bytes, crossing in zip(widths, node_rows, strict=True):
        us += max(rows * row_bytes / link.gb_per_s, crossing * row_bytes / link.node_gb_per_s) / 1e3
        node_bytes += crossing * row_bytes
    return Cost(
        collectives=collectives,
        syncs=syncs,
        dispatch_bytes=round(rows * widths[0]),
        combine_bytes=round(rows * widths[1]),
        node_bytes=round(node_bytes),
        memory_bytes=memory,
        us=us,
    )
