"""Which row of the batched format every choice gets. As in permute.py, the sort has two passes over blocks of rows (one
where they fit in one block) and no atomics, so that the order is the same in every run.
"""

from __future__ import annotations

import torch
import triton

from vllm_ascend_moe.errors import InvalidValueError, ShapeError
from vllm_ascend_moe.kernels.slot_kernels import slot_count_kernel, slot_kernel
from vllm_ascend_moe.kernels.targets import same_device, summary, target_of
from vllm_ascend_moe.kernels.tiles import slot_block


def plan_slots(topk_ids: torch.Tensor, expert_map: torch.Tensor, num_local: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots of the batched format, ``expert * rows + position``; an expert's rows keep their order.

    Args:
        topk_ids: int32 or int64 [rows, K], global ids, a row is contiguous; others than 0..E-1 have no slot.
        expert_map: int32 [E], contiguous, local expert or -1; num_local: E_l.

    Returns:
        int32 [rows, K] slots, -1 where the choice is not for this rank; int32 [E_l] rows of each expert.

    Raises:
        ShapeError: operands of another shape, dtype or device. InvalidValueError: num_local is negative, or slots do
        not fit int32. InvalidValueError, UnsupportedError: see ``target_of``.
    """
    if topk_ids.dim() != 2 or topk_ids.dtype not in (torch.int32, torch.int64) or topk_ids.stride(1) != 1:
        raise ShapeError("topk_ids", summary(topk_ids), "int32 or int64 [rows, K], last stride 1", "Convert it.")
    if expert_map.dim() != 1 or expert_map.dtype != torch.int32 or not expert_map.is_contiguous():
        raise ShapeError("expert_map", summary(expert_map), "int32 [E], contiguous", "Convert it.")
    same_device(topk_ids, expert_map=expert_map)
    if num_local < 0:
        raise InvalidValueError("num_local", num_local, "0 or more", "Pass how many experts are on this rank.")
    most = ((1 << 31) - 1) // max(num_local, topk_ids.shape[1], 1)
    if topk_ids.shape[0] > most:
        limit = f"at most {most}, since slots are int32"
        raise InvalidValueError("rows", topk_ids.shape[0], limit, "Send fewer tokens at a time.")
    target_of(topk_ids.device)  # the tiles are the same everywhere, where Triton runs at all
    rows, topk = topk_ids.shape
    slots = torch.empty((rows, topk), dtype=torch.int32, device=topk_ids.device)
    counts = torch.zeros(num_local, dtype=torch.int32, device=topk_ids.device)
    if rows == 0 or num_local == 0:
        return slots.fill_(-1), counts
    sizes = {"TOPK": topk, **slot_block(rows, num_local)}
    blocks = triton.cdiv(rows, sizes["ROWS"])
    known = (expert_map.numel(), num_local, topk_ids.stride(0))
    block_counts = None
    if blocks > 1:
        block_counts = torch.empty((blocks, sizes["E_BLOCK"]), dtype=torch.int32, device=topk_ids.device)
        slot_count_kernel[(blocks,)](topk_ids, expert_map, block_counts, rows, *known, **sizes)
    slot_kernel[(blocks,)](topk_ids, expert_map, block_counts, slots, counts, rows, *known, blocks, **sizes)
    return slots, counts
