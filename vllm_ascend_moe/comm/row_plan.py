"""Which rank gets which token, and where its partial sums come back: the plan of the all-to-all by row.

Two forms with the same results: native code on CPU, plain torch everywhere. Plain torch does what does not depend on
the number of rows first, so that a device computes it while the host waits for that number.

Symbols: T tokens of this rank; K top-k; E experts; R ranks; S rows this rank sends, by destination and then by token.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch

from vllm_ascend_moe.ops.extension import native_available
from vllm_ascend_moe.placement import ExpertPlacement


class RowPlan(NamedTuple):
    """How T tokens become S rows, and S rows T tokens again."""

    entries: torch.Tensor
    """[T, K] in the ids' dtype: id + 1, or 0 or E + 1 for an id outside [0, E)."""
    counts: torch.Tensor
    """int64 [R]: rows for each rank."""
    slots: torch.Tensor
    """int32 [T, min(K, R)]: the rows of each token in the order of ranks, then -1."""
    ends: torch.Tensor | None
    """int64 [R * T], plain torch: how many rows there are up to each (rank, token) pair, this one included."""
    known_sources: torch.Tensor | None
    """int64 [S], native code: the token of each row."""

    def sources(self, rows: int) -> torch.Tensor:
        """int64 [S]: the token of each row.

        Args:
            rows: S, the sum of ``counts``.
        """
        if self.ends is None:
            assert self.known_sources is not None
            return self.known_sources
        # Row n is the pair at which the running count becomes n + 1.
        pairs = torch.searchsorted(self.ends, torch.arange(1, rows + 1, device=self.ends.device))
        return pairs % max(1, self.entries.shape[0])


class _Operators(NamedTuple):
    """The operators of csrc/cpu/sent_rows.cpp; a look-up in ``torch.ops`` costs as much as a small one."""

    plan: Any
    look_up: Any


@cache
def _native() -> _Operators:
    ops = torch.ops.ascend_moe
    return _Operators(plan=ops.plan_rows.default, look_up=ops.look_up.default)


def uses_native(x: torch.Tensor) -> bool:
    """Whether native code works on this tensor."""
    return x.device.type == "cpu" and native_available()


def plan_rows(topk_ids: torch.Tensor, owners: torch.Tensor, ep_size: int) -> RowPlan:
    """One row for each (token, rank) pair where the rank has one of the token's experts.

    Args:
        topk_ids: int32 or int64 [T, K], any values.
        owners: of :func:`owner_table`.
        ep_size: R.
    """
    if uses_native(topk_ids):
        index, counts, slots, sources = _native().plan(topk_ids, owners, ep_size)
        return RowPlan(index, counts, slots, None, sources)
    entries = topk_ids.clamp(-1, owners.numel() - 2) + 1
    tokens = entries.shape[0]
    ranks = owners.index_select(0, entries.flatten()).view(entries.shape).t()
    # One line more than ranks takes what goes nowhere.
    sent = torch.zeros((ep_size + 1, tokens), dtype=torch.int64, device=entries.device).scatter_(0, ranks, 1)[:-1]
    ends = sent.flatten().cumsum(0)
    # Column by column, the rows of a token in the order of ranks, counted from 1; line 0 takes pairs that are not sent.
    width = min(entries.shape[1], ep_size)
    rows = torch.zeros((width + 1, tokens), dtype=torch.int64, device=entries.device)
    rows.scatter_(0, sent.cumsum(0).mul_(sent), ends.view(sent.shape))
    slots = torch.empty((tokens, width), dtype=torch.int32, device=entries.device)
    torch.sub(rows[1:].t(), 1, out=slots)
    return RowPlan(entries, sent.sum(1), slots, ends, None)


def look_up(index: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """``table[index]`` [rows, K], contiguous, of ``index`` [rows, K] (rows may be strided) in the dtype of both."""
    if uses_native(index):
        return _native().look_up(index, table)
    return table.index_select(0, index.flatten()).view(index.shape)


@lru_cache(maxsize=64)
def owner_table(placement: ExpertPlacement, device: torch.device) -> torch.Tensor:
    """int64 [E + 2]: the rank of expert e at e + 1; R where it is on no rank, and at both ends."""
    owners = torch.tensor((-1, *placement.ranks, -1), device=device)
    return torch.where(owners < 0, placement.ep_size, owners)


@lru_cache(maxsize=64)
def own_ids(placement: ExpertPlacement, rank: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[E + 2]: e at e + 1 where expert e lives on ``rank``, else -1."""
    ids = [expert if owner == rank else -1 for expert, owner in enumerate(placement.ranks)]
    return torch.tensor((-1, *ids, -1), dtype=dtype, device=device)
