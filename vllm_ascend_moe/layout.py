"""TokenLayout: which rank holds which tokens, as pure arithmetic. The only source of shapes for the real operators
and for their fake (shape-only) implementations.

Symbols: T_r tokens of rank r (a "local size"); R ep_size, the number of ranks; M max_local_size = max(T_r).
In the padded layout each rank's T_r rows are padded to M, and a gathered tensor has R*M rows: rank r's tokens are
rows r*M .. r*M + T_r - 1, and rows r*M + T_r .. (r+1)*M - 1 are pad.

Rank order is DP, then PCP, then TP: ``r = (dp * PCP + pcp) * TP + tp``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from operator import index
from typing import Protocol

import torch

from vllm_ascend_moe.errors import LayoutError

# A layout is a few hundred bytes; a server sees few distinct size vectors at a time, and old ones are dropped.
_CACHED_LAYOUTS = 4096


class DPMetadataLike(Protocol):
    """What is read of vLLM's DPMetadata."""

    local_sizes: list[int] | None


@dataclass(frozen=True)
class TokenLayout:
    """Token counts of the ranks of one group in one forward. Frozen and hashable; build it with :meth:`of`.

    Args:
        local_sizes: T_r for r in 0..R-1, each 0 or more.
        rank: this process's rank in the group, 0..R-1.

    Raises:
        LayoutError: no ranks, a negative or non-integer size, or a rank outside 0..R-1.

    >>> layout = TokenLayout.of([2, 0, 3], rank=1)
    >>> layout.ep_size, layout.max_local_size, layout.num_tokens, layout.local_size
    (3, 3, 5, 0)
    >>> layout.padded_tokens                          # R * M = 3 * 3
    9
    >>> [list(layout.rows_of(r)) for r in range(3)]   # rank r starts at r * M
    [[0, 1], [], [6, 7, 8]]
    >>> layout.valid_rows().tolist()
    [True, True, False, False, False, False, True, True, True]
    >>> print(layout)
    TokenLayout: 5 tokens on 3 ranks, padded to 9 rows (max_local_size 3, 4 pad rows)
    rank 0 |##.| rows 0-1, 1 pad
    rank 1 |...| no tokens, 3 pad  <- this rank
    rank 2 |###| rows 6-8
    """

    local_sizes: tuple[int, ...]
    rank: int
    max_local_size: int = field(init=False)
    num_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        _check_sizes(self.local_sizes)
        ep_size = len(self.local_sizes)
        if not _is_int(self.rank) or not 0 <= self.rank < ep_size:
            raise LayoutError("rank", self.rank, f"an integer from 0 to {ep_size - 1}", "Pass the rank in the group.")
        # Derived values are stored, since the hot path reads them once per layer.
        object.__setattr__(self, "max_local_size", max(self.local_sizes))
        object.__setattr__(self, "num_tokens", sum(self.local_sizes))

    # -- construction ------------------------------------------------------------------------------------------

    @staticmethod
    def of(local_sizes: Iterable[int], rank: int) -> TokenLayout:
        """The layout of these sizes, from a cache: the same sizes give the same object.

        >>> TokenLayout.of([1, 2], 0) is TokenLayout.of((1, 2), 0)
        True
        """
        return _cached_layout(_as_ints(local_sizes), rank)

    @staticmethod
    def from_dp_metadata(
        dp_metadata: DPMetadataLike, *, rank: int, ep_size: int, dp_size: int, pcp_size: int = 1
    ) -> TokenLayout | None:
        """The EP layout of vLLM's DPMetadata, while the MoE runner has set its ``local_sizes``.

        Args:
            dp_metadata: vLLM's object (its ``local_sizes`` is a list inside ``sp_local_sizes``, else None).
            rank: this process's rank in the EP group.
            ep_size: R; dp_size: DP ranks; pcp_size: PCP ranks per DP rank.

        Returns:
            The layout, or None where no sizes are set or they do not match the EP group.
        """
        if dp_metadata.local_sizes is None:
            return None
        sizes = expand_local_sizes(dp_metadata.local_sizes, ep_size=ep_size, dp_size=dp_size, pcp_size=pcp_size)
        return None if sizes is None else TokenLayout.of(sizes, rank)

    @staticmethod
    def from_dp(
        num_tokens_across_dp: Iterable[int],
        *,
        dp_rank: int,
        tp_rank: int = 0,
        pcp_rank: int = 0,
        tp_size: int = 1,
        pcp_size: int = 1,
    ) -> TokenLayout:
        """The EP layout when sequence parallelism spreads each DP rank's tokens over its TP ranks.

        Each of the ``pcp_size`` PCP ranks of a DP rank holds that DP rank's count; over TP the count n becomes
        ceil(n / TP) rows on every TP rank (the sequence-parallel chunk is padded to a multiple of TP).

        >>> TokenLayout.from_dp([5, 2], dp_rank=1, tp_rank=0, tp_size=2).local_sizes      # ceil(5/2), ceil(2/2)
        (3, 3, 1, 1)
        >>> layout = TokenLayout.from_dp([5, 2], dp_rank=1, pcp_rank=0, tp_rank=1, tp_size=2, pcp_size=2)
        >>> layout.local_sizes, layout.rank               # rank = (1*2 + 0)*2 + 1
        ((3, 3, 3, 3, 1, 1, 1, 1), 5)
        """
        counts = _as_ints(num_tokens_across_dp)
        _check_positive("tp_size", tp_size)
        _check_positive("pcp_size", pcp_size)
        _check_sizes(counts)
        for name, value, size in (
            ("dp_rank", dp_rank, len(counts)),
            ("pcp_rank", pcp_rank, pcp_size),
            ("tp_rank", tp_rank, tp_size),
        ):
            if not 0 <= value < size:
                raise LayoutError(name, value, f"an integer from 0 to {size - 1}", "Pass the rank in its own group.")
        sizes = tuple(-(-n // tp_size) for n in counts for _ in range(pcp_size * tp_size))
        return TokenLayout.of(sizes, (dp_rank * pcp_size + pcp_rank) * tp_size + tp_rank)

    # -- arithmetic --------------------------------------------------------------------------------------------

    @property
    def ep_size(self) -> int:
        """R, the number of ranks."""
        return len(self.local_sizes)

    @property
    def padded_tokens(self) -> int:
        """R * M, the rows of a gathered tensor."""
        return len(self.local_sizes) * self.max_local_size

    @property
    def pad_rows(self) -> int:
        """R * M - T, how many rows of a gathered tensor hold no token."""
        return self.padded_tokens - self.num_tokens

    @property
    def local_size(self) -> int:
        """T_rank, the tokens of this rank."""
        return self.local_sizes[self.rank]

    @property
    def is_uniform(self) -> bool:
        """Whether every rank has the same number of tokens, so that nothing is padded."""
        return self.pad_rows == 0

    def rows_of(self, rank: int) -> range:
        """Rows of the gathered tensor that hold the tokens of ``rank``, in order.

        >>> TokenLayout.of([1, 4], 0).rows_of(1)      # 1 * M .. 1 * M + T_1
        range(4, 8)
        """
        if not 0 <= rank < self.ep_size:
            raise LayoutError("rank", rank, f"an integer from 0 to {self.ep_size - 1}", "Pass a rank of this group.")
        start = rank * self.max_local_size
        return range(start, start + self.local_sizes[rank])

    def valid_rows(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """Which rows of a gathered tensor are tokens.

        Returns:
            bool [R*M], True for a token, False for pad. A new tensor at every call.
        """
        sizes = torch.tensor(self.local_sizes, device=device)
        return (torch.arange(self.max_local_size, device=device) < sizes[:, None]).flatten()

    def chunks(self, max_tokens: int) -> tuple[TokenLayout, ...]:
        """Layouts of consecutive pieces of this forward, each of at most ``max_tokens`` tokens a rank. Cached.

        Chunk i holds tokens ``i * max_tokens .. (i + 1) * max_tokens - 1`` of every rank, as far as it has them. Every
        rank gets the same size vectors and the same number of chunks, at least one: a rank without tokens left takes
        part with 0, since its collectives would be missing otherwise.

        Raises:
            LayoutError: ``max_tokens`` below 1.

        >>> [chunk.local_sizes for chunk in TokenLayout.of([9, 3, 4], 0).chunks(4)]
        [(4, 3, 4), (4, 0, 0), (1, 0, 0)]
        """
        return _cached_chunks(self, max_tokens)

    # -- pictures ----------------------------------------------------------------------------------------------

    def render(self, width: int = 64) -> str:
        """A picture in text: one line a rank, ``#`` a token row, ``.`` a pad row, scaled to ``width`` characters.

        A rank with tokens shows at least one ``#`` and a rank with pad at least one ``.``, whatever the scale
        (below a ``width`` of 2, which could not show both, it is 2).
        """
        head = (
            f"TokenLayout: {self.num_tokens} tokens on {self.ep_size} ranks, padded to {self.padded_tokens} rows "
            f"(max_local_size {self.max_local_size}, {self.pad_rows} pad rows)"
        )
        digits = len(str(self.ep_size - 1))
        return "\n".join([head, *(self._render_rank(rank, width, digits) for rank in range(self.ep_size))])

    def _render_rank(self, rank: int, width: int, digits: int) -> str:
        size, pad = self.local_sizes[rank], self.max_local_size - self.local_sizes[rank]
        cells = min(self.max_local_size, max(width, 2))
        filled = round(size * cells / self.max_local_size) if self.max_local_size else 0
        filled = min(max(filled, 1 if size else 0), cells - (1 if pad else 0))
        rows = self.rows_of(rank)
        where = f"rows {rows.start}-{rows.stop - 1}" if size else "no tokens"
        tail = (f", {pad} pad" if pad else "") + ("  <- this rank" if rank == self.rank else "")
        return f"rank {rank:>{digits}} |{'#' * filled}{'.' * (cells - filled)}| {where}{tail}"

    def __str__(self) -> str:
        return self.render()


def expand_local_sizes(
    local_sizes: Sequence[int],
    *,
    ep_size: int,
    dp_size: int,
    pcp_size: int = 1,
) -> tuple[int, ...] | None:
    """Turns the sizes vLLM reports into one size per EP rank, in DP, PCP, TP order.

    From 0.31 vLLM reports DP x PCP x SP sizes, which already are in EP order; before, DP x SP only, so that each
    DP rank's SP sizes repeat for its PCP ranks.

    Args:
        local_sizes: sizes as reported, of length ``ep_size`` or ``ep_size / pcp_size``.
        ep_size: R, the ranks of the EP group.
        dp_size: DP ranks.
        pcp_size: PCP ranks per DP rank.

    Returns:
        R sizes, or None where the lengths do not match the topology (the caller then falls back).

    >>> expand_local_sizes([1, 2, 3, 4], ep_size=4, dp_size=2)                        # already one per rank
    (1, 2, 3, 4)
    >>> expand_local_sizes([3, 3, 1, 1], ep_size=8, dp_size=2, pcp_size=2)           # SP = 4 / 2 = 2
    (3, 3, 3, 3, 1, 1, 1, 1)
    >>> expand_local_sizes([5, 2], ep_size=4, dp_size=2, pcp_size=2)                 # SP = 2 / 2 = 1
    (5, 5, 2, 2)
    >>> expand_local_sizes([2, 2, 2], ep_size=8, dp_size=2, pcp_size=2) is None      # 3 * 2 != 8
    True
    """
    for name, value in (("ep_size", ep_size), ("dp_size", dp_size), ("pcp_size", pcp_size)):
        _check_positive(name, value)
    sizes = _as_ints(local_sizes)
    if len(sizes) == ep_size:
        return sizes
    if len(sizes) * pcp_size != ep_size or len(sizes) % dp_size:
        return None
    sp_size = len(sizes) // dp_size
    return tuple(
        size for dp in range(dp_size) for _ in range(pcp_size) for size in sizes[dp * sp_size : (dp + 1) * sp_size]
    )


@lru_cache(maxsize=_CACHED_LAYOUTS)
def _cached_layout(local_sizes: tuple[int, ...], rank: int) -> TokenLayout:
    return TokenLayout(local_sizes, rank)


@lru_cache(maxsize=_CACHED_LAYOUTS, typed=True)  # typed: True and 2.0 are refused, also where 1 and 2 are cached
def _cached_chunks(layout: TokenLayout, max_tokens: int) -> tuple[TokenLayout, ...]:
    if not _is_int(max_tokens) or max_tokens < 1:
        raise LayoutError("max_tokens", max_tokens, "an integer of 1 or more", "Pass the bound on tokens in flight.")
    starts = range(0, max(1, layout.max_local_size), max_tokens)
    return tuple(
        _cached_layout(tuple(min(max(size - start, 0), max_tokens) for size in layout.local_sizes), layout.rank)
        for start in starts
    )


def _as_ints(sizes: Iterable[int]) -> tuple[int, ...]:
    """Python ints from ints of any kind (numpy's, a tensor's elements); a float is refused, not rounded."""
    listed = tuple(sizes)
    try:
        return tuple(map(index, listed))
    except TypeError:
        raise LayoutError("local_sizes", listed, "integers", "Pass token counts as ints.") from None


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_positive(name: str, value: int) -> None:
    if not _is_int(value) or value < 1:
        raise LayoutError(name, value, "an integer of 1 or more", "Pass the size of the group.")


def _check_sizes(sizes: tuple[int, ...]) -> None:
    if not sizes:
        raise LayoutError("local_sizes", sizes, "at least one size", "Pass one token count per rank.")
    for rank, size in enumerate(sizes):
        if not _is_int(size) or size < 0:
            raise LayoutError(f"local_sizes[{rank}]", size, "an integer of 0 or more", "Pass token counts as ints.")
