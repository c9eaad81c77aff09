"""Trials of the kernels of the all-to-all by row: 37 tokens in three tiles of 16, experts on 5 ranks of a tile of 8."""

from __future__ import annotations

from collections.abc import Callable

import torch

from vllm_ascend_moe.tools.ascend_check.trial import Trial

_UNTOUCHED = 7
_TOKENS, _TOPK, _EXPERTS, _RANKS, _TILE, _TILES = 37, 3, 12, 5, 16, 3


def _routing() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """ids with unrouted and unknown ones; owners by id + 1, some of no rank; entries; bool [T, R], who gets what."""
    generator = torch.Generator().manual_seed(6)
    ids = torch.randint(-2, _EXPERTS + 2, (_TOKENS, _TOPK), dtype=torch.int32, generator=generator)
    owners = torch.full((_EXPERTS + 2,), _RANKS, dtype=torch.int32)
    owners[1:-1] = torch.randint(0, _RANKS + 1, (_EXPERTS,), dtype=torch.int32, generator=generator)
    entries = ids.clamp(-1, _EXPERTS) + 1
    goes = (owners[entries.long()][..., None] == torch.arange(_RANKS)).any(1)
    return ids, owners, entries, goes


def _block_counts(goes: torch.Tensor) -> torch.Tensor:
    counts = torch.zeros((_TILES, 8), dtype=torch.int32)
    for block, part in enumerate(goes.split(_TILE)):
        counts[block, :_RANKS] = part.sum(0)
    return counts


def _count() -> Trial:
    ids, owners, _, goes = _routing()
    out = torch.full((_TILES, 8), _UNTOUCHED, dtype=torch.int32)
    sizes = (_TOKENS, _TILES, 1, _EXPERTS, _RANKS, _TOPK, 1)
    return Trial([ids, owners, out, *sizes], lambda: [(out, _block_counts(goes), 0.0)])


def _plan(one_launch: bool) -> Trial:
    ids, owners, wanted_entries, goes = _routing()
    entries = torch.full_like(ids, _UNTOUCHED)
    slots, wanted = (torch.full((_TOKENS, _TOPK), value, dtype=torch.int32) for value in (_UNTOUCHED, -1))
    codes, code = torch.full((_RANKS,), _UNTOUCHED), 1 << 20
    ends = goes.t().flatten().cumsum(0).view(_RANKS, _TOKENS)
    for token in range(_TOKENS):
        rows = ends[goes[token], token] - 1
        wanted[token, : len(rows)] = rows
    counted = [] if one_launch else [_block_counts(goes)]
    sizes = (_TOKENS, _TILES, 1, _TILES, code, _EXPERTS, _RANKS, _TOPK, 1)
    return Trial(
        [ids, owners, *counted, entries, slots, codes, *sizes],
        lambda: [(slots, wanted, 0.0), (entries, wanted_entries, 0.0), (codes, goes.sum(0) + code, 0.0)],
    )


def _pack() -> Trial:
    """Rows 1, 4, ... are nobody's; the columns follow each other and leave no word of the row's 76."""
    generator = torch.Generator().manual_seed(7)
    columns = [torch.randint(10, 1 << 30, (6, count), dtype=torch.int32, generator=generator) for count in (70, 3, 3)]
    slots = torch.full((6, 3), -1, dtype=torch.int32)
    slots[:, 0] = torch.randperm(6, generator=generator) * 3
    slots[::2, 1] = torch.tensor([2, 5, 8])
    wire = torch.full((18, 76), _UNTOUCHED, dtype=torch.int32)
    wanted = wire.clone()
    for token in range(6):
        wanted[slots[token][slots[token] >= 0].long()] = torch.cat([column[token] for column in columns])
    return Trial([*columns, slots, wire, 6], lambda: [(wire, wanted, 0.0)])


def _look_up() -> Trial:
    generator = torch.Generator().manual_seed(8)
    index = torch.randint(-1, 15, (33, 5), dtype=torch.int32, generator=generator)
    table = torch.randint(100, 999, (14,), dtype=torch.int32, generator=generator)
    out = torch.full((33, 3), _UNTOUCHED, dtype=torch.int32)
    chosen = index[:, :3].long()
    known = (chosen >= 0) & (chosen < 14)
    wanted = torch.where(known, table[torch.where(known, chosen, 0)], -1)
    return Trial([index, table, out, 33, 14, 5], lambda: [(out, wanted, 0.0)])


ROW_TRIALS: dict[str, Callable[[], Trial]] = {
    "row_count_8": _count,
    "row_plan_8": lambda: _plan(one_launch=False),
    "row_plan_one_launch": lambda: _plan(one_launch=True),
    "pack_rows": _pack,
    "look_up_32": _look_up,
}
