"""Checks every strategy makes before its first collective, so that a fault is an error here and not a hang there."""

from __future__ import annotations

import torch

from vllm_ascend_moe.errors import DtypeError, LayoutError, ShapeError
from vllm_ascend_moe.layout import TokenLayout
from vllm_ascend_moe.ops.native import Group

ID_DTYPES = (torch.int32, torch.int64)


def check_dispatch_inputs(
    hidden: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    scales: torch.Tensor | None,
    num_experts: int,
    layout: TokenLayout,
    group: Group,
) -> None:
    """Raises LayoutError, ShapeError or DtypeError where the inputs of a dispatch do not fit together."""
    if (layout.ep_size, layout.rank) != (group.world_size, group.rank_in_group):
        raise LayoutError(
            "layout (ep_size, rank)",
            (layout.ep_size, layout.rank),
            f"the group's (world_size, rank) = {(group.world_size, group.rank_in_group)}",
            "Build the layout for the group that communicates.",
        )
    if hidden.dim() != 2 or hidden.shape[0] != layout.local_size:
        raise LayoutError(
            "hidden.shape",
            tuple(hidden.shape),
            f"[local_size = {layout.local_size}, H]",
            "Pass this rank's own tokens, or build the layout from the counts of this forward.",
        )
    rows = (layout.local_size,)
    for name, tensor in (("topk_weights", topk_weights), ("topk_ids", topk_ids)):
        if tensor.dim() != 2 or tensor.shape[:1] != rows or tensor.shape != topk_ids.shape:
            raise ShapeError(name + ".shape", tuple(tensor.shape), f"[{rows[0]}, K]", "Pass one row per token.")
    if topk_ids.dtype not in ID_DTYPES:
        raise DtypeError("topk_ids.dtype", topk_ids.dtype, "int32 or int64", "Cast the ids: topk_ids.to(torch.int32).")
    if not topk_weights.is_floating_point():
        raise DtypeError("topk_weights.dtype", topk_weights.dtype, "a floating-point type", "Pass router weights.")
    if scales is not None and scales.shape[:1] != rows:
        raise ShapeError("scales.shape", tuple(scales.shape), f"[{rows[0]}, ...]", "Pass one scale row per token.")
    if num_experts < 1:
        raise ShapeError("num_experts", num_experts, "1 or more", "Pass the global number of experts.")
