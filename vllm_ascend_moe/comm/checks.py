"""Checks every strategy makes before its first collective, so that a fault is an error here and not a hang there."""

from __future__ import annotations

import torch

from vllm_ascend_moe.errors import (
    CommError,
    DtypeError,
    InvalidValueError,
    LayoutError,
    PlacementError,
    ShapeError,
)
from vllm_ascend_moe.layout import TokenLayout
from vllm_ascend_moe.ops.native import Group
from vllm_ascend_moe.placement import ExpertPlacement

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
    """Raises LayoutError, ShapeError, DtypeError, or InvalidValueError (devices), where inputs do not fit together."""
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
    for name, other in (("topk_weights", topk_weights), ("topk_ids", topk_ids), ("scales", scales)):
        if other is not None and other.device != hidden.device:
            raise InvalidValueError(
                name + ".device", other.device, f"hidden's, {hidden.device}", f"Move it: {name}.to(hidden.device)."
            )
    if scales is not None and scales.shape[:1] != rows:
        raise ShapeError("scales.shape", tuple(scales.shape), f"[{rows[0]}, ...]", "Pass one scale row per token.")
    if num_experts < 1:
        raise ShapeError("num_experts", num_experts, "1 or more", "Pass the global number of experts.")


def check_placement_group(placement: ExpertPlacement, group: Group) -> None:
    """Raises PlacementError where a placement was made for another number of ranks."""
    if placement.ep_size != group.world_size:
        raise PlacementError(
            "placement.ep_size",
            placement.ep_size,
            f"the group's world_size = {group.world_size}",
            "Build the placement for the group that communicates; see ExpertPlacement.restrict.",
        )


def check_placement_experts(placement: ExpertPlacement, num_experts: int) -> None:
    """Raises PlacementError where a placement was made for another number of experts."""
    if placement.num_experts != num_experts:
        raise PlacementError(
            "num_experts",
            num_experts,
            f"the placement's {placement.num_experts}",
            "Pass the number of physical experts (redundant ones included), and ids of physical experts.",
        )


def check_handle(handle: object, kind: type) -> None:
    """Raises ShapeError where ``handle`` was not made by a dispatch of the same strategy."""
    if not isinstance(handle, kind):
        raise ShapeError(
            "handle", type(handle).__name__, "the handle of this dispatch", "Pass Dispatched.handle unchanged."
        )


def comm_error(error: RuntimeError, strategy: str, step: str, group: Group) -> RuntimeError:
    """What to raise for a backend's error in a collective; memory that ran out stays what it is."""
    if isinstance(error, torch.OutOfMemoryError):
        return error
    return CommError(strategy, step, group_label(group), f"{type(error).__name__}: {error}".rstrip(". \n"))


def group_label(group: Group) -> str:
    """A group by its name, for messages: ``ep:0, rank 1 of 4``."""
    process_group = getattr(group, "device_group", None)
    name = getattr(group, "unique_name", None) or getattr(process_group, "group_desc", None) or "the group"
    return f"{name}, rank {group.rank_in_group} of {group.world_size}"
