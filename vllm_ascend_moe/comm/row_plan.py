"""Which rank gets which token, and where its partial sums come back: the plan of the all-to-all by row.

Three forms with the same results: Triton on CUDA and NPU devices that have it, native code on CPU, plain torch
everywhere. Triton writes rows from their tokens, so that it needs no number of rows from the host; plain torch does
what does not depend on that number first, so that a device computes it while the host waits for it.

Symbols: T tokens of this rank; K top-k; E experts; R ranks; S rows this rank sends, by destination and then by token.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch

from vllm_ascend_moe.comm.batched_rows import sum_slots
from vllm_ascend_moe.ops.extension import native_available
from vllm_ascend_moe.ops.row_bytes import RowFormat
from vllm_ascend_moe.placement import ExpertPlacement

# Triton packs rows before the host knows their number, into a buffer for the most there could be, up to this size.
EARLY_BYTES = 64 << 20


class RowPlan(NamedTuple):
    """How T tokens become S rows, and S rows T tokens again."""

    entries: torch.Tensor
    """[T, K] in the ids' dtype: id + 1, or 0 or E + 1 for an id outside [0, E)."""
    codes: torch.Tensor
    """int64 [2, R]: rows for each rank plus the code of the call, and space for what other ranks send of the like."""
    slots: torch.Tensor
    """int32 [T, min(K, R)]: the rows of each token in the order of ranks, then -1."""
    ends: torch.Tensor | None = None
    """int64 [R * T], plain torch: how many rows there are up to each (rank, token) pair, this one included."""
    known_sources: torch.Tensor | None = None
    """int64 [S], native code: the token of each row."""

    def sources(self, rows: int) -> torch.Tensor:
        """int64 [S]: the token of each row; not in Triton's form.

        Args:
            rows: S, the sum of the counts.
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


@cache
def _kernels() -> Any:
    from vllm_ascend_moe.kernels import sent_rows

    return sent_rows


@cache
def form_on(device_type: str) -> str:
    """ "triton", "native" or "torch": what runs on a device."""
    if device_type == "cpu":
        return "native" if native_available() else "torch"
    # On an NPU it must be triton-ascend, not the package of the same name.
    needed = {"cuda": ("triton",), "npu": ("triton", "triton.backends.ascend")}.get(device_type)
    return "triton" if needed is not None and all(find_spec(name) is not None for name in needed) else "torch"


def plan_rows(topk_ids: torch.Tensor, owners: torch.Tensor, ep_size: int, code: int = 0) -> RowPlan:
    """One row for each (token, rank) pair where the rank has one of the token's experts.

    Args:
        topk_ids: int32 or int64 [T, K], any values.
        owners: of :func:`owner_table`.
        ep_size: R. code: what to add to every count.
    """
    form = form_on(topk_ids.device.type)
    if form == "triton":
        return RowPlan(*_kernels().plan_rows(topk_ids, owners, ep_size, code))
    if form == "native":
        index, counts, slots, sources = _native().plan(topk_ids, owners, ep_size)
        return RowPlan(index, _codes(counts, code), slots, None, sources)
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
    return RowPlan(entries, _codes(sent.sum(1), code), slots, ends, None)


def _codes(counts: torch.Tensor, code: int) -> torch.Tensor:
    codes = counts.new_empty((2, counts.shape[0]))
    torch.add(counts, code, out=codes[0])
    return codes


def pack_early(plan: RowPlan, form: RowFormat, columns: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """All rows at the start of a larger buffer, before the host knows S; None: call :func:`pack_rows` once it does."""
    if form_on(plan.slots.device.type) != "triton":
        return None
    most = plan.slots.numel()
    if most * form.row_bytes > EARLY_BYTES:
        return None
    wire: torch.Tensor = _kernels().pack_rows(columns, form.starts, form.row_bytes, plan.slots, most)
    return wire


def pack_rows(plan: RowPlan, form: RowFormat, columns: Sequence[torch.Tensor], rows: int) -> torch.Tensor:
    """uint8 [S, row_bytes]: the rows to send.

    Args:
        columns: what ``form`` was made of, [T, ...] each. rows: S.
    """
    if form_on(plan.slots.device.type) == "triton":
        wire: torch.Tensor = _kernels().pack_rows(columns, form.starts, form.row_bytes, plan.slots, rows)
        return wire
    return form.select(columns, plan.sources(rows))


def sum_rows(returned: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """The sum of each token's rows in the order of ranks, in fp32, rounded once: [T, H], a new tensor.

    Args:
        returned: [S, H], contiguous; slots: of the plan.
    """
    if form_on(returned.device.type) == "triton":
        total: torch.Tensor = _kernels().sum_rows(returned, slots)
        return total
    out = returned.new_empty((slots.shape[0], returned.shape[1]))
    sum_slots(returned, slots, None, out)
    return out


def look_up(index: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """``table[index]`` [rows, K], contiguous, of ``index`` [rows, K] (rows may be strided) in the dtype of both."""
    form = form_on(index.device.type)
    if form == "triton":
        found: torch.Tensor = _kernels().look_up(index, table)
        return found
    if form == "native":
        return _native().look_up(index, table)
    return table.index_select(0, index.flatten()).view(index.shape)


@lru_cache(maxsize=64)
def owner_table(placement: ExpertPlacement, device: torch.device) -> torch.Tensor:
    """[E + 2], int32 for Triton, else int64: the rank of expert e at e + 1; R where it is on none, and at both ends."""
    dtype = torch.int32 if form_on(device.type) == "triton" else torch.int64
    owners = torch.tensor((-1, *placement.ranks, -1), dtype=dtype, device=device)
    return torch.where(owners < 0, placement.ep_size, owners)


@lru_cache(maxsize=64)
def own_ids(placement: ExpertPlacement, rank: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[E + 2]: e at e + 1 where expert e lives on ``rank``, else -1."""
    ids = [expert if owner == rank else -1 for expert, owner in enumerate(placement.ranks)]
    return torch.tensor((-1, *ids, -1), dtype=dtype, device=device)
