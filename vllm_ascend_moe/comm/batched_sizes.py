"""What the batched strategy sends and keeps, by formula; tests compare it with what its collectives and buffers hold.

Symbols: R ranks; C capacity; E_l local experts; H hidden size; K top-k. None depends on routing or on token counts.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_ascend_moe.ops.torch_form import COLUMN_ALIGN


@dataclass(frozen=True, kw_only=True)
class BatchedSizes:
    """The sizes of one layer on one rank.

    Args:
        ranks: R; capacity: C; num_local: E_l of this rank; hidden_size: H; top_k: K.
        token_bytes: of one element on the way to the experts (1: quantised). output_bytes: of expert outputs.
        scale_bytes: scales of one token, 0 where it has none. id_bytes: of one id.
        exact: partial sums travel in fp32.

    >>> sizes = BatchedSizes(ranks=16, capacity=128, num_local=16, hidden_size=7168, top_k=8)
    >>> sizes.row_bytes, sizes.sent_out, sizes.sent_back      # 15 * 128 rows each way
    (14400, 27648000, 27525120)
    >>> sizes.expert_rows, sizes.cached, sizes.most_at_once   # of them 0.47 GB of tokens, as much of expert outputs
    (32768, 499136512, 1027749888)
    """

    ranks: int
    capacity: int
    num_local: int
    hidden_size: int
    top_k: int
    token_bytes: int = 2
    output_bytes: int = 2
    scale_bytes: int = 0
    id_bytes: int = 4
    exact: bool = False

    @property
    def row_bytes(self) -> int:
        """One token on its way out: hidden, fp32 weights, ids, scales, each from a multiple of 16 bytes on."""
        columns = (self.hidden_size * self.token_bytes, 4 * self.top_k, self.id_bytes * self.top_k, self.scale_bytes)
        return sum(-(-size // COLUMN_ALIGN) * COLUMN_ALIGN for size in columns)

    @property
    def partial_bytes(self) -> int:
        """One token on its way back."""
        return self.hidden_size * (max(4, self.output_bytes) if self.exact else self.output_bytes)

    @property
    def rows(self) -> int:
        """R * C, rows received."""
        return self.ranks * self.capacity

    @property
    def expert_rows(self) -> int:
        """E_l * R * C, rows the experts may get."""
        return self.num_local * self.rows

    @property
    def sent_out(self) -> int:
        """Bytes for other ranks in dispatch; as many come in. As an all-gather without forwarding sends them."""
        return (self.ranks - 1) * self.capacity * self.row_bytes

    @property
    def sent_back(self) -> int:
        """Bytes for other ranks in combine; as many come in."""
        return (self.ranks - 1) * self.capacity * self.partial_bytes

    @property
    def cached(self) -> int:
        """Bytes that stay in the BufferCache: tokens (and scales) by expert, one row more each, and partial sums."""
        by_expert = (self.expert_rows + 1) * (self.hidden_size * self.token_bytes + self.scale_bytes)
        return by_expert + (self.rows * self.partial_bytes if self.ranks > 1 else 0)

    @property
    def most_at_once(self) -> int:
        """Bytes of a layer at its largest: what is cached, the gathered rows, expert outputs, and sums come back."""
        outputs = self.expert_rows * self.hidden_size * self.output_bytes
        returned = self.rows * self.partial_bytes if self.ranks > 1 else 0
        return self.cached + self.rows * self.row_bytes + outputs + returned
