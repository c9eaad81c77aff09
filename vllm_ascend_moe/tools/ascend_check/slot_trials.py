"""Trials of the kernels of slots: 37 rows in three blocks of 16, 10 of 20 experts here, rows that name one twice."""

from __future__ import annotations

from collections.abc import Callable

import torch

from vllm_ascend_moe.tools.ascend_check.trial import Arguments, Trial

_UNTOUCHED = 7
_ROWS, _TOPK, _EXPERTS, _LOCAL, _BLOCK, _BLOCKS = 37, 3, 20, 10, 16, 3


def _routing() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """ids with unrouted and unknown ones; a map; local experts of the choices or -1; bool [rows, E_l], who has what."""
    ids = torch.randint(-1, _EXPERTS + 2, (_ROWS, _TOPK), dtype=torch.int32, generator=torch.Generator().manual_seed(9))
    ids[::4, 2] = ids[::4, 0]
    expert_map = torch.full((_EXPERTS,), -1, dtype=torch.int32)
    expert_map[::2] = torch.arange(_LOCAL, dtype=torch.int32).flip(0)
    known = (ids >= 0) & (ids < _EXPERTS)
    local = torch.where(known, expert_map[torch.where(known, ids, 0).long()], -1)
    return ids, expert_map, local, (local[..., None] == torch.arange(_LOCAL)).any(1)


def _block_counts(member: torch.Tensor) -> torch.Tensor:
    counts = torch.zeros((_BLOCKS, 16), dtype=torch.int32)
    for block, part in enumerate(member.split(_BLOCK)):
        counts[block, :_LOCAL] = part.sum(0)
    return counts


def _count() -> Trial:
    ids, expert_map, _, member = _routing()
    out = torch.full((_BLOCKS, 16), _UNTOUCHED, dtype=torch.int32)
    return Trial([ids, expert_map, out, _ROWS, _EXPERTS, _LOCAL, _TOPK], lambda: [(out, _block_counts(member), 0.0)])


def _slot() -> Trial:
    ids, expert_map, local, member = _routing()
    slots = torch.full((_ROWS, _TOPK), _UNTOUCHED, dtype=torch.int32)
    counts = torch.full((_LOCAL,), _UNTOUCHED, dtype=torch.int32)
    places = member.cumsum(0) - 1 + torch.arange(_LOCAL) * _ROWS
    wanted = torch.where(local >= 0, places.gather(1, local.clamp(min=0).long()), -1)
    arguments: Arguments = [ids, expert_map, _block_counts(member), slots, counts]
    arguments += [_ROWS, _EXPERTS, _LOCAL, _TOPK, _BLOCKS]
    return Trial(arguments, lambda: [(slots, wanted, 0.0), (counts, member.sum(0), 0.0)])


SLOT_TRIALS: dict[str, Callable[[], Trial]] = {"slot_count_16": _count, "slot_16": _slot}
