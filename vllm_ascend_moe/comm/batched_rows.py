"""Rows into the batched format and back, on the device alone: every shape is known beforehand, nothing is read back.

Three forms with the same results: Triton on CUDA devices that have it, native code on CPU, plain torch everywhere.

Symbols: n rows received (R*C); K top-k; E experts; E_l local experts; H hidden size. A slot is a row of the
``[E_l * n]`` rows by expert, ``expert * n + position``; -1 is no slot.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch

from vllm_ascend_moe.ops.extension import native_available

_NATIVE_SUMS = (torch.bfloat16, torch.float16, torch.float32)


class _Operators(NamedTuple):
    """The operators of csrc/cpu/batched_rows.cpp; a look-up in ``torch.ops`` costs as much as a small one."""

    plan: Any
    scatter: Any
    sum: Any


@cache
def _native() -> _Operators:
    ops = torch.ops.ascend_moe
    return _Operators(plan=ops.plan_slots.default, scatter=ops.scatter_rows.default, sum=ops.sum_slots.default)


@cache
def form_on(device_type: str) -> str:
    """ "triton", "native" or "torch": what runs on a device."""
    if device_type == "cpu":
        return "native" if native_available() else "torch"
    return "triton" if device_type == "cuda" and find_spec("triton") is not None else "torch"


def slot_table(expert_map: torch.Tensor, num_local: int) -> torch.Tensor:
    """What :func:`plan_slots` looks experts up in.

    Args:
        expert_map: int32 [E], local expert or -1; num_local: E_l.

    Returns:
        For native code and Triton the map itself; else int64 [E + 2]: the local expert by ``id + 1``, and E_l
        ("nowhere") for other ranks' experts and at both ends, for the ids -1 and E.
    """
    if form_on(expert_map.device.type) != "torch":
        return expert_map
    table = torch.full((expert_map.numel() + 2,), num_local, dtype=torch.int64, device=expert_map.device)
    table[1:-1] = torch.where(expert_map < 0, num_local, expert_map)
    return table


def plan_slots(topk_ids: torch.Tensor, table: torch.Tensor, num_local: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Which slot every choice gets. An expert's rows keep the order of the rows received.

    A row that names an expert twice has one slot there, so that no expert has more than n rows.

    Args:
        topk_ids: int32 or int64 [n, K], global ids; others than 0..E-1 have no slot. n is 1 or more.
        table: of :func:`slot_table`; num_local: E_l.

    Returns:
        int32 [n, K] slots, contiguous, and int32 [E_l] rows of each expert.
    """
    form = form_on(topk_ids.device.type)
    if form == "native":
        return _native().plan(topk_ids, table, num_local)
    if form == "triton":
        from vllm_ascend_moe.kernels.slots import plan_slots as plan

        return plan(topk_ids, table, num_local)
    rows = topk_ids.shape[0]
    # One clamp makes every id that is out of range one of the two at the ends of the table.
    local = table[topk_ids.clamp(-1, table.numel() - 2) + 1].t()
    # Experts along dim 0: a scan along the last dim is the one that runs in parallel.
    member = torch.zeros((num_local + 1, rows), dtype=torch.int32, device=topk_ids.device).scatter_(0, local, 1)
    ends = member.cumsum(1, dtype=torch.int32)
    slots = torch.add(ends.gather(0, local) - 1, local, alpha=rows)
    slots = torch.where(local < num_local, slots, -1).t()
    return slots.to(torch.int32, memory_format=torch.contiguous_format), ends[:num_local, -1].contiguous()


def scatter_rows(x: torch.Tensor, slots: torch.Tensor, out: torch.Tensor) -> None:
    """``out[slots[i, k]] = x[i]``; rows that no choice names keep what they hold.

    Args:
        x: [n, ...], any dtype; rows may be strided, a row is contiguous. slots: int32 [n, K], contiguous.
        out: [E_l * n + 1, ...], contiguous; its last row is where plain torch writes choices that have no slot.
    """
    form = form_on(x.device.type)
    if form == "native":
        _native().scatter(x, slots, out)
    elif form == "triton":
        from vllm_ascend_moe.kernels.permute import scatter_rows as scatter

        scatter(x.flatten(1) if x.dim() > 1 else x[:, None], slots, out.view(out.shape[0], -1))
    else:
        out[torch.where(slots < 0, out.shape[0] - 1, slots)] = x[:, None]


def sum_slots(y: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor | None, out: torch.Tensor) -> None:
    """``out[i] = sum over k of weights[i, k] * y[slots[i, k]]`` in order of k, in fp32, rounded once.

    A choice without a slot adds exactly 0, whatever its weight; no row that nobody chose is used.

    Args:
        y: [slots, H], contiguous; slots: int32 [n, K], contiguous; weights: fp32 [n, K], None: all 1.
        out: [n, H] in the dtype of y, or wider.
    """
    form = form_on(y.device.type)
    if y.shape[0] == 0:
        out.zero_()
    elif form == "native" and y.dtype in _NATIVE_SUMS:
        _native().sum(y, slots, weights, out)
    elif form == "triton":
        from vllm_ascend_moe.kernels.combine import combine

        combine(y, slots, weights, out=out)
    else:
        out.copy_(_sum_slots(y, slots, weights))


def _sum_slots(y: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    wide = torch.promote_types(y.dtype, torch.float32)
    total = torch.zeros((slots.shape[0], y.shape[1]), dtype=wide, device=y.device)
    has_slot, safe = slots >= 0, slots.clamp(min=0)
    for k in range(slots.shape[1]):
        row = y[safe[:, k]]
        # Selected, not multiplied by 0: the row that is read instead may hold NaN.
        total += torch.where(has_slot[:, k, None], row if weights is None else row * weights[:, k, None], 0)
    return total


def block_rows(ranks: int, capacity: int, device: torch.device) -> torch.Tensor:
    """int32 [C, R], slots of R blocks of C rows: the row of block r that belongs to token t, r * C + t."""
    rows = torch.arange(ranks * capacity, dtype=torch.int32, device=device)
    return rows.view(ranks, capacity).t().contiguous()


def sum_blocks(x: torch.Tensor, rows: torch.Tensor, dtype: torch.dtype, *, in_order: bool) -> torch.Tensor:
    """The sum over R of the first T rows of each block of ``x`` [R, C, H], in fp32, rounded once to ``dtype``.

    Args:
        rows: the first T rows of :func:`block_rows`.
        in_order: add blocks one after the other, 0..R-1; else plain torch may choose another fixed order.

    Returns:
        [T, H], a new tensor.
    """
    if not in_order and form_on(x.device.type) == "torch":
        return x[:, : rows.shape[0]].sum(0, dtype=torch.promote_types(x.dtype, torch.float32)).to(dtype)
    out = torch.empty((rows.shape[0], x.shape[2]), dtype=x.dtype, device=x.device)
    sum_slots(x.view(-1, x.shape[2]), rows, None, out)
    return out.to(dtype)
